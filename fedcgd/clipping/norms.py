"""Clipping of flat updates: no norm exceeds the bound, whatever the update holds."""

import math
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Float = TypeVar("Float", bound=np.floating[Any])

ROUNDING = 2.0**-22
"""A clipped vector is aimed this far below its bound, relatively, so that rounding to float32 cannot lift it above."""


def clip_factor(norm: float, clip_norm: float) -> float:
    """What a vector is multiplied by: 1 up to a norm of `clip_norm` · (1 − `ROUNDING`), and what leads there above.

    Args:
        norm: the L2 norm of the vector.
        clip_norm: ζ, the bound.
    """
    return min(1.0, clip_norm * (1 - ROUNDING) / norm) if norm > 0 else 1.0


def clip(update: NDArray[Float], clip_norm: float) -> NDArray[Float]:
    """`update` scaled to L2 norm at most `clip_norm`; zeros if any entry is not finite. Keeps shape and dtype.

    Guarantee: the result, as rounded to float32 or float64, has norm at most `clip_norm` (at least 1e-30) for every
    input, and no update raises.

    Args:
        update: of any shape, in any floating-point type.
        clip_norm: ζ, the bound, in units of the update.

    >>> clip(np.array([3.0, 4.0]), 1.0).round(3).tolist()
    [0.6, 0.8]
    """
    largest = float(np.max(np.abs(update), initial=0.0))
    if not math.isfinite(largest):
        return np.zeros_like(update)
    if largest == 0:
        return update.copy()
    shape = update.astype(np.float64) / largest  # so that no square overflows
    norm = math.sqrt(float(np.sum(shape * shape)))  # in units of `largest`
    bound = clip_norm * (1 - ROUNDING)
    if norm * largest <= bound:
        return update.copy()
    clipped: NDArray[Float] = (shape * (bound / norm)).astype(update.dtype)
    return clipped
