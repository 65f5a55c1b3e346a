"""Toeplitz mechanisms whose coefficients were found by optimisation: the value is the numbers, so that what ran is on record."""

from dataclasses import dataclass

import numpy as np

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.toeplitz import BandedInverseMechanism, BandedToeplitzMechanism, checked_values


@dataclass(frozen=True)
class BandedToeplitz(BandedToeplitzMechanism):
    """C with the given first p coefficients.

    Section 3.2 of McKenna, "Scaling up the Banded Matrix Factorization Mechanism for Differentially Private ML", 2024,
    arXiv:2405.15913. As text, "banded-toeplitz:p", the coefficients are those of least error.

    Args:
        values: c_0 … c_{p−1}, the first of them positive.

    Raises:
        ValueError: if one is not finite, or the first not positive.
        TypeError: for a list in place of a tuple.

    >>> BandedToeplitz((1.0, 0.5)).inverse_coefficients(3).tolist()
    [1.0, -0.5, 0.25]
    """

    name = "banded-toeplitz"
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", checked_values("coefficients", self.values, first=True))

    @property
    def band(self) -> Vector:
        """c_0 … c_{p−1}, shape (p,)."""
        return np.array(self.values)


@dataclass(frozen=True)
class BandInvMF(BandedInverseMechanism):
    """C⁻¹ with the given first p coefficients.

    Kalinin, McKenna, Upadhyay and Lampert, "Back to Square Roots: An Optimal Bound on the Matrix Factorization Error for
    Multi-Epoch Differentially Private SGD", 2025, arXiv:2505.12128. As text, "band-inv-mf:p", the coefficients are those of least
    error.

    Args:
        values: the first p entries of the first column of C⁻¹, the first of them positive.

    Raises:
        ValueError: if one is not finite, or the first not positive.
        TypeError: for a list in place of a tuple.

    >>> BandInvMF((1.0, -0.5)).coefficients(3).tolist()
    [1.0, 0.5, 0.25]
    """

    name = "band-inv-mf"
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", checked_values("inverse coefficients", self.values, first=True))

    @property
    def inverse_band(self) -> Vector:
        """The coefficients, shape (p,)."""
        return np.array(self.values)
