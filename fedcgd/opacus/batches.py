"""Which examples are in which step: a batch sampler for each sampling that is accounted for."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler

from fedcgd.participation import Participation

Indices = NDArray[np.intp]


class RoundBatches(Sampler[list[int]]):
    """The batches of one epoch, one per round, from the first round that has not been released yet.

    `released()` says how many have been, so that an epoch that was left early goes on where it stopped. A batch is given out
    only when the one before it has been released: a loop that leaves a step out would otherwise move all later batches to
    earlier rounds, and break the separation. An epoch has `epoch_rounds` rounds.

    - none: a fixed split in a random order, the same in every epoch.
    - balls-in-bins: each example in one bin, drawn once.
    - poisson, cyclic-poisson: drawn anew in each round, for cyclic from the round's group of a fixed random split.

    All draws are pure functions of the secret that `key()` returns; it may change when a checkpoint is loaded.
    """

    def __init__(
        self,
        participation: Participation,
        examples: int,
        epoch_rounds: int,
        key: Callable[[], bytes],
        released: Callable[[], int],
    ) -> None:
        self._participation = participation
        self._examples = examples
        self._epoch_rounds = epoch_rounds
        self._key = key
        self.released = released
        self._groups: tuple[bytes, list[Indices]] | None = None
        self.loader_waits = False
        """Whether a `RoundLoader` waits for releases in place of this sampler, which then may run ahead."""

    def __len__(self) -> int:
        return self._epoch_rounds

    def __iter__(self) -> Iterator[list[int]]:
        return self._epoch(self.released(), self.loader_waits)

    def _epoch(self, start: int, loader_waits: bool) -> Iterator[list[int]]:
        end = min((start // self._epoch_rounds + 1) * self._epoch_rounds, self._participation.rounds)
        for round in range(start, end):
            if not loader_waits:
                self.check_released(round)
            yield self.batch(round).tolist()

    def check_released(self, round: int) -> None:
        """Raise RuntimeError unless it is the turn of the batch of `round`."""
        if self.released() != round:
            raise RuntimeError(
                f"the batch of round {round} was asked for when {self.released()} rounds had been released: take one optimizer "
                "step for each batch (an empty or spoilt batch too); with BatchMemoryManager use num_workers=0"
            )

    def batch(self, round: int) -> Indices:
        """The examples of one round, in increasing order."""
        groups = self.groups()
        group = groups[round % len(groups)]
        rate = self._participation.sampling_rate
        if rate is None:
            return group
        draws = self._uniform(f"round {round}", len(group))
        # As integers, so that a rate of 1 takes everyone and no rounding raises the rate.
        return group[draws < np.uint64(int(rate * 2**64))] if rate < 1 else group

    def groups(self) -> list[Indices]:
        """The examples of each bin, or of each part of the fixed split."""
        key = self._key()
        if self._groups is None or self._groups[0] != key:
            self._groups = key, self._split()
        return self._groups[1]

    def _split(self) -> list[Indices]:
        groups = self._participation.min_separation
        if self._participation.sampling == "balls-in-bins":
            bins = self._uniform("bins", self._examples) % np.uint64(groups)
            return [np.flatnonzero(bins == j) for j in range(groups)]
        order = np.argsort(self._uniform("order", self._examples), kind="stable")
        return [np.sort(part) for part in np.array_split(order, groups)]

    def _uniform(self, purpose: str, count: int) -> NDArray[np.uint64]:
        stream = hashlib.shake_256(self._key() + b"fedcgd batches " + purpose.encode())
        return np.frombuffer(stream.digest(8 * count), dtype="<u8")


class RoundLoader(DataLoader[Any]):
    """A data loader over `RoundBatches`, whose workers may prepare batches ahead: each is handed out in its own round."""

    batch_sampler: RoundBatches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = self.batch_sampler
        first = batches.released()
        batches.loader_waits = True
        try:
            prepared = super().__iter__()
        finally:
            batches.loader_waits = False
        return self._in_turn(prepared, first)

    def _in_turn(self, prepared: Iterator[Any], first: int) -> Iterator[Any]:
        for round, batch in enumerate(prepared, start=first):
            self.batch_sampler.check_released(round)
            yield batch
