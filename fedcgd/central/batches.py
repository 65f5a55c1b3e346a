"""Which examples are in which round: a pure function of the plan's participation, their number and a secret."""

import math
from collections.abc import Callable
from functools import cached_property

from fedcgd.participation import Participation
from fedcgd.participation.batches import ExampleRounds
from fedcgd.participation.samplings import Rows


class Batches:
    """The rows of each round, for examples 0 … `examples` − 1 as the users of a `Participation` (`ExampleRounds`).

    Args:
        participation: that of the plan.
        examples: how many there are.
        key: makes the secret that decides, when it is first needed.

    Raises:
        ValueError: if rounds without sampling are more than the examples, so that some have none.
    """

    def __init__(self, participation: Participation, examples: int, key: Callable[[], bytes]) -> None:
        self._participation, self._examples, self._key = participation, examples, key
        self._parts = max(participation.min_separation, math.ceil(participation.rounds / participation.participations))
        if not participation.is_secret and examples < self._parts:
            raise ValueError(
                f"{examples} examples are too few for {self._parts} rounds in which each takes part once: plan for at most "
                f"min_separation={examples}"
            )

    @property
    def planned_size(self) -> float:
        """How many examples a round has by the plan, which the sums are divided by."""
        rate = self._participation.expected_rate
        return self._examples * (1 / self._parts if rate is None else rate)

    def rows(self, round: int) -> Rows:
        """The examples of a round, in increasing order.

        Args:
            round: from 0, below the plan's rounds.
        """
        return self._rounds.rows(round)

    @cached_property
    def _rounds(self) -> ExampleRounds:
        return ExampleRounds(self._participation, self._examples, self._key(), self._parts)
