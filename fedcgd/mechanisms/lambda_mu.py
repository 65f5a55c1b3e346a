"""λ-CGD twice: each round cancels parts of the noise of the two rounds before it."""

from dataclasses import dataclass

import numpy as np

from fedcgd.mechanisms.lambda_cgd import LambdaCGD
from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.toeplitz import BandedInverseMechanism, divided
from fedcgd.support.numbers import as_float


@dataclass(frozen=True)
class LambdaMuCGD(BandedInverseMechanism):
    """C = C_λ·C_μ, so that C⁻¹ = (1 − λx)(1 − μx): x̂_t = x_t + ζσ(Z_t − (λ + μ)Z_{t−1} + λμ·Z_{t−2}).

    The product of two matrices of Kalinin, McKenna, Pagh and Lampert, "DP-λCGD: Efficient Noise Correlation for Differentially
    Private Model Training", 2026, arXiv:2601.22334; we know of no paper that has a name for it. A negative μ cancels a part of
    the noise of two rounds before too, a positive one gives some of it back.

    c_t = Σ_i λ^i·μ^(t−i) = (λ^(t+1) − μ^(t+1))/(λ − μ), which is not negative for |μ| ≤ λ, nor for μ ≥ 0. On its sensitivity:

    - μ ≥ 0 and λ + μ ≤ 1: that of the leftmost columns by Theorem 1 there. c is not increasing, as c_1 = λ + μ ≤ 1 and
      c_{t+1} = (λ + μ)c_t − λμ·c_{t−1} ≤ c_t.
    - μ ≥ 0 and λ + μ > 1: c rises first, and the leftmost columns are the worst still. c is log-concave, as a convolution of two
      geometric series, also when cut at n. So the products ⟨C[:, i], C[:, i + l]⟩ = Σ_{t < n−i−l} c_t·c_{t+l} are log-concave and
      symmetric in l, and do not grow with l; nor do they with i. Two columns of a user are worst where both are leftmost.
    - μ < 0 and μ²(1 − μ) ≤ λ²(1 − λ): Theorem 1. c_t − c_{t+1} has the sign of λ^(t+1)(1 − λ) − μ^(t+1)(1 − μ), which is least,
      relative to its first term, for t = 1.
    - other μ < 0: bounded as for any other C (`fedcgd.mechanisms.sensitivity`).

    Args:
        lam: λ in [0, 1).
        mu: μ in [−λ, 1); 0 is λ-CGD.

    Raises:
        ValueError: for a λ or μ out of range.

    >>> LambdaMuCGD(0.5, -0.25).inverse_coefficients(4).tolist()
    [1.0, -0.25, -0.125]
    """

    name = "lambda-mu"
    lam: float
    mu: float

    def __post_init__(self) -> None:
        for name in ("lam", "mu"):
            object.__setattr__(self, name, as_float(name, getattr(self, name)))
        if not 0 <= self.lam < 1:  # also refuses NaN
            raise ValueError(f"lam must be in [0, 1), got {self.lam}; 0 is DP-SGD and values near 1 cancel most")
        if not -self.lam <= self.mu < 1:
            raise ValueError(
                f"mu must be in [-lam, 1) = [{-self.lam}, 1), got {self.mu}; 0 is λ-CGD, and C is negative below -lam"
            )

    def coefficients(self, rounds: int) -> Vector:
        if self.mu < 0:  # c_t = (λ + μ)c_{t−1} + |λμ|·c_{t−2} adds only what is not negative
            return super().coefficients(rounds)
        return divided(
            np.array([1.0, -self.mu]), LambdaCGD(self.lam).coefficients(rounds)
        )  # and so does Σ_i λ^i·μ^(t−i)

    @property
    def inverse_band(self) -> Vector:
        """The coefficients, at most three."""
        return np.trim_zeros(np.array([1.0, -(self.lam + self.mu), self.lam * self.mu]), "b")
