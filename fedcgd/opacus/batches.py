"""Which examples are in which step: a batch sampler for each sampling that is accounted for."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler

from fedcgd.opacus.rounds import Rounds
from fedcgd.participation import Participation
from fedcgd.participation.cohorts import bin_of, place

Indices = NDArray[np.intp]


class RoundBatches(Sampler[list[int]]):
    """The batches of one epoch of `steps` rounds, from the first round that has not been released yet, each in `parts` parts.

    An epoch that was left early goes on where it stopped. A batch is given out only when the one before it has been released, and
    to the loop that began last (see `Rounds`). After the last round RuntimeError is raised.

    - none: a fixed split in a random order, the same in every epoch.
    - balls-in-bins: each example in one bin, drawn once.
      (Both as a server draws users that are called "0", "1", …: `fedcgd.participation.cohorts`.)
    - poisson, cyclic-poisson: drawn anew in each round, for cyclic from the round's group of a fixed random split.

    All draws are pure functions of the secret that `key()` returns; it may change when a checkpoint is loaded.
    """

    def __init__(
        self,
        participation: Participation,
        examples: int,
        steps: int,
        key: Callable[[], bytes],
        rounds: Rounds,
        parts: int = 1,
    ) -> None:
        self._participation = participation
        self._examples = examples
        self._steps = steps
        self._key = key
        self.rounds = rounds
        self.parts = parts
        self._groups: tuple[bytes, list[Indices]] | None = None
        self.ahead: deque[int] | None = None
        """Set by a `RoundLoader` that hands out rounds itself: the sizes of batches that this sampler prepared for it."""

    def __len__(self) -> int:
        return self._steps * self.parts

    def __iter__(self) -> Iterator[list[int]]:
        return self._epoch(self.rounds.enter(), self.rounds.released, self.ahead)

    def _epoch(self, loop: int, start: int, ahead: deque[int] | None) -> Iterator[list[int]]:
        end = min((start // self._steps + 1) * self._steps, self._participation.rounds)
        for round in range(start, end):
            for i, part in enumerate(np.array_split(self.batch(round), self.parts)):
                if ahead is None:
                    self.rounds.hand_out(loop, round, len(part), part=i, parts=self.parts)
                else:
                    ahead.append(len(part))
                yield part.tolist()

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
        groups = self._steps if self._participation.sampling == "none" else self._participation.min_separation
        key, examples = self._key(), range(self._examples)
        if self._participation.sampling == "balls-in-bins":
            bins = np.array([bin_of(str(i), groups, key) for i in examples])
            return [np.flatnonzero(bins == j) for j in range(groups)]
        order = np.argsort(np.array([place(str(i), key) for i in examples], np.uint64), kind="stable")
        return [np.sort(part) for part in np.array_split(order, groups)]

    def _uniform(self, purpose: str, count: int) -> NDArray[np.uint64]:
        stream = hashlib.shake_256(self._key() + b"fedcgd batches " + purpose.encode())
        return np.frombuffer(stream.digest(8 * count), dtype="<u8")


class RoundLoader(DataLoader[Any]):
    """A data loader over `RoundBatches`, whose workers may prepare batches ahead: each is handed out in its own round."""

    batch_sampler: RoundBatches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = self.batch_sampler
        ahead: deque[int] = deque()
        batches.ahead = ahead
        try:
            prepared = super().__iter__()
        finally:
            batches.ahead = None
        return self._in_turn(prepared, ahead, batches.rounds.loop, batches.rounds.released)

    def _in_turn(self, prepared: Iterator[Any], ahead: deque[int], loop: int, first: int) -> Iterator[Any]:
        batches = self.batch_sampler
        for i, batch in enumerate(prepared):
            round, part = first + i // batches.parts, i % batches.parts
            batches.rounds.hand_out(loop, round, ahead.popleft(), part=part, parts=batches.parts)
            yield batch
