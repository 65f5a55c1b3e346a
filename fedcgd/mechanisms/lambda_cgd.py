"""DP-λCGD: each round cancels the fraction λ of the noise before it."""

from dataclasses import dataclass

import numpy as np

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.toeplitz import Toeplitz
from fedcgd.support.numbers import as_float


@dataclass(frozen=True)
class LambdaCGD(Toeplitz):
    """C_λ[i, j] = λ^(i−j): x̂_t = x_t + ζσ(Z_t − λZ_{t−1}) (eq. 7 and Algorithm 1 of arXiv:2601.22334).

    For n = k·b rounds its sensitivity is, squared,
    (1 − λ^2b)/((1 − λ²)(1 − λ^b)²)·Σ_{j=1..k} (1 − λ^bj)²; `fedcgd.mechanisms.sensitivity` finds it for any n.

    Kalinin, McKenna, Pagh and Lampert, "DP-λCGD: Efficient Noise Correlation for Differentially Private Model Training", 2026,
    arXiv:2601.22334.

    Args:
        lam: λ in [0, 1), the part of the previous round's noise that is cancelled; 0 is DP-SGD.

    Raises:
        ValueError: for a λ outside [0, 1).

    >>> LambdaCGD(0.5).coefficients(4).tolist()
    [1.0, 0.5, 0.25, 0.125]
    >>> from fedcgd import Participation
    >>> from fedcgd.mechanisms.sensitivity import sensitivity
    >>> round(sensitivity(LambdaCGD(0.5), Participation(rounds=4, min_separation=2)).value, 4)
    1.7897
    """

    name = "lambda-cgd"
    lam: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "lam", as_float("lam", self.lam))
        if not 0 <= self.lam < 1:  # also refuses NaN
            raise ValueError(f"lam must be in [0, 1), got {self.lam}; 0 is DP-SGD and values near 1 cancel most")

    def coefficients(self, rounds: int) -> Vector:
        return np.asarray(np.power(self.lam, np.arange(rounds, dtype=np.float64)))

    def inverse_coefficients(self, rounds: int) -> Vector:
        return np.array([1.0, -self.lam])[: min(rounds, 2 if self.lam else 1)]
