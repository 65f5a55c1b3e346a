"""Balls-in-Bins as a law of b atoms, one for each bin, as the accounting by draws asks for it.

With u_j = m_j/σ and y_j = ⟨u_j, x⟩, Gaussian with covariance G, S = mean_j exp(y_j − G_jj/2). A user's "round" is its bin, and
all that matters of C is the Gram matrix. Tuples of bins, whose weights make the moments
of S, are drawn by stars (`star_proposal`).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from scipy.linalg import cholesky
from scipy.linalg.blas import strmm

from fedcgd.accounting.balls_in_bins.star_proposal import StarProposal
from fedcgd.accounting.random_participation.law import LARGEST, Turns
from fedcgd.mechanisms.mechanism import Matrix, Vector


@dataclass(frozen=True, eq=False)
class Bins:
    """⟨m_i, m_j⟩ of the bins, which stand for rounds."""

    gram: Matrix
    rounding: ClassVar[float] = 2e-5
    """Single precision changes log S by less."""

    @cached_property
    def root(self) -> Matrix:
        """Of `gram`, which `bin_gram` keeps from being singular."""
        return np.asarray(cholesky(self.gram.T, lower=True), dtype=np.float32)

    @property
    def rounds(self) -> int:
        """b."""
        return len(self.gram)

    @property
    def squares(self) -> Vector:
        """|m_j|²."""
        return np.diag(self.gram)

    @property
    def entries(self) -> Vector:
        """Numbers that the Gram matrix follows from, for a seed."""
        scale = float(self.gram.max())
        return np.concatenate([[scale], np.diag(self.gram) / scale, self.gram[0] / scale])

    def noise(self, generator: np.random.Generator, count: int) -> Matrix:
        """⟨m_j, z⟩ for standard normal z, shape (b, draws)."""
        z = generator.standard_normal((count, self.rounds), dtype=np.float32)
        return np.asarray(strmm(1.0, self.root, z.T, lower=True, overwrite_b=True), dtype=np.float64, order="C")

    def lifted(self, turns: Turns, noise: Matrix) -> tuple[Matrix, Vector, Vector]:
        """What tuples of users bring: ⟨m_j, v⟩ with v the sum of their m, shape (b, draws); ⟨v, z⟩; and |v|²."""
        bins, draws = turns[0], np.arange(turns.shape[-1])
        lift = np.zeros((turns.shape[-1], self.rounds))
        for each in bins:
            lift += self.gram[each]
        along = sum(noise[each, draws] for each in bins)
        square = sum(lift[draws, each] for each in bins)
        return np.ascontiguousarray(lift.T), np.asarray(along), np.asarray(square)


@dataclass(frozen=True)
class BinLaw:
    """One bin of so many, each as likely."""

    rounds: int
    orders: ClassVar[tuple[int, ...]] = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
    method: ClassVar[str] = (
        "Monte Carlo over the privacy loss with an upper confidence bound, both directions, seed derived from the question"
    )

    @property
    def words(self) -> tuple[str, ...]:
        """All that the law follows from, for a seed."""
        return "balls-in-bins", str(self.rounds)

    def likelihood(self, columns: Bins, sigma: float) -> "BinLikelihood":
        """S with noise `sigma`."""
        return BinLikelihood(columns.squares / (2 * sigma**2))

    def tuples(self, columns: Bins, sigma: float, order: int) -> StarProposal:
        """Those of `order` bins."""
        return StarProposal.from_gram(columns.gram, sigma, order)


@dataclass(frozen=True, eq=False)
class BinLikelihood:
    """S for one σ: the mean of what the bins make."""

    halves: Vector
    gap: float = 0.0
    cost: float = 1.0

    def weights(self, x: Matrix) -> Matrix:
        """exp(x_j − G_jj/2), shape (b, draws)."""
        found = np.subtract(x, self.halves[:, None])
        return np.asarray(np.exp(np.minimum(found, 700.0, out=found), out=found))

    def bounds(self, weights: Matrix) -> tuple[Vector, Vector]:
        """S twice."""
        found = np.clip(weights.mean(axis=0), 1 / LARGEST, LARGEST)
        return found, found
