"""A user's update, clipped and on the grid, in two passes over the model: one for the norm, one for the numbers."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcgd.clipping import clip_factor
from fedcgd.native.vector_kernels import CHUNK, aligned, kernels_for, squared_distance
from fedcgd.noise.quantisation import Lattice
from fedcgd_flower.layout import Flat

Steps = NDArray[np.signedinteger[Any]]
"""32-bit or 64-bit integers."""


def clipped_update(
    trained: Flat | Sequence[Flat],
    model: Flat,
    *,
    clip_norm: float,
    grid: Lattice,
    update_scale: float = 1.0,
    indicator: int = 0,
) -> Steps | None:
    """clip((`trained` − `model`) / `update_scale`, `clip_norm`) in steps of `grid`, rounded towards zero; shape (d,).

    `trained` may come in consecutive pieces, as a model's arrays are. The result has 64 bits. With an `indicator`, one entry more
    says whether the update was within the norm: `indicator` if it was, −`indicator` if it was scaled.
    None if the update is not finite. Guarantee: step times the result has norm at most `clip_norm` (without its last entry), for
    every input: the norm is off by at most 2⁻²⁹ of itself, the factor aims 2⁻²² below the bound, and rounding towards zero makes
    no entry larger.
    """
    steps: Steps = np.empty(len(model) + bool(indicator), np.int64)
    checksum = write_clipped_update(
        steps, trained, model, clip_norm=clip_norm, grid=grid, update_scale=update_scale, indicator=indicator
    )
    return None if checksum is None else steps


def write_clipped_update(
    out: Steps,
    trained: Flat | Sequence[Flat],
    model: Flat,
    *,
    clip_norm: float,
    grid: Lattice,
    update_scale: float = 1.0,
    indicator: int = 0,
) -> int | None:
    """Write `clipped_update` to `out`, whose integers must hold clip_norm / step and `indicator`; the result is their sum.

    None, and nothing is written, if the update is not finite.
    """
    parts = [trained] if isinstance(trained, np.ndarray) else trained
    stretches, start = [], 0
    for piece in parts:
        stretches.append((start, start + len(piece), aligned(piece)))
        start += len(piece)
    model = aligned(model)
    squares = sum(squared_distance(piece, model[start:stop]) for start, stop, piece in stretches)
    if not math.isfinite(squares):
        return None
    factor = clip_factor(math.sqrt(squares) / update_scale, clip_norm)
    total = 0
    work = kernels_for(len(model))
    for start, stop, piece in stretches:
        for first in range(start, stop, CHUNK):
            last = min(first + CHUNK, stop)
            part = piece[first - start : last - start]
            total += work.steps(part, model[first:last], factor / update_scale, 1 / grid.step, out[first:last])
    if indicator:
        out[-1] = indicator if factor == 1 else -indicator
        total += int(out[-1])
    return total
