"""Which examples are in which round: a pure function of the participation, their number and a secret."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fedcgd.participation.draws import DRAWS
from fedcgd.participation.participation import Participation
from fedcgd.participation.samplings import Rows


@dataclass(frozen=True, eq=False)
class ExampleRounds:
    """Examples 0 … `examples` − 1 as the users of a participation, all of them always there.

    They are drawn as a server draws users that are called "0", "1", …, but for coins of Poisson sampling: those of a round are
    one keyed stream.

    Args:
        participation: that of the plan.
        examples: how many there are.
        key: the secret that decides.
        parts: into how many the examples are split without a sampling.
    """

    participation: Participation
    examples: int
    key: bytes = field(repr=False)
    parts: int

    def rows(self, round: int) -> Rows:
        """The examples of a round, in increasing order.

        Args:
            round: from 0, below the plan's rounds.
        """
        rows, rate = self.groups[round % len(self.groups)], self._coin
        if rate is None or rate >= 1:
            return rows
        stream = hashlib.shake_256(self.key + b"fedcgd batches " + f"round {round}".encode())
        draws = np.frombuffer(stream.digest(8 * len(rows)), dtype="<u8")
        return rows[draws < np.uint64(int(rate * DRAWS))]  # as integers, so that no rounding raises the rate

    @property
    def planned_size(self) -> float:
        """How many examples a round has by the plan, which sums are divided by."""
        rate = self.participation.expected_rate
        return self.examples * (1 / self.parts if rate is None else rate)

    @cached_property
    def _coin(self) -> float | None:
        return self.participation.scheme.coin(self.participation)

    @cached_property
    def groups(self) -> list[Rows]:
        """The examples of each bin, of each part of the fixed split, or of each round."""
        names = list(map(str, range(self.examples)))
        return self.participation.scheme.groups(self.participation, names, self.key, self.parts)
