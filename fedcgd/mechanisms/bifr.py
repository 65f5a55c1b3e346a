"""γ-BIFR: C⁻¹ from a power of 1 − x, cut to a band, between DP-SGD, BISR and the prefix sum."""

from dataclasses import dataclass

import numpy as np

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.toeplitz import BandedInverseMechanism, checked_bandwidth, power_coefficients
from fedcgd.support.numbers import as_float


@dataclass(frozen=True)
class BIFR(BandedInverseMechanism):
    """C⁻¹ = the first `bands` coefficients of (1 − x)^γ: BISR for γ = 1/2, λ-CGD with λ = γ for two bands.

    Kalinin, Rehn, Andersson, Honkela and Lampert, "Beyond Square Roots: Explicit Memory-Efficient Factorization for Multi-Epoch
    Private Learning", 2026, arXiv:2605.18379.

    Its sensitivity is that of the leftmost columns (Theorem 1 of arXiv:2601.22334), because C is not negative and not increasing.
    With C⁻¹ = 1 − a_1·x − … − a_{p−1}·x^{p−1}, all a_i ≥ 0, c_t = Σ_i a_i·c_{t−i} ≥ 0. Up to c_{p−1} these are the coefficients
    of (1 − x)^−γ, each (t − 1 + γ)/t ≤ 1 times the one before; from there on c_t − c_{t+1} = Σ_i a_i·(c_{t−i} − c_{t+1−i}) ≥ 0.

    Args:
        bands: p, the number of diagonals of C⁻¹, and so of noise vectors in a round, at least 1; 1 is DP-SGD.
        gamma: γ in (0, 1]: near 0 little is cancelled, and with 1 all of the noise of the round before.

    Raises:
        ValueError: for p below 1, or no whole number, and for a γ outside (0, 1].

    >>> BIFR(3, 0.75).inverse_coefficients(4).tolist()
    [1.0, -0.75, -0.09375]
    """

    name = "bifr"
    bands: int
    gamma: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", checked_bandwidth(self.bands))
        object.__setattr__(self, "gamma", as_float("gamma", self.gamma))
        if not 0 < self.gamma <= 1:  # also refuses NaN
            raise ValueError(
                f"gamma must be in (0, 1], got {self.gamma}; 1/2 is BISR, less cancels less, and dp-sgd cancels nothing"
            )

    @property
    def inverse_band(self) -> Vector:
        """The coefficients, shape (p,); for γ = 1 there are but two."""
        return np.trim_zeros(power_coefficients(self.bands, self.gamma), "b")
