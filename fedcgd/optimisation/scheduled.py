"""The error of Toeplitz mechanisms under a learning-rate schedule, and its gradient, without an n × n matrix."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.mechanisms.workload import Objective

_CHUNK_ENTRIES = 2**20  # of an array with a column for each round: 8 MiB


class _ScheduledError(torch.autograd.Function):
    """The squared error of B[i, j] = Σ_{j ≤ s ≤ i} η_s·t[s − j], differentiable in t; O(n²) time, O(n) chunks of memory."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, rates: Vector, error: Objective) -> Tensor:
        value, gradient = error_and_gradient(t.detach().numpy(), rates, error)
        ctx.save_for_backward(torch.from_numpy(gradient))
        return torch.tensor(value, dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradients[0] * gradient, None, None


def scheduled_error(t: Tensor, rates: Vector, error: Objective) -> Tensor:
    """‖B‖²_F/n (`rmse`) or the largest squared row of B (`max-se`), B[i, j] = Σ_{j ≤ s ≤ i} η_s·t[s − j].

    Args:
        t: the coefficients of M·C⁻¹, what momentum makes of the inverse, shape (n,), float64.
        rates: η of each round, shape (n,).
        error: which of the two errors.
    """
    result: Tensor = _ScheduledError.apply(t, rates, error)
    return result


def error_and_gradient(t: Vector, rates: Vector, error: Objective) -> tuple[float, Vector]:
    """The squared error as `scheduled_error` defines it, and its derivative by each coefficient."""
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
    step = max(1, min(n, _CHUNK_ENTRIES // n))
    for start in range(0, n, step):
        width, height = min(step, n - start), n - start
        shown = sliding_window_view(padded[start:], width)[:height]
        entries = np.cumsum(shown * t[:height, None], axis=0)
        if width > 1:
            entries[np.arange(height)[:, None] + np.arange(width) >= height] = 0
        yield start, entries, shown
