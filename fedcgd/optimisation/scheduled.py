"""The error of Toeplitz mechanisms under a learning-rate schedule, and its gradient, without an n × n matrix."""

from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

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
    if error == "rmse":
        total, gradient = 0.0, np.zeros(n)
        for start, entries, shown in _chunks(t, rates):
            total += float(np.vdot(entries, entries))
            # t[l] is in all rows from the l-th below the diagonal on.
            later = np.cumsum(entries[::-1], axis=0)[::-1]
            gradient[: n - start] += 2 * np.einsum("ij,ij->i", later, shown)
        return total / n, gradient / n
    squares = np.zeros(n)
    for start, entries, _ in _chunks(t, rates):
        for column in range(entries.shape[1]):
            squares[start + column :] += entries[: n - start - column, column] ** 2
    worst = int(np.argmax(squares))
    # Row `worst`, by the round that the noise came from: B[i, j] = Σ_{l ≤ i − j} η_{j+l}·t[l].
    gradient, row = np.zeros(n), np.zeros(worst + 1)
    for j in range(worst + 1):
        row[j] = rates[j : worst + 1] @ t[: worst + 1 - j]
        gradient[: worst + 1 - j] += 2 * row[j] * rates[j : worst + 1]
    return float(squares[worst]), gradient


def _chunks(t: Vector, rates: Vector) -> Iterator[tuple[int, Matrix, Matrix]]:
    """(first column, B below the diagonal with a column for each round, the rates that entered) a few columns at a time.

    Row m of the second is B[j + m, j] for the columns j, and 0 where that lies below the last round; row l of the third η_{j+l}.
    """
    n = len(t)
    padded = np.concatenate([rates, np.zeros(n)])
    step = max(1, min(n, EFFORT.chunk // n))
    for start in range(0, n, step):
        width, height = min(step, n - start), n - start
        shown = sliding_window_view(padded[start:], width)[:height]
        entries = np.cumsum(shown * t[:height, None], axis=0)
        if width > 1:
            entries[np.arange(height)[:, None] + np.arange(width) >= height] = 0
        yield start, entries, shown
