"""Power series and their derivatives: the building block of every Toeplitz optimisation.

A function here gives its value and a `back`, which takes the derivative of something by that value and gives its derivative by
the arguments (reverse mode).
"""

from collections.abc import Callable

import numpy as np

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.toeplitz import convolved, divided
from fedcgd.optimisation.effort import EFFORT


def quotient(c: Vector, r: Vector) -> tuple[Vector, Callable[[Vector], tuple[Vector, Vector]]]:
    """(the first n coefficients of r(x)/c(x), back): y with Σ_l c[l]·y[t − l] = r[t], in O(n·p).

    Args:
        c: the divisor's coefficients, shape (p,); c[0] must not be 0. Those behind the n-th do not count.
        r: the dividend's, shape (n,).

    Returns:
        y, shape (n,), and `back`: derivative by y ↦ (derivative by c, shape (p,), derivative by r).
    """
    n, p = len(r), len(c)
    y = divided(c, r)

    def back(gradient: Vector) -> tuple[Vector, Vector]:
        # The adjoint of the solve is the same solve on reversed sequences.
        w = divided(c, gradient[::-1])[::-1]
        return -np.pad(correlation(w, y, min(n, p)), (0, max(p - n, 0))), w

    return y, back


def correlation(w: Vector, y: Vector, lags: int) -> Vector:
    """Σ_t w[t]·y[t − l] for l < lags, which are at most len(y)."""
    n = len(y)
    if lags <= EFFORT.terms:
        return np.array([w[lag:] @ y[: n - lag] for lag in range(lags)])
    return convolved(y, w[::-1])[::-1][:lags]
