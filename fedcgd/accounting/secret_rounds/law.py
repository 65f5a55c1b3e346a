"""What the accounting asks of a law of one user's rounds: the ratio S of the two densities, and pairs of users."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedcgd.accounting.secret_rounds.columns import Columns
from fedcgd.mechanisms.mechanism import Matrix, Vector

Turns = NDArray[np.int32]
"""The rounds of users, by the last axis; along the first ascending, and then n where a user has no more."""

LARGEST = 1e300
"""S beyond, or below 1/`LARGEST`, is set to that. Beyond, only a lower bound is known: e^ε may be larger, too."""


class Likelihood(Protocol):
    """S = Σ_P Pr(P)·exp(⟨C1_P, y⟩/σ² − |C1_P|²/2σ²) for one σ."""

    @property
    def gap(self) -> float:
        """About the distance of the two bounds on log S."""
        ...

    @property
    def cost(self) -> float:
        """About the time that a draw takes, in units of one whose bounds are equal."""
        ...

    def weights(self, x: Matrix) -> Matrix:
        """What each round multiplies with at x_t = ⟨C[:, t], y⟩/σ²: exp(x_t), times what no draw changes; shape (n, draws).

        Exponents beyond 700 count as that.
        """
        ...

    def bounds(self, weights: Matrix) -> tuple[Vector, Vector]:
        """A lower and an upper bound on S, by the `weights`."""
        ...


class Pairs(Protocol):
    """Pairs of users' rounds with weights Pr(P)·Pr(P′)·exp(θ·K̃(P, P′)), K̃ ≥ ⟨C1_P, C1_P′⟩/σ²."""

    @property
    def log_total(self) -> float:
        """log E exp(θ·K̃). Infinite if it overflows."""
        ...

    def draw(self, generator: np.random.Generator, count: int) -> tuple[Turns, Turns, Vector]:
        """`count` pairs: the rounds of each user, twice shape (most, count), and θ·K̃ of each."""
        ...


class Law(Protocol):
    """How one user's rounds are drawn, independently of all else."""

    @property
    def rounds(self) -> int:
        """n, those that are released."""
        ...

    @property
    def words(self) -> tuple[str, ...]:
        """All that the law follows from, for a seed."""
        ...

    def likelihood(self, columns: Columns, sigma: float) -> Likelihood:
        """S of C = `columns` with noise `sigma`."""
        ...

    def pairs(self, columns: Columns, scale: float) -> Pairs:
        """Pairs for θ/σ² = `scale`. Raises ValueError if their tables would be too large."""
        ...
