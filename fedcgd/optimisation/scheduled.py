"""The error of Toeplitz mechanisms under a learning-rate schedule, and its gradient, without an n × n matrix."""

from collections.abc import Iterator

import numpy as np
import scipy

from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.mechanisms.workload import Objective
from fedcgd.optimisation.effort import EFFORT


def scheduled_error(t: Vector, rates: Vector, error: Objective) -> tuple[float, Vector]:
    """‖B‖²_F/n (`rmse`) or the largest squared row of B (`max-se`), and its derivative by t.

    B[i, j] = Σ_{j ≤ s ≤ i} η_s·t[s − j]. O(n²) time, in chunks of O(n) memory.

    Args:
        t: the coefficients of M·C⁻¹, what momentum makes of the inverse, shape (n,), float64.
        rates: η of each round, shape (n,).
        error: which of the two errors.
    """
    n = len(t)
    weights, value, gradient = np.full(n, 1 / n), 0.0, np.zeros(n)  # of the squared rows
    if error == "max-se":
        squares = np.zeros(n)
        for start, rows in _columns(t, rates):
            squares[start:] += (rows**2).sum(axis=1)
        weights = np.eye(1, n, int(np.argmax(squares)))[0]
    for start, rows in _columns(t, rates):
        weighted = weights[start:, None] * rows
        value += float(np.vdot(weighted, rows))
        later = np.cumsum(weighted[::-1], axis=0)[::-1] * rates[start:, None]
        for column in range(rows.shape[1]):
            gradient[: n - start - column] += 2 * later[column:, column]
    return value, gradient


def _columns(t: Vector, rates: Vector) -> Iterator[tuple[int, Matrix]]:
    """(j, B[j:, j:j + m]) for m columns at a time, of at most `EFFORT.chunk` entries."""
    n = len(t)
    step = max(1, min(n, EFFORT.chunk // n))
    for start in range(0, n, step):
        width = min(step, n - start)
        yield start, np.cumsum(rates[start:, None] * scipy.linalg.toeplitz(t[: n - start], np.zeros(width)), axis=0)
