"""DP-λCGD: each round cancels the fraction λ of the noise before it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.mechanisms.toeplitz import toeplitz_columns


@dataclass(frozen=True)
class LambdaCGD:
    """C_λ[i, j] = λ^(i−j): x̂_t = x_t + ζσ(Z_t − λZ_{t−1}) (eq. 7 and Algorithm 1 of arXiv:2601.22334).

    `lam` is in [0, 1); 0 is DP-SGD. Raises ValueError outside.
    """

    lam: float

    def __post_init__(self) -> None:
        if not 0 <= self.lam < 1:  # also refuses NaN
            raise ValueError(f"lam must be in [0, 1), got {self.lam}; 0 is DP-SGD and values near 1 cancel most")

    @property
    def name(self) -> str:
        return "lambda-cgd"

    def coefficients(self, rounds: int) -> Vector:
        return np.power(self.lam, np.arange(rounds, dtype=np.float64))

    def inverse_coefficients(self, rounds: int) -> Vector:
        return np.array([1.0, -self.lam])[: min(rounds, 2 if self.lam else 1)]

    def columns(self, rounds: int, indices: NDArray[np.intp]) -> Matrix:
        return toeplitz_columns(self.coefficients(rounds), rounds, indices)

    def inverse_row(self, round: int, rounds: int) -> Vector:
        return self.inverse_coefficients(round + 1)
