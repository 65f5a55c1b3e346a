"""S = Σ_P Pr(P)·exp(⟨C1_P, y⟩/σ² − |C1_P|²/2σ²) for one round j_e of each epoch, by a recursion backwards through the epochs.

With w_j = exp(⟨C[:, j], y⟩/σ² − |C[:, j]|²/2σ²)/b, and F(m) what the epochs after one in state m bring,

    F(m) = Σ_j w_j·exp(−⟨C[:, round of state m], C[:, j]⟩/σ²)·F(state of j),

over the rounds j of the next epoch. All terms are positive, and F = 1 after the last epoch.
"""

from dataclasses import dataclass

import numpy as np

from fedcgd.accounting.random_allocation.epochs import Epochs, Overlaps
from fedcgd.accounting.random_participation.columns import Columns
from fedcgd.accounting.random_participation.law import LARGEST
from fedcgd.mechanisms.mechanism import Matrix, Vector


@dataclass(frozen=True, eq=False)
class EpochsLikelihood:
    """S for one σ."""

    epochs: Epochs
    bands: int
    halves: Vector
    """|C[:, t]|²/2σ², shape (n,)."""
    kept: Vector
    """exp(−overlap/σ²) of the state of the epoch before and each of the first p − 1 rounds; shape (epochs, p, p − 1)."""
    gap: float = 0.0
    cost: float = 1.0

    @staticmethod
    def from_columns(columns: Columns, epochs: Epochs, sigma: float) -> "EpochsLikelihood":
        """Of `columns` with noise `sigma`."""
        overlaps = Overlaps.from_columns(columns, epochs)
        kept = np.exp(-overlaps.before / sigma**2)
        return EpochsLikelihood(epochs, overlaps.bands, columns.squares / (2 * sigma**2), kept)

    def weights(self, x: Matrix) -> Matrix:
        """b·w_j, shape (n, draws)."""
        found = np.subtract(x, self.halves[:, None], dtype=float)
        return np.asarray(np.exp(np.minimum(found, 700.0, out=found), out=found))

    def bounds(self, weights: Matrix) -> tuple[Vector, Vector]:
        """S twice, or what it is between where numbers are too large for a float."""
        with np.errstate(over="ignore", invalid="ignore"):
            found = self._total(weights)
        lower, upper = (np.clip(np.nan_to_num(found, nan=unknown), 1 / LARGEST, LARGEST) for unknown in (0.0, LARGEST))
        return np.asarray(lower), np.asarray(upper)

    def _total(self, weights: Matrix) -> Vector:
        b, early = self.epochs.length, self.bands - 1
        later = np.ones((self.bands, weights.shape[1]))  # F by state
        for epoch in range(self.epochs.number - 1, -1, -1):
            rounds = slice(epoch * b, min((epoch + 1) * b, self.epochs.rounds))
            here = weights[rounds].copy()
            released = len(here)
            # Rounds that are not released bring 1 each; they leave no state that matters, since no epoch follows.
            far = b - early
            here[:far] *= later[0]
            here[far:] *= later[:0:-1][: max(0, released - far)]
            rest = here[early:].sum(axis=0) + (b - released)
            later = (self.kept[epoch][:, :released] @ here[:early] + rest) / b
        return np.asarray(later[0])
