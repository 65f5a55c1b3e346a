"""A user's update, clipped and on the grid, in two passes over the model: one for the norm, one for the numbers."""

import math

import numpy as np

from fedcgd.clipping import ROUNDING
from fedcgd.noise.quantisation import Grid, Integers
from fedcgd_flower.layout import Flat

_CHUNK = 2**16  # entries at once: what a core's cache holds


def clipped_update(
    trained: Flat, model: Flat, *, clip_norm: float, grid: Grid, unit: float = 1.0, indicator: int = 0
) -> Integers | None:
    """(`trained` − `model`) / `unit` scaled to L2 norm at most `clip_norm`, in steps of `grid`, rounded towards zero; shape (d,).

    With an `indicator`, one entry more says whether the update was within the norm: `indicator` if it was, −`indicator` if it
    was scaled. None if the update is not finite. Guarantee: step times the result has norm at most `clip_norm` (without its
    last entry), for every input.
    """
    difference = np.empty(min(_CHUNK, len(model)))
    squares = 0.0
    with np.errstate(invalid="ignore"):  # ∞ − ∞ is NaN, and then so is the sum
        for start in range(0, len(model), _CHUNK):
            part = difference[: len(model) - start]
            np.subtract(trained[start : start + _CHUNK], model[start : start + _CHUNK], out=part, dtype=np.float64)
            squares += float(part @ part)  # of float32 numbers: it cannot overflow
    if not math.isfinite(squares):
        return None
    norm = math.sqrt(squares) / unit
    factor = min(1.0, clip_norm * (1 - ROUNDING) / norm) if norm > 0 else 1.0
    steps = np.empty(len(model) + bool(indicator), np.int64)
    if indicator:
        steps[-1] = indicator if factor == 1 else -indicator
    for start in range(0, len(model), _CHUNK):
        part = difference[: len(model) - start]
        np.subtract(trained[start : start + _CHUNK], model[start : start + _CHUNK], out=part, dtype=np.float64)
        part *= factor / unit
        part *= 1 / grid.step  # exact: the step is a power of two
        np.copyto(steps[start : start + len(part)], part, casting="unsafe")  # towards zero
    return steps
