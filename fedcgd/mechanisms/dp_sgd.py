"""DP-SGD: independent noise, C = I."""

from dataclasses import dataclass

import numpy as np

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.toeplitz import Toeplitz, padded


@dataclass(frozen=True)
class DPSGD(Toeplitz):
    """C = I: x̂_t = x_t + ζσZ_t, independent noise in each round.

    Abadi et al., "Deep Learning with Differential Privacy", 2016, arXiv:1607.00133.
    """

    name = "dp-sgd"

    def coefficients(self, rounds: int) -> Vector:
        return padded(np.ones(1), rounds)

    def inverse_coefficients(self, rounds: int) -> Vector:
        return np.ones(1)
