"""Epochs of b rounds, of which a user has one each, and how its rounds of neighbouring epochs overlap.

C has at most b bands, so that a round meets none but those of its own epoch and of the two beside it; and of those before, only
the last p − 1 rounds. So all that later rounds need to know of an epoch is a *state*: 0, or m for the m-th round from its end,
1 ≤ m < p. Rounds after the last that is released have columns of zeros.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedcgd.accounting.random_participation.columns import Columns
from fedcgd.mechanisms.mechanism import Matrix, Vector

Indices = NDArray[np.intp]


@dataclass(frozen=True)
class Epochs:
    """One of `length` rounds in each epoch; of the last epoch perhaps not all are released."""

    rounds: int
    """n, those that are released."""
    length: int
    """b."""

    @property
    def number(self) -> int:
        """Epochs that have begun."""
        return -(-self.rounds // self.length)

    def by_epoch(self, values: Vector) -> Matrix:
        """`values` of the rounds, and zeros for those that are not released; shape (epochs, b)."""
        padded = np.zeros(self.number * self.length)
        padded[: self.rounds] = values
        return padded.reshape(self.number, self.length)


@dataclass(frozen=True, eq=False)
class Overlaps:
    """⟨C[:, s], C[:, t]⟩ for rounds that a user, or two, may have."""

    epochs: Epochs
    bands: int
    """p."""
    squares: Matrix
    """‖C[:, t]‖², shape (epochs, b)."""
    within: list[Matrix]
    """By lag d: of rounds j and j + d of an epoch, shape (epochs, b − d), d < p."""
    before: Vector
    """Of the round in state m of the epoch before, and round j < p − 1; shape (epochs, p, p − 1). State 0 has none."""

    @staticmethod
    def from_columns(columns: Columns, epochs: Epochs) -> "Overlaps":
        """Of `columns` with at most b bands."""
        p, b = max(1, columns.width), epochs.length
        lags = [epochs.by_epoch(columns.squares), *(epochs.by_epoch(columns.products(lag)) for lag in range(1, p))]
        before = np.zeros((epochs.number, p, p - 1))
        for state in range(1, p):
            for j in range(p - state):
                before[1:, state, j] = lags[state + j][1:, j]
        return Overlaps(epochs, p, lags[0], [lag[:, d:] for d, lag in enumerate(lags) if d < b], before)

    @cached_property
    def states(self) -> Indices:
        """The state that each round of an epoch leaves, shape (b,)."""
        left = self.epochs.length - np.arange(self.epochs.length)
        return np.where(left < self.bands, left, 0)

    def most(self) -> float:
        """max_P ‖C·1_P‖²: what a user reaches who chooses its rounds."""
        best = np.zeros(self.bands)  # by the state of the epoch before
        for squares, before in zip(self.squares, self.before, strict=True):
            gain = np.tile(squares, (self.bands, 1))
            gain[:, : self.bands - 1] += 2 * before
            reached = (best[:, None] + gain).max(axis=0)
            best = np.array([reached[self.states == state].max(initial=-np.inf) for state in range(self.bands)])
        return float(best.max())
