"""The passes over whole models that clipping and summing are made of, as machine code, or with NumPy and the same bits.

A pass works on a stretch of at most `CHUNK` numbers and gives what it sums as `LANES` float64 numbers: lane j is the sum of the
terms j, j + LANES, … of the stretch, one after the other. `math.fsum` of the lanes is exact, so that a stretch has one sum on
every machine and in either form.

Loading Numba takes about as long as NumPy needs for `_PATIENCE` numbers, so it is loaded when so many have gone through: a
process that answers one message, as a deployed ClientApp does, never loads it.
"""

import math
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK = 2**16
"""Numbers at once: what a core's cache holds."""

LANES = 256
_PATIENCE = 2**26

Floats = NDArray[np.float32]
Lanes = NDArray[np.float64]


class Passes(NamedTuple):
    """One form of each pass, over stretches of at most `CHUNK` numbers. Machine code releases the interpreter's lock."""

    difference: Callable[..., None]
    """(x, y, lanes): lanes = those of (x − y)², in float64."""
    steps: Callable[..., int]
    """(x, y, factor, scale, out): out = (x − y)·factor·scale, rounded towards zero; it must fit `out`. The result is Σ out."""
    squares: Callable[..., None]
    """(x, lanes): lanes = those of x², in float64, of a vector of any length."""
    accumulate: Callable[..., None]
    """(x, factor, scale, total): total += x·factor·scale, each rounded towards zero to an int64; of any length."""
    add: Callable[..., int]
    """(x, total, lanes): total += x; lanes = those of x²; the result is Σ x. Sums of integers are modulo 2⁶⁴."""


def squared_distance(x: Floats, y: Floats) -> float:
    """Σ (x − y)², float64, relatively off by at most 2⁻²⁸ below 2⁴⁰ numbers; NaN or ∞ if one of them is not finite.

    With u = 2⁻⁵³: a difference is off by a factor 1 ± u, its square by (1 ± u)³. All terms are positive, so a lane of 2⁸ of them
    is off by (1 ± u)^(2⁸) more, the exact sum of lanes by 1 ± u, and the sum of at most 2²⁴ stretches by (1 ± u)^(2²⁴).
    Nothing overflows: squares of float32 differences are below 2²⁵⁸.
    """
    x, y = read_only(x), read_only(y)
    lanes = np.empty(LANES)
    total = 0.0
    work = passes(len(x))
    with np.errstate(invalid="ignore"):  # ∞ − ∞ is NaN, and then so is the sum
        for start in range(0, len(x), CHUNK):
            work.difference(x[start : start + CHUNK], y[start : start + CHUNK], lanes)
            total += sum_of_lanes(lanes)
    return total


def read_only(x: Any) -> Any:
    """A view of an array that nobody can write to, as arrays in messages are: machine code is made for those alone."""
    x = x[:] if x.flags.aligned else x.copy()
    x.flags.writeable = False
    return x


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


def _squares(x: Any, lanes: Any) -> None:
    lanes[:] = 0.0
    rows = np.empty((CHUNK // LANES + 1, LANES))
    for start in range(0, len(x), CHUNK):
        part = x[start : start + CHUNK]
        whole = len(part) // LANES
        rows[0] = lanes
        np.square(part[: whole * LANES].reshape(whole, LANES), out=rows[1 : whole + 1], dtype=np.float64)
        np.add.reduce(rows[: whole + 1], axis=0, out=lanes)  # row after row
        lanes[: len(part) - whole * LANES] += np.square(part[whole * LANES :], dtype=np.float64)


def _accumulate(x: Any, factor: float, scale: float, total: Any) -> None:
    for start in range(0, len(x), CHUNK):
        part = np.multiply(x[start : start + CHUNK], factor, dtype=np.float64)
        part *= scale
        total[start : start + CHUNK] += part.astype(np.int64)


def _add(x: Any, total: Any, lanes: Any) -> int:
    squares = x.astype(np.float64)
    _to_lanes(np.multiply(squares, squares, out=squares), lanes)
    total += x
    return int(x.sum(dtype=np.int64))


def _to_lanes(terms: Any, lanes: Any) -> None:
    whole = len(terms) - len(terms) % LANES
    np.add.reduce(terms[:whole].reshape(-1, LANES), axis=0, out=lanes)  # row after row
    lanes[: len(terms) - whole] += terms[whole:]


NUMPY = Passes(_difference, _steps, _squares, _accumulate, _add)


def _compiled_difference(x: Any, y: Any, lanes: Any) -> None:
    lanes[:] = 0.0
    for begin in range(0, len(x), LANES):
        size = min(LANES, len(x) - begin)
        one, two = x[begin : begin + size], y[begin : begin + size]
        for j in range(size):
            d = np.float64(one[j]) - np.float64(two[j])
            lanes[j] += d * d


def _compiled_steps(x: Any, y: Any, factor: float, scale: float, out: Any) -> Any:
    total = np.int64(0)
    for i in range(len(x)):
        out[i] = (np.float64(x[i]) - np.float64(y[i])) * factor * scale
        total += np.int64(out[i])
    return total


def _compiled_squares(x: Any, lanes: Any) -> None:
    lanes[:] = 0.0
    for begin in range(0, len(x), LANES):
        size = min(LANES, len(x) - begin)
        values = x[begin : begin + size]
        for j in range(size):
            lanes[j] += np.float64(values[j]) * np.float64(values[j])


def _compiled_accumulate(x: Any, factor: float, scale: float, total: Any) -> None:
    for i in range(len(x)):
        total[i] += np.int64(np.float64(x[i]) * factor * scale)


def _compiled_add(x: Any, total: Any, lanes: Any) -> Any:
    lanes[:] = 0.0
    checksum = np.int64(0)
    for begin in range(0, len(x), LANES):
        size = min(LANES, len(x) - begin)
        values, sums = x[begin : begin + size], total[begin : begin + size]
        for j in range(size):
            value = np.float64(values[j])
            lanes[j] += value * value
            sums[j] += np.int64(values[j])
            checksum += np.int64(values[j])
    return checksum


_through = 0


def passes(numbers: int) -> Passes:
    """The form to use for so many numbers more."""
    global _through
    _through += numbers
    return (compiled() if _through > _PATIENCE or "numba" in sys.modules else None) or NUMPY


@cache
def compiled() -> Passes | None:
    """Machine code; None without Numba, or where it does not work or gives other bits than NumPy."""
    try:
        import numba

        compile = numba.njit(nogil=True, cache=True)
        made = Passes(
            difference=compile(_compiled_difference),
            steps=compile(_compiled_steps),
            squares=compile(_compiled_squares),
            accumulate=compile(_compiled_accumulate),
            add=compile(_compiled_add),
        )
        return made if _same_bits(made) else None
    except Exception:  # whatever a compiler can raise on a machine that it does not know
        return None


def _same_bits(made: Passes) -> bool:
    """Whether a few numbers give what they give with NumPy. Numba's cache on disk does not see that a constant has changed."""
    size = 3 * LANES + 7
    x = read_only(np.sin(np.arange(size, dtype=np.float32) * np.float32(1.7)))
    y = read_only(np.cos(np.arange(size, dtype=np.float32)))
    results = []
    for form in (made, NUMPY):
        lanes = np.full(LANES, 0.5)
        form.difference(x, y, lanes)
        result = [lanes.tobytes()]
        form.squares(x, lanes)
        total = np.arange(size)
        form.accumulate(x, 0.3, 2.0**40, total)
        result.append(lanes.tobytes() + total.tobytes())
        for dtype in (np.int32, np.int64):
            out: NDArray[Any] = np.empty(size, dtype)
            total = np.arange(size)
            result.append(str(form.steps(x, y, 0.3, 2.0**20, out)).encode() + out.tobytes())
            result.append(str(form.add(read_only(out), total, lanes)).encode() + total.tobytes() + lanes.tobytes())
        results.append(result)
    return results[0] == results[1]
