"""Whether noise can be made by machine code, and the same bits: that of `machine_code.c`, if there is a compiler."""

from collections.abc import Callable
from ctypes import c_double, c_int64
from functools import cache
from hashlib import shake_256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcgd.compiler import array, checked, function, library
from fedcgd.noise import box_muller as bm

WORTHWHILE = 2**16  # numbers; below, NumPy makes them in a few milliseconds


class Kernels(NamedTuple):
    """What is compiled. Both release the interpreter's lock; they work on the coordinates from `start` on."""

    add_to_grid: Callable[..., None]
    """(total, start, keys, weights, smoothing, width): total += round(Σ weights[j]·Z_j + width·words).

    int64 total; `keys` (terms, 8) and `smoothing` (8,) are ChaCha20 keys as uint32, of the Z and of the words."""
    fill_normals: Callable[..., None]
    """(out, start, key): out = Z, float32."""


def kernels_for(size: int) -> Kernels | None:
    """The kernels for noise of `size` numbers, None where NumPy has to make it or is as quick."""
    return kernels() if size >= WORTHWHILE else None


@cache
def kernels() -> Kernels | None:
    """None without a compiler, or where its code does not work or gives other bits than NumPy."""
    return checked(_load, _same_bits)


def _load() -> Kernels:
    code = library(Path(__file__).with_name("machine_code.c"), constants())
    integers, floats, key = array(np.int64), array(np.float32), array(np.uint32, 8)
    add = function(
        code, "add_to_grid", [integers, c_int64, c_int64, array(np.uint32), array(np.float64), c_int64, key, c_double]
    )
    fill = function(code, "fill_normals", [floats, c_int64, c_int64, key])

    def add_to_grid(total: Any, start: int, keys: Any, weights: Any, smoothing: Any, width: float) -> None:
        assert keys.shape == (len(weights), 8)
        add(total, len(total), start, keys, weights, len(weights), smoothing, width)

    def fill_normals(out: Any, start: int, key: Any) -> None:
        fill(out, len(out), start, key)

    return Kernels(add_to_grid, fill_normals)


def constants() -> dict[str, Any]:
    """What `machine_code.c` takes from `stream` and `box_muller`."""
    from fedcgd.noise.stream import COLUMNS

    names = "NUMBERS MAGNITUDE MANTISSA UNIT TWO_UNITS UNIT_BITS EXPONENT ODD SHARE FRACTION TWO_FRACTIONS ONE TWO"
    found = {"COLUMNS": COLUMNS} | {name: getattr(bm, name) for name in names.split()}
    for name in ("ATANH", "SINE"):
        found |= {f"{name}_{i}": value for i, value in enumerate(getattr(bm, name))}
    return found


def _same_bits(compiled: Kernels) -> bool:
    """Whether some thousand numbers are those of NumPy. A compiler may be wrong."""
    from fedcgd.noise.correlated import add_rounded
    from fedcgd.noise.stream import COLUMNS, TILE, add_tiles, key_words

    seed = [shake_256(b"numbers to compare %d" % i).digest(32) for i in range(3)]
    keys = np.stack([key_words(key) for key in seed])
    first, last = 2**32 // COLUMNS - 1, 2**32 // COLUMNS + 2
    start, size = first * TILE + 5, (last - first) * TILE - 9
    terms = list(zip(seed[:2], (-0.9, 1e6), strict=True))

    expected, found = np.zeros(size, np.int64), np.zeros(size, np.int64)
    add_rounded(expected, start, terms, seed[2], 1e-6)
    compiled.add_to_grid(found, start, keys[:2], np.array([-0.9, 1e6]), keys[2], 1e-6)
    wide, z = np.zeros(size + 9), np.empty(size, np.float32)
    add_tiles(seed[0], 1.0, first, last, wide)
    compiled.fill_normals(z, start, keys[0])
    return np.array_equal(found, expected) and z.tobytes() == wide[5:-4].astype(np.float32).tobytes()
