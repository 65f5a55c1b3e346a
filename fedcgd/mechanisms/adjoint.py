"""C⁻ᵀ·V by what is cheap about each mechanism: how noise of every round counts in weighted sums of the noise that is released."""

import numpy as np
import scipy

from fedcgd.mechanisms.dense import Dense, solve_transposed
from fedcgd.mechanisms.mechanism import Matrix, Mechanism, Toeplitz, Vector
from fedcgd.mechanisms.normalized import Normalized
from fedcgd.mechanisms.streaming import inverse_rows, noise_mode

TERMS_SUMMED = 32  # coefficients up to which a product with a series is done term by term


def transposed_inverse(mechanism: Mechanism, rounds: int, v: Matrix) -> Matrix:
    """C⁻ᵀ·V for V of shape (rounds, m), float64.

    O(n·p·m) if C or C⁻¹ has p bands, O(n·log n·m) for any other Toeplitz C, with unit columns or not, else O(n²·m) from the rows
    of C⁻¹, one after the other. No n × n matrix is kept.
    """
    if isinstance(mechanism, Normalized):
        return _toeplitz(mechanism.mechanism, rounds, v * mechanism.column_norms(rounds)[:, None])
    if isinstance(mechanism, Toeplitz):
        return _toeplitz(mechanism, rounds, v)
    if isinstance(mechanism, Dense):
        mechanism.bandwidth(rounds)  # refuses another number of rounds than it was made for
        return solve_transposed(mechanism.band, v)
    result = np.zeros_like(v)
    if noise_mode(mechanism, rounds) == "replay":
        for lag in range(mechanism.inverse_bandwidth(rounds)):
            result[: rounds - lag] += (mechanism.inverse_diagonal(lag, rounds)[:, None] * v)[lag:]
        return result
    for t, (first, row) in enumerate(inverse_rows(mechanism, rounds)):
        result[first : t + 1] += np.outer(row, v[t])
    return result


def _toeplitz(mechanism: Toeplitz, rounds: int, v: Matrix) -> Matrix:
    """Backwards in time, C⁻ᵀ is the filter with the coefficients of C⁻¹."""
    backwards = v[::-1]
    inverse = mechanism.inverse_coefficients(rounds)
    if len(inverse) <= TERMS_SUMMED:
        result = inverse[0] * backwards
        for lag in range(1, len(inverse)):
            result[lag:] += inverse[lag] * backwards[: rounds - lag]
        return np.asarray(result[::-1])
    series = _used(mechanism.coefficients(rounds))
    if len(series) <= TERMS_SUMMED:
        return np.asarray(scipy.signal.lfilter([1.0], series, backwards, axis=0))[::-1]
    result = scipy.signal.fftconvolve(inverse[:, None], backwards, axes=0)[:rounds]
    return np.asarray(result)[::-1]


def _used(series: Vector) -> Vector:
    return series[: int(np.flatnonzero(series)[-1]) + 1]
