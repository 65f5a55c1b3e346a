"""BFGS for objectives with kinks where they are least, in float64.

Lewis, Overton, "Nonsmooth optimization via quasi-Newton methods", Mathematical Programming 141, 2013: with all of the approximate
inverse Hessian, and a line search that asks for a decrease and for a slope that has risen (weak Wolfe), BFGS converges where a
limited history stops, at a point that depends on the last bit of each product.
"""

import numpy as np

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.optimisation import PROGRESS
from fedcgd.optimisation.effort import EFFORT
from fedcgd.optimisation.lbfgs import Objective


def minimise_with_kinks(
    objective: Objective,
    start: Vector,
    *,
    iterations: int = 2000,
    window: int = 50,
    tolerance: float = 1e-12,
) -> tuple[Vector, float]:
    """(argument, value) of a local minimum of `objective` near `start`, in O(d²) memory for d numbers.

    Ends when `window` iterations gain too little, or when no step gains anything.

    Args:
        objective: gives the value and a gradient of an argument; it need not be differentiable everywhere.
        start: the first argument, shape (d,).
        iterations: the most that are done.
        window: it ends when so many iterations gain less than `tolerance`, relatively.
        tolerance: as `window` says.
    """
    x = np.array(start, np.float64)
    value, gradient = objective(x)
    if not len(x):
        return x, value
    inverse_hessian = np.eye(len(x)) / max(float(np.linalg.norm(gradient)), 1e-300)
    values, report = [value], PROGRESS.get()
    while len(values) <= iterations:
        step = -inverse_hessian @ gradient
        found = _line_search(objective, x, step, value, float(step @ gradient))
        if found is None:
            break
        moved, changed = found[0] - x, found[2] - gradient
        x, value, gradient = found
        slope = float(moved @ changed)
        if slope <= 0:
            break
        if len(values) == 1:
            inverse_hessian = np.eye(len(x)) * (slope / float(changed @ changed))
        turned = inverse_hessian @ changed
        inverse_hessian += (slope + float(changed @ turned)) / slope**2 * np.outer(moved, moved)
        inverse_hessian -= (np.outer(turned, moved) + np.outer(moved, turned)) / slope
        values.append(value)
        if len(values) % EFFORT.report == 0:
            report(len(values), value)
        if len(values) > window and values[-window] - value <= tolerance * abs(value):
            break
    report(len(values), value)
    return x, value


def _line_search(
    objective: Objective,
    x: Vector,
    step: Vector,
    value: float,
    slope: float,
    decrease: float = 1e-4,
    curvature: float = 0.9,
) -> tuple[Vector, float, Vector] | None:
    """(argument, value, gradient) at a lower point of x + t·step, by bisection; None where there is none."""
    low, high, t = 0.0, np.inf, 1.0
    for _ in range(60 if slope < 0 else 0):  # a double has 53 bits
        at = x + t * step
        there, gradient = objective(at)
        if not there <= value + decrease * t * slope:
            high = t
        elif float(gradient @ step) < curvature * slope:
            low = t
        else:
            return at, there, gradient
        t = (low + high) / 2 if high < np.inf else 2 * low
    if low == 0:
        return None
    at = x + low * step
    there, gradient = objective(at)
    return at, there, gradient
