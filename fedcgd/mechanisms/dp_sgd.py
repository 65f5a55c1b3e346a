"""DP-SGD: independent noise, C = I."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.mechanisms.toeplitz import toeplitz_columns


@dataclass(frozen=True)
class DPSGD:
    """C = I: x̂_t = x_t + ζσZ_t (Abadi et al., 2016)."""

    @property
    def name(self) -> str:
        return "dp-sgd"

    def coefficients(self, rounds: int) -> Vector:
        return np.eye(1, rounds)[0]

    def inverse_coefficients(self, rounds: int) -> Vector:
        return np.ones(1)

    def columns(self, rounds: int, indices: NDArray[np.intp]) -> Matrix:
        return toeplitz_columns(np.ones(1), rounds, indices)

    def inverse_row(self, round: int, rounds: int) -> Vector:
        return np.ones(1)
