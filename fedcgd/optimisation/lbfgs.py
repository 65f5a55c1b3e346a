"""L-BFGS in float64: deterministic, stopped when it no longer gains."""

from collections.abc import Callable

import numpy as np
import scipy

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.optimisation import PROGRESS
from fedcgd.optimisation.effort import EFFORT

Objective = Callable[[Vector], tuple[float, Vector]]
"""Argument ↦ (value, gradient)."""

_LINE_SEARCH_FAILED = 2


def minimise(
    objective: Objective,
    start: Vector,
    *,
    iterations: int = 2000,
    tolerance: float = 1e-9,
    history: int = 20,
) -> tuple[Vector, float]:
    """(argument, value) of a local minimum of `objective` near `start`, whichever of all seen arguments was best.

    SciPy's L-BFGS-B, which begins again, from the best argument and without a history, where its line search fails.

    Args:
        objective: gives the value and the gradient of an argument.
        start: the first argument.
        iterations: the most that are done.
        tolerance: it ends when 20 iterations gain less than this, relatively.
        history: how many steps the second derivatives are estimated from.
    """
    best = np.array(start, np.float64)
    best_value = objective(best)[0]
    if not len(best):
        return best, best_value
    done, before, report = 0, best_value, PROGRESS.get()

    def seen(x: Vector) -> tuple[float, Vector]:
        nonlocal best, best_value
        value, gradient = objective(x)
        if value < best_value:
            best, best_value = x.copy(), value
        return value, gradient

    def look(xk: Vector) -> None:
        nonlocal done, before
        done += 1
        if done % EFFORT.report:
            return
        report(done, best_value)
        if done >= iterations or not before - best_value > tolerance * abs(best_value):
            raise StopIteration
        before = best_value

    while True:
        value = best_value
        # An end by `gtol` or `ftol` would be one before the tolerance is met.
        ended = scipy.optimize.minimize(
            seen,
            best,
            jac=True,
            method="L-BFGS-B",
            callback=look,
            options={"maxcor": history, "maxiter": iterations, "maxfun": 20 * iterations, "ftol": 0.0, "gtol": 0.0},
        )
        if ended.status != _LINE_SEARCH_FAILED or not value - best_value > tolerance * abs(best_value):
            break
    report(done, best_value)
    return best, best_value
