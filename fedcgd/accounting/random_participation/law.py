"""What the accounting asks of a law of one user's rounds: the ratio S of the two densities, and pairs of users."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcgd.mechanisms.mechanism import Matrix, Vector

Turns = NDArray[np.int32]
"""The rounds of users, by the last axis; along the first ascending, and then n where a user has no more."""

LARGEST = 1e300
"""S beyond, or below 1/`LARGEST`, is set to that. Beyond, only a lower bound is known: e^ε may be larger, too."""


class Columns(Protocol):
    """What is asked of C ≥ 0: x_t = ⟨C[:, t], y⟩/σ² for each round t, for noise and for what users bring."""

    @property
    def rounds(self) -> int:
        """How many x there are."""

    @property
    def entries(self) -> Vector:
        """Numbers that the law of x follows from, for a seed."""

    @property
    def rounding(self) -> float:
        """What the precision of `noise` changes log S by, at most."""

    def noise(self, generator: np.random.Generator, count: int) -> Matrix:
        """⟨C[:, t], z⟩ of standard normal z, shape (n, draws)."""

    def lifted(self, turns: Turns, noise: Matrix) -> tuple[Matrix, Vector, Vector]:
        """With v the sum of C1_P over the users of a tuple: ⟨C[:, t], v⟩, shape (n, tuples); ⟨v, z⟩ by the `noise`; and |v|²."""


class Likelihood(Protocol):
    """S = Σ_P Pr(P)·exp(⟨C1_P, y⟩/σ² − |C1_P|²/2σ²) for one σ."""

    @property
    def gap(self) -> float:
        """About the distance of the two bounds on log S."""

    @property
    def cost(self) -> float:
        """About the time that a draw takes, in units of one whose bounds are equal."""

    def weights(self, x: Matrix) -> Matrix:
        """What each round multiplies with at x_t = ⟨C[:, t], y⟩/σ²: exp(x_t), times what no draw changes; shape (n, draws).

        Exponents beyond 700 count as that.
        """

    def bounds(self, weights: Matrix) -> tuple[Vector, Vector]:
        """A lower and an upper bound on S, by the `weights`."""


class Tuples(Protocol):
    """Rounds of r users with weights exp(Σ_{a<c} K(P_a, P_c)), K = ⟨C1_P, C1_P′⟩/σ²."""

    @property
    def order(self) -> int:
        """r."""

    @property
    def log_total(self) -> float:
        """log of at least E[S^r]. Infinite if it overflows."""

    @property
    def cost(self) -> float:
        """About the time of a tuple, in units of that of a draw."""

    def draw(self, generator: np.random.Generator, count: int) -> tuple[Turns, Vector]:
        """The rounds of the users of `count` tuples, shape (most, r, count), and the probability of each to be accepted."""


class Law(Protocol):
    """How one user's rounds are drawn, independently of all else."""

    @property
    def rounds(self) -> int:
        """n, those that are released."""

    @property
    def words(self) -> tuple[str, ...]:
        """All that the law follows from, for a seed."""

    def likelihood(self, columns: Any, sigma: float) -> Likelihood:
        """S of C = `columns` with noise `sigma`."""

    @property
    def method(self) -> str:
        """How answers are found, in words."""

    @property
    def orders(self) -> tuple[int, ...]:
        """The r that tuples can have, ascending from 2 on."""

    def tuples(self, columns: Any, sigma: float, order: int) -> Tuples:
        """Tuples of `order` users."""
