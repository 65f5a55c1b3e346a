"""Which examples are in which round: a pure function of the plan's participation, their number and a secret."""

import hashlib
import math
from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedcgd.participation import Participation
from fedcgd.participation.cohorts import bin_of, place, rounds_of

Rows = NDArray[np.intp]


class Batches:
    """The rows of each round, for examples 0 … `examples` − 1 as the users of a `Participation`.

    - none: a fixed split in a random order, the same in every epoch.
    - balls-in-bins: each example in one bin, drawn once.
    - b-min-sep, random-allocation: each example's rounds, drawn once for the whole run.
    - poisson, cyclic-poisson: drawn anew in each round, for cyclic from the round's group of a fixed random split.

    The first three as a server draws users that are called "0", "1", … (`fedcgd.participation.cohorts`).

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
        rows, rate = self._groups[round % len(self._groups)], self._participation.sampling_rate
        if rate is None or rate >= 1 or self._participation.sampling == "b-min-sep":
            return rows
        stream = hashlib.shake_256(self._key() + b"fedcgd batches " + f"round {round}".encode())
        draws = np.frombuffer(stream.digest(8 * len(rows)), dtype="<u8")
        return rows[draws < np.uint64(int(rate * 2**64))]  # as integers, so that no rounding raises the rate

    @cached_property
    def _groups(self) -> list[Rows]:
        """The examples of each bin, of each part of the fixed split, or of each round."""
        participation, key = self._participation, self._key()
        names = list(map(str, range(self._examples)))
        match participation.sampling:
            case "balls-in-bins":
                bins = np.array([bin_of(name, participation.min_separation, key) for name in names])
                return [np.flatnonzero(bins == j) for j in range(participation.min_separation)]
            case "b-min-sep" | "random-allocation":
                drawn: list[list[int]] = [[] for _ in range(participation.rounds)]
                for i, name in enumerate(names):
                    for round in rounds_of(name, participation, key):
                        drawn[round].append(i)
                return [np.array(rows, dtype=np.intp) for rows in drawn]
            case "none" | "poisson" | "cyclic-poisson":
                order = np.argsort(np.array([place(name, key) for name in names], np.uint64), kind="stable")
                parts = participation.min_separation if participation.is_secret else self._parts
                return [np.sort(part) for part in np.array_split(order, parts)]
