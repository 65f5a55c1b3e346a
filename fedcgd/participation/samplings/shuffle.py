"""Shuffled batches of a fixed size: in each of k epochs all users are put in a new random order, and taken in that order."""

from collections.abc import Iterable, Sequence

import numpy as np

from fedcgd.participation.draws import draw
from fedcgd.participation.history import History
from fedcgd.participation.promise import Promise
from fedcgd.participation.samplings.epochs import OneOfEachEpoch
from fedcgd.participation.samplings.filled import FilledCohorts
from fedcgd.participation.samplings.sampling import Rows


class Shuffle(OneOfEachEpoch, FilledCohorts):
    """One round of each epoch of n/k, as a data loader with `shuffle=True` has it, and accounted for as if anybody knew it.

    With b > 1 users are shuffled within blocks of L = n/k − b + 1 rounds, which divide an epoch: a user stays in its block, so
    that its rounds of two epochs are at least n/k − (L − 1) = b apart.
    """

    name = "shuffle"
    assumption = (
        "None is relied on: ε is the bound without amplification, for an adversary who may know, and even choose, the rounds in "
        "which each user takes part. No bound that shuffling improves is proven for batches of a fixed size. Nothing about the "
        "order has to be secret or random."
    )

    def check(self, run: Promise) -> None:
        """The blocks divide an epoch."""
        super().check(run)
        steps, b = self.spacing(run), run.min_separation
        if b > steps or steps % (steps - b + 1):
            fitting = [steps - block + 1 for block in range(steps, 0, -1) if steps % block == 0]
            raise ValueError(
                f"shuffle has min_separation b such that n/k − b + 1 divides the {steps} rounds of an epoch: one of {fitting}, "
                f"got {b}"
            )

    def describe(self, run: Promise) -> str:
        """As the base class has it."""
        apart = f", at least b = {run.min_separation} apart" if run.min_separation > 1 else ""
        return f"n = {run.rounds} rounds, a user in one of each {self.spacing(run)}, in a new order{apart}"

    def eligible(self, run: Promise, round: int, users: Iterable[str], history: History) -> list[str]:
        """Those within the limits that had no round of this epoch yet."""
        start = round - round % self.spacing(run)
        allowed = super().eligible(run, round, users, history)
        return [user for user in allowed if not start <= history.last_rounds.get(user, -1) < round]

    def rounds_without_return(self, run: Promise, round: int) -> int:
        """What is left of the epoch."""
        return self.spacing(run) - 1 - round % self.spacing(run)

    def rank(self, run: Promise, round: int, user: str, history: History, key: bytes) -> tuple[int, int]:
        """Users of the round's block, and those without one, in the epoch's order."""
        last, steps = history.last_rounds.get(user), self.spacing(run)
        block = self._block(run)
        elsewhere = last is not None and last % steps // block != round % steps // block
        return elsewhere, draw(key, f"order of epoch {round // steps}", user)

    def groups(self, run: Promise, names: Sequence[str], key: bytes, parts: int) -> list[Rows]:
        """Each block of a random split in a new order in each epoch, cut in L parts of equal size, or one more."""
        steps, block, found = self.spacing(run), self._block(run), []
        blocks: list[Rows] = []
        for epoch in range(run.participations):
            order = np.array([draw(key, f"order of epoch {epoch}", name) for name in names], np.uint64)
            blocks = blocks or np.array_split(np.argsort(order, kind="stable"), steps // block)
            for rows in blocks:
                shuffled = rows[np.argsort(order[rows], kind="stable")]
                found += [np.sort(part) for part in np.array_split(shuffled, block)]
        return found

    def _block(self, run: Promise) -> int:
        return self.spacing(run) - run.min_separation + 1
