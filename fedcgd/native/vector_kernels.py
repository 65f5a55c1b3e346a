"""The passes over whole models that clipping and summing are made of, as machine code, or with NumPy and the same bits.

A pass works on a stretch of at most `CHUNK` numbers and gives what it sums as `LANES` float64 numbers: lane j is the sum of the
terms j, j + LANES, … of the stretch, one after the other. `math.fsum` of the lanes is exact, so that a stretch has one sum on
every machine and in either form.

Machine code is that of `vector_kernels.c`. Loading it takes a millisecond or two.
"""

import math
from collections.abc import Callable
from ctypes import c_double, c_int64
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcgd.native.library import array, checked, function, library

CHUNK = 2**16
"""Numbers at once: what a core's cache holds."""

LANES = 256

Floats = NDArray[np.float32]
Lanes = NDArray[np.float64]


class VectorKernels(NamedTuple):
    """One form of each pass, over stretches of at most `CHUNK` numbers. Machine code releases the interpreter's lock."""

    difference: Callable[..., None]
    """(x, y, lanes): lanes = those of (x − y)², in float64."""
    steps: Callable[..., int]
    """(x, y, factor, scale, out): out = (x − y)·factor·scale, rounded towards zero; it must fit `out`. The result is Σ out."""
    squares: Callable[..., None]
    """(rows, sums): sums[i] += Σ rows[i]², in float64; rows of any length. Lanes are added half to half, until one is left."""
    accumulate: Callable[..., None]
    """(rows, factors, scale, total): total += Σ_i rows[i]·factors[i]·scale, each number rounded towards zero to an int64; rows of
    any length. Rows whose factor is 0 are not read."""
    add: Callable[..., int]
    """(x, total, lanes): total += x; lanes = those of x²; the result is Σ x. Sums of integers are modulo 2⁶⁴."""
    mean: Callable[..., None]
    """(model, total, step, unit, count, out): out = model + total·step·unit/count, in float64, of any length, then rounded to
    float32. `out` may be the first half of the memory of `total`."""


def squared_distance(x: Floats, y: Floats) -> float:
    """Σ (x − y)², float64, relatively off by at most 2⁻²⁸ below 2⁴⁰ numbers; NaN or ∞ if one of them is not finite.

    With u = 2⁻⁵³: a difference is off by a factor 1 ± u, its square by (1 ± u)³. All terms are positive, so a lane of 2⁸ of them
    is off by (1 ± u)^(2⁸) more, the exact sum of lanes by 1 ± u, and the sum of at most 2²⁴ stretches by (1 ± u)^(2²⁴).
    Nothing overflows: squares of float32 differences are below 2²⁵⁸.
    """
    x, y = aligned(x), aligned(y)
    lanes = np.empty(LANES)
    total = 0.0
    work = kernels()
    with np.errstate(invalid="ignore"):  # ∞ − ∞ is NaN, and then so is the sum
        for start in range(0, len(x), CHUNK):
            work.difference(x[start : start + CHUNK], y[start : start + CHUNK], lanes)
            total += sum_of_lanes(lanes)
    return total


def aligned(x: Any) -> Any:
    """`x`, or a copy of it where its numbers lie as no processor likes to read them: at an odd place in a message, or apart."""
    return np.require(x, requirements=["ALIGNED", "C_CONTIGUOUS"])


def sum_of_lanes(lanes: Lanes) -> float:
    """Their sum, rounded once; NaN or ∞ if one of them is not finite."""
    try:
        return math.fsum(lanes)
    except (OverflowError, ValueError):  # beyond float64; ∞ and −∞ at once
        return math.nan


def _difference(x: Any, y: Any, lanes: Any) -> None:
    d = np.subtract(x, y, dtype=np.float64)
    _to_lanes(np.multiply(d, d, out=d), lanes)


def _steps(x: Any, y: Any, factor: float, scale: float, out: Any) -> int:
    d = np.subtract(x, y, dtype=np.float64)
    d *= factor
    d *= scale
    np.copyto(out, d, casting="unsafe")  # towards zero
    return int(out.sum(dtype=np.int64))


def _squares(rows: Any, sums: Any) -> None:
    terms = np.empty((CHUNK // LANES + 1, LANES))
    for i, x in enumerate(rows):
        own = np.zeros(LANES)
        for start in range(0, len(x), CHUNK):
            part = x[start : start + CHUNK]
            whole = len(part) // LANES
            terms[0] = own
            np.square(part[: whole * LANES].reshape(whole, LANES), out=terms[1 : whole + 1], dtype=np.float64)
            np.add.reduce(terms[: whole + 1], axis=0, out=own)  # row after row
            own[: len(part) - whole * LANES] += np.square(part[whole * LANES :], dtype=np.float64)
        while len(own) > 1:
            own = np.add(*np.split(own, 2))
        sums[i] += own[0]


def _accumulate(rows: Any, factors: Any, scale: float, total: Any) -> None:
    for x, factor in zip(rows, factors, strict=True):
        for start in range(0, len(x) if factor else 0, CHUNK):
            part = np.multiply(x[start : start + CHUNK], factor, dtype=np.float64)
            part *= scale
            total[start : start + CHUNK] += part.astype(np.int64)


def _add(x: Any, total: Any, lanes: Any) -> int:
    squares = x.astype(np.float64)
    _to_lanes(np.multiply(squares, squares, out=squares), lanes)
    total += x
    return int(x.sum(dtype=np.int64))


def _mean(model: Any, total: Any, step: float, unit: float, count: float, out: Any) -> None:
    for start in range(0, len(model), CHUNK):
        part = slice(start, min(start + CHUNK, len(model)))
        out[part] = model[part] + np.multiply(total[part], step, dtype=np.float64) * unit / count


def _to_lanes(terms: Any, lanes: Any) -> None:
    whole = len(terms) - len(terms) % LANES
    np.add.reduce(terms[:whole].reshape(-1, LANES), axis=0, out=lanes)  # row after row
    lanes[: len(terms) - whole] += terms[whole:]


NUMPY = VectorKernels(_difference, _steps, _squares, _accumulate, _add, _mean)


def kernels() -> VectorKernels:
    """The form to use: machine code, where it works."""
    return compiled() or NUMPY


@cache
def compiled() -> VectorKernels | None:
    """Machine code; None where it was not built, or does not work or gives other bits than NumPy."""
    return checked(_load, _answer, _ANSWER)


def _load() -> VectorKernels:
    code = library(Path(__file__).with_suffix(".c"))
    size, x, lanes, doubles = c_int64, array(np.float32), array(np.float64, LANES), array(np.float64)
    of_difference = function(code, "difference", [x, x, size, lanes])
    of_squares = function(code, "squares", [x, size, size, doubles])
    to_total = function(code, "accumulate", [x, size, size, doubles, c_double, array(np.int64)])
    of_mean = function(code, "mean", [x, array(np.int64), size, c_double, c_double, c_double, x])
    to_steps, adding = {}, {}
    for dtype, suffix in ((np.dtype(np.int32), "32"), (np.dtype(np.int64), "64")):
        of = array(dtype.type)
        to_steps[dtype] = function(code, f"steps_{suffix}", [x, x, size, c_double, c_double, of], c_int64)
        adding[dtype] = function(code, f"add_{suffix}", [of, size, array(np.int64), lanes], c_int64)
    return VectorKernels(
        difference=lambda x, y, lanes: of_difference(x, y, len(x), lanes),
        steps=lambda x, y, factor, scale, out: to_steps[out.dtype](x, y, len(x), factor, scale, out),
        squares=lambda rows, sums: of_squares(rows, *rows.shape, sums),
        accumulate=lambda rows, factors, scale, total: to_total(rows, *rows.shape, factors, scale, total),
        add=lambda x, total, lanes: adding[x.dtype](x, len(x), total, lanes),
        mean=lambda model, total, step, unit, count, out: of_mean(model, total, len(model), step, unit, count, out),
    )


_ANSWER = "738fa77ce66ce5f2e689f99982ae8e8b5c339a5d7681b845510bf5caf5b6215a"


def _answer(form: VectorKernels) -> bytes:
    """What each pass makes of some numbers."""
    size = 3 * LANES + 7
    x = (np.arange(size) * 7919 % 1013 / 1013 - 0.4).astype(np.float32)
    y = (np.arange(size) * 104729 % 997 / 997 - 0.6).astype(np.float32)
    lanes, total, of_rows = np.full(LANES, 0.5), np.arange(size), np.full(2, 0.25)
    form.difference(x, y, lanes)
    found = lanes.tobytes()
    form.squares(np.stack([x, y]), of_rows)
    form.accumulate(np.stack([x, y]), np.array([0.3, 0.7]), 2.0**40, total)
    found += of_rows.tobytes() + total.tobytes()
    form.mean(x, total, 2.0**-40, 0.3, 7.0, total.view(np.float32)[:size])
    found += total.tobytes()
    for dtype in (np.int32, np.int64):
        out: NDArray[Any] = np.empty(size, dtype)
        total = np.arange(size)
        checksums = form.steps(x, y, 0.3, 2.0**20, out), form.add(out, total, lanes)
        found += repr(checksums).encode() + out.tobytes() + total.tobytes() + lanes.tobytes()
    return found
