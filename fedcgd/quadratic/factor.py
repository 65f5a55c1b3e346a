"""The quadratic form behind the loss, VᵀMV, as a product of two thin matrices: what makes fitting to curvature cheap."""

from functools import lru_cache

import numpy as np

from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.quadratic.problem import Quadratic

_TOLERANCE = 1e-13  # of the largest diagonal entry: what a column may still hold when it is left out


@lru_cache(maxsize=4)
def thin_factor(quadratic: Quadratic, rounds: int) -> Matrix:
    """L with L·Lᵀ = VᵀMV (see `final_loss`) up to rounding, shape (rounds, r); r is some dozens, whatever the dimension.

    Counted back from the last round the form has entries h(s + s'), h(m) = Σ_i μ_i·a_i^m: a positive semidefinite Hankel matrix,
    whose rank is numerically small. A Cholesky decomposition with pivots makes r of its n columns, each in O(n·r), and needs no
    n × n matrix. Then Tr((CᵀC)⁻¹VᵀMV) = ‖C⁻ᵀL‖². Read-only.
    """
    h = _moments(quadratic, 2 * rounds - 1)
    rest = h[0::2].copy()
    limit = _TOLERANCE * float(rest.max())
    columns = np.zeros((rounds, 0))
    while columns.shape[1] < rounds:
        pivot = int(np.argmax(rest))
        if rest[pivot] <= limit:
            break
        column = (h[pivot : pivot + rounds] - columns @ columns[pivot]) / np.sqrt(rest[pivot])
        rest = np.maximum(rest - column**2, 0.0)
        rest[pivot] = 0.0
        columns = np.column_stack([columns, column])
    result = np.ascontiguousarray(columns[::-1])
    result.setflags(write=False)
    return result


def _moments(quadratic: Quadratic, size: int) -> Vector:
    """h(m) = Σ_i counts_i·μ_i·a_i^m for m < size."""
    total = np.zeros(size)
    for a, values, counts in quadratic.contractions_in_parts(size):
        total += (counts * values) @ a[:, None] ** np.arange(size)
    return total
