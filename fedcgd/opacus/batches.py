"""Which examples are in which step: a batch sampler for each sampling that is accounted for."""

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from fedcgd.participation import Participation

Indices = NDArray[np.intp]


class RoundBatches(Sampler[list[int]]):
    """The batches of one epoch, one per round, from the first round that has not been released yet.

    `released()` says how many have been. So an epoch that was left early goes on where it stopped, and the plan's
    separation holds however the loop around it is written. An epoch has `min_separation` rounds, or as many as
    `epoch_rounds` says.

    - none: a fixed split in a random order, the same in every epoch.
    - balls-in-bins: each example in one bin, drawn once.
    - poisson, cyclic-poisson: drawn anew in each round, for cyclic from the round's group of a fixed random split.

    All draws are pure functions of the secret `key`.
    """

    def __init__(
        self, participation: Participation, examples: int, epoch_rounds: int, key: bytes, released: Callable[[], int]
    ) -> None:
        self._participation = participation
        self._examples = examples
        self._epoch_rounds = epoch_rounds
        self._key = key
        self._released = released
        self._groups = self._split()

    def __len__(self) -> int:
        return self._epoch_rounds

    def __iter__(self) -> Iterator[list[int]]:
        start = self._released()
        end = min((start // self._epoch_rounds + 1) * self._epoch_rounds, self._participation.rounds)
        for round in range(start, end):
            yield self.batch(round).tolist()

    def batch(self, round: int) -> Indices:
        """The examples of one round, in increasing order."""
        group = self._groups[round % len(self._groups)]
        rate = self._participation.sampling_rate
        if rate is None:
            return group
        draws = self._uniform(f"round {round}", len(group))
        # As integers, so that a rate of 1 takes everyone and no rounding raises the rate.
        return group[draws < np.uint64(int(rate * 2**64))] if rate < 1 else group

    def _split(self) -> list[Indices]:
        groups = self._participation.min_separation
        if self._participation.sampling == "balls-in-bins":
            bins = self._uniform("bins", self._examples) % np.uint64(groups)
            return [np.flatnonzero(bins == j) for j in range(groups)]
        order = np.argsort(self._uniform("order", self._examples), kind="stable")
        return [np.sort(part) for part in np.array_split(order, groups)]

    def _uniform(self, purpose: str, count: int) -> NDArray[np.uint64]:
        stream = hashlib.shake_256(self._key + b"fedcgd batches " + purpose.encode())
        return np.frombuffer(stream.digest(8 * count), dtype="<u8")
