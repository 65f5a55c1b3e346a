"""Toeplitz algebra shared by the mechanisms whose C is one sequence of coefficients."""

import numpy as np
from numpy.typing import NDArray

from fedcgd.mechanisms.mechanism import Matrix, Vector


def toeplitz_columns(coefficients: Vector, rounds: int, indices: NDArray[np.intp]) -> Matrix:
    """Columns `indices` of the lower-triangular Toeplitz matrix of `coefficients`, shape (rounds, len(indices))."""
    lags = np.arange(rounds)[:, None] - np.asarray(indices)[None, :]
    padded = np.zeros(rounds)
    padded[: min(len(coefficients), rounds)] = coefficients[:rounds]
    return np.where(lags >= 0, padded[np.maximum(lags, 0)], 0.0)
