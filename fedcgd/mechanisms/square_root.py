"""Mechanisms from the square root of the prefix sum: (1 − x)^(−1/2), whole, damped, or cut to a band."""

from dataclasses import dataclass

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.toeplitz import (
    BandedInverseMechanism,
    BandedToeplitzMechanism,
    Toeplitz,
    checked_bandwidth,
    power_coefficients,
)
from fedcgd.support.numbers import as_float


@dataclass(frozen=True)
class SquareRootToeplitz(Toeplitz):
    """C = A^(1/2), c = coefficients of (1 − x)^(−1/2): max error log(n)/π + O(1) for one participation.

    Dvijotham et al., "Efficient and Near-Optimal Noise Generation for Streaming Differential Privacy", 2024, arXiv:2404.16706.

    >>> SquareRootToeplitz().coefficients(3).tolist()
    [1.0, 0.5, 0.375]
    """

    name = "toeplitz"

    def coefficients(self, rounds: int) -> Vector:
        return power_coefficients(rounds, -0.5)

    def inverse_coefficients(self, rounds: int) -> Vector:
        return power_coefficients(rounds, 0.5)


@dataclass(frozen=True)
class NuDPFTRL(Toeplitz):
    """C⁻¹ from (1 − (1 − ν)x)^(1/2): β_t = t^(−3/2)(1 − ν)^t/(2√π) of the older noise is cancelled, for large t.

    Choquette-Choo et al., "Correlated Noise Provably Beats Independent Noise for Differentially Private Learning", 2024,
    arXiv:2310.06771.

    The exact coefficients are used: with β_t = t^(−3/2)(1 − ν)^t itself, Σβ > 1 and C would grow without bound.

    Args:
        nu: ν in [0, 1), how fast older noise is forgotten; 0 is the square-root Toeplitz mechanism.

    Raises:
        ValueError: for a ν outside [0, 1).

    >>> NuDPFTRL(0.5).inverse_coefficients(3).tolist()
    [1.0, -0.25, -0.03125]
    """

    name = "nu-dp-ftrl"
    nu: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "nu", as_float("nu", self.nu))
        if not 0 <= self.nu < 1:
            raise ValueError(f"nu must be in [0, 1), got {self.nu}; 0 damps nothing")

    def coefficients(self, rounds: int) -> Vector:
        return power_coefficients(rounds, -0.5, 1 - self.nu)

    def inverse_coefficients(self, rounds: int) -> Vector:
        return power_coefficients(rounds, 0.5, 1 - self.nu)


@dataclass(frozen=True)
class BSR(BandedToeplitzMechanism):
    """C = the first `bands` coefficients of (1 − x)^(−1/2).

    Kalinin and Lampert, "Banded Square Root Matrix Factorization for Differentially Private Model Training", 2024,
    arXiv:2405.13763.

    Args:
        bands: p, the number of diagonals of C, at least 1; 1 is DP-SGD.

    Raises:
        ValueError: for p below 1, or no whole number.

    >>> BSR(2).coefficients(4).tolist()
    [1.0, 0.5, 0.0, 0.0]
    """

    name = "bsr"
    bands: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", checked_bandwidth(self.bands))

    @property
    def band(self) -> Vector:
        """c_0 … c_{p−1}, shape (p,)."""
        return power_coefficients(self.bands, -0.5)


@dataclass(frozen=True)
class BISR(BandedInverseMechanism):
    """C⁻¹ = the first `bands` coefficients of (1 − x)^(1/2): γ-BIFR with γ = 1/2.

    Kalinin, McKenna, Upadhyay and Lampert, "Back to Square Roots: An Optimal Bound on the Matrix Factorization Error for
    Multi-Epoch Differentially Private SGD", 2025, arXiv:2505.12128.

    Args:
        bands: p, the number of diagonals of C⁻¹, and so of noise vectors in a round, at least 1; 1 is DP-SGD.

    Raises:
        ValueError: for p below 1, or no whole number.

    >>> BISR(2).inverse_coefficients(4).tolist()
    [1.0, -0.5]
    """

    name = "bisr"
    bands: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", checked_bandwidth(self.bands))

    @property
    def inverse_band(self) -> Vector:
        """The coefficients, shape (p,)."""
        return power_coefficients(self.bands, 0.5)
