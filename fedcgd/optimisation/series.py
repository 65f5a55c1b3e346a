"""Power series that PyTorch can differentiate: the building block of every Toeplitz optimisation."""

from typing import Any

import numpy as np
import torch
from scipy.signal import fftconvolve, lfilter
from torch import Tensor

from fedcgd.mechanisms.mechanism import Vector

_FEW = 64  # so many sums take less time than three Fourier transforms


class _Quotient(torch.autograd.Function):
    """y with Σ_l c[l]·y[t − l] = r[t], in O(n·p): the first n coefficients of r(x)/c(x)."""

    @staticmethod
    def forward(ctx: Any, c: Tensor, r: Tensor) -> Tensor:
        y = torch.from_numpy(np.asarray(lfilter([1.0], c.detach().numpy(), r.detach().numpy())))
        ctx.save_for_backward(c, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor]:
        c, y = ctx.saved_tensors
        # The adjoint of the solve is the same solve on reversed sequences.
        w = np.asarray(lfilter([1.0], c.numpy(), gradients[0].numpy()[::-1]))[::-1].copy()
        if not ctx.needs_input_grad[0]:
            return None, torch.from_numpy(w)
        return torch.from_numpy(-_correlation(w, y.numpy(), len(c))), torch.from_numpy(w)


def _correlation(w: Vector, y: Vector, lags: int) -> Vector:
    """Σ_t w[t]·y[t − l] for l < lags."""
    n = len(y)
    if lags <= _FEW:
        return np.array([w[lag:] @ y[: n - lag] for lag in range(lags)])
    result: Vector = fftconvolve(w, y[::-1])[n - 1 : n - 1 + lags]
    return result


def quotient(c: Tensor, r: Tensor) -> Tensor:
    """The first len(r) coefficients of r(x)/c(x), float64, differentiable in both. c[0] must not be 0."""
    result: Tensor = _Quotient.apply(c[: len(r)], r)
    return result


def sum_of_leftmost(c: Tensor, rounds: int, k: int, b: int) -> Tensor:
    """Σ_{j<k} C[:, jb], shape (rounds,), for the Toeplitz C of `c` (cut or filled with zeros), differentiable, in O(n)."""
    epochs = -(-rounds // b)
    c = torch.nn.functional.pad(c[:rounds], (0, epochs * b - min(len(c), rounds))).reshape(epochs, b)
    total = torch.cumsum(c, dim=0)
    if k < epochs:
        total = torch.cat([total[:k], total[k:] - total[:-k]])
    return total.reshape(-1)[:rounds]
