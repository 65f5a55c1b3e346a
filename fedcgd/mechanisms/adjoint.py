"""C⁻ᵀ·V by what is cheap about each mechanism: how noise of every round counts in weighted sums of the noise that is released."""

import numpy as np

from fedcgd.mechanisms.dense import Dense
from fedcgd.mechanisms.mechanism import Matrix, Mechanism
from fedcgd.mechanisms.normalized import Normalized
from fedcgd.mechanisms.streaming import inverse_rows
from fedcgd.mechanisms.toeplitz import Toeplitz, convolved, divided, solved

TERMS_SUMMED = 32  # coefficients up to which a product with a series is done term by term


def transposed_inverse(mechanism: Mechanism, rounds: int, v: Matrix) -> Matrix:
    """C⁻ᵀ·V for V of shape (rounds, m), float64.

    O(n·p·m) for a `Dense` C, and for a Toeplitz one, with unit columns or not, if C or C⁻¹ has p bands; O(n·log n·m) for other
    Toeplitz C; else O(n²·m) from the rows of C⁻¹, one after the other. No n × n matrix is kept.
    """
    if isinstance(mechanism, Normalized):
        return _toeplitz(mechanism.mechanism, rounds, v * mechanism.column_norms(rounds)[:, None])
    if isinstance(mechanism, Toeplitz):
        return _toeplitz(mechanism, rounds, v)
    if isinstance(mechanism, Dense):
        mechanism.bandwidth(rounds)  # refuses another number of rounds than it was made for
        return solved(mechanism.band, v, transposed=True)
    result = np.zeros_like(v)
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
    series = mechanism.coefficients(rounds)[: mechanism.bandwidth(rounds)]
    if len(series) <= TERMS_SUMMED:
        return divided(series, backwards)[::-1]
    return convolved(inverse, backwards)[::-1]
