"""Mechanisms whose numbers are best for a quadratic: λ, ν, coefficients and buffers, at equal privacy under (k, b).

The objective is log(final_loss · sens²), with the sensitivity that is valid for each kind of mechanism. With `normalized` it is
that of the mechanism's column-normalised form, which other numbers make best; the mechanism itself is what is returned.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import scipy

from fedcgd.mechanisms import LambdaCGD, Normalized, NuDPFTRL
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.mechanisms.toeplitz import Toeplitz
from fedcgd.optimisation.effort import EFFORT
from fedcgd.participation import Participation
from fedcgd.quadratic import Quadratic
from fedcgd.quadratic.loss import final_loss

OneNumber = TypeVar("OneNumber", LambdaCGD, NuDPFTRL)


def lambda_cgd(participation: Participation, *, quadratic: Quadratic, normalized: bool = False) -> LambdaCGD:
    """The λ of least loss at equal privacy, by a search on the scale 1/(1 − λ); 0 (DP-SGD) if nothing is better.

    Args:
        participation: (n, k, b); its sampling does not count.
        quadratic: what is descended on, and how.
        normalized: whether the sensitivity is that of the column-normalised form.
    """
    error: Callable[[Toeplitz], float] = partial(_log_error, participation, quadratic, normalized)
    longest = math.log(4.0 * participation.rounds + 4.0)
    found = _search(lambda x: LambdaCGD(-math.expm1(-x)), (0.0, longest), error)
    return min(LambdaCGD(0.0), found, key=error)


def nu_dp_ftrl(participation: Participation, *, quadratic: Quadratic, normalized: bool = False) -> NuDPFTRL:
    """The ν of least loss at equal privacy, by a search on a logarithmic scale.

    Args:
        participation: (n, k, b); its sampling does not count.
        quadratic: what is descended on, and how.
        normalized: whether the sensitivity is that of the column-normalised form.
    """
    error: Callable[[Toeplitz], float] = partial(_log_error, participation, quadratic, normalized)
    ends = (math.log(1e-2 / participation.rounds), math.log(1 - 1e-6))
    return _search(lambda x: NuDPFTRL(math.exp(x)), ends, error)


def _search(
    make: Callable[[float], OneNumber],
    ends: tuple[float, float],
    error: Callable[[OneNumber], float],
) -> OneNumber:
    """The best on a grid, then by a bounded search between the neighbours of its best point."""

    def at(x: float) -> float:
        return error(make(x))

    grid = np.linspace(*ends, EFFORT.grid)
    least = int(np.argmin([at(float(x)) for x in grid]))
    bounds = (float(grid[max(least - 1, 0)]), float(grid[min(least + 1, EFFORT.grid - 1)]))
    return make(float(scipy.optimize.minimize_scalar(at, bounds=bounds, method="bounded", options={"xatol": 1e-5}).x))


def _log_error(participation: Participation, quadratic: Quadratic, normalized: bool, one: Toeplitz) -> float:
    mechanism = Normalized(one) if normalized else one
    loss = final_loss(mechanism, participation.rounds, quadratic)
    return math.log(loss) + 2 * math.log(sensitivity(mechanism, participation).value)
