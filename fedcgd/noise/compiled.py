"""Whether noise can be made by machine code, and the same bits: `machine_code`, if Numba is there and works."""

from collections.abc import Callable
from functools import cache
from hashlib import shake_256
from typing import NamedTuple

import numpy as np

WORTHWHILE = 2**18  # numbers; below, NumPy makes them in a few milliseconds, and Numba takes a second to load


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
    """None without Numba, or where it does not work or gives other bits than NumPy."""
    try:
        from fedcgd.noise import machine_code

        compiled = Kernels(machine_code.add_to_grid, machine_code.fill_normals)
        return compiled if _same_bits(compiled) else None
    except Exception:  # whatever a compiler can raise on a machine that it does not know
        return None


def _same_bits(compiled: Kernels) -> bool:
    """Whether some thousand numbers are those of NumPy. Numba's cache on disk, for one, does not see that a constant changed."""
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
