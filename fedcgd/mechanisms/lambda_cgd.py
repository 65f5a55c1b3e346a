"""DP-λCGD: each round cancels the fraction λ of the noise before it."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.toeplitz import ToeplitzMechanism


@dataclass(frozen=True)
class LambdaCGD(ToeplitzMechanism):
    """C_λ[i, j] = λ^(i−j): x̂_t = x_t + ζσ(Z_t − λZ_{t−1}) (eq. 7 and Algorithm 1 of arXiv:2601.22334).

    `lam` is in [0, 1); 0 is DP-SGD. Raises ValueError outside. "auto" leaves the choice to whoever knows the run's public numbers
    (`fedcgd.accounting.selection.resolve`); until then it has no matrix.
    """

    lam: float | Literal["auto"]

    def __post_init__(self) -> None:
        if self.lam != "auto" and not 0 <= self.lam < 1:  # also refuses NaN
            raise ValueError(f"lam must be in [0, 1), got {self.lam}; 0 is DP-SGD and values near 1 cancel most")

    @property
    def name(self) -> str:
        return "lambda-cgd"

    def coefficients(self, rounds: int) -> Vector:
        return np.asarray(np.power(self._number, np.arange(rounds, dtype=np.float64)))

    def inverse_coefficients(self, rounds: int) -> Vector:
        return np.array([1.0, -self._number])[: min(rounds, 2 if self._number else 1)]

    @property
    def _number(self) -> float:
        if self.lam == "auto":
            raise ValueError(
                'λ is still "auto"; fedcgd.accounting.selection.resolve chooses it for a participation and a budget'
            )
        return self.lam
