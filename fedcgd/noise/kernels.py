"""Noise for arrays, added to sums on the lattice or as it is: by machine code (`normals.c`), or with NumPy and the same bits."""

from collections.abc import Callable
from ctypes import c_double, c_int64
from functools import cache
from hashlib import shake_256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcgd.native.library import array, checked, function, library
from fedcgd.noise.box_muller import Float32
from fedcgd.noise.stream import TILE, NoiseStream, add_tiles, key_words, tiles, words_of


class Kernels(NamedTuple):
    """One form of each. They work on the coordinates from `start` on; machine code releases the interpreter's lock."""

    add_to_grid: Callable[..., None]
    """(total, start, keys, weights, dither, width): total += round(Σ weights[j]·Z_j + width·words).

    int64 total; `keys` (terms, 8) and `dither` (8,) are ChaCha20 keys as uint32, of the Z and of the words."""
    fill_normals: Callable[..., None]
    """(out, start, key): out = Z, float32."""


def normals(stream: NoiseStream, round: int, nonce: int, size: int, start: int = 0) -> Float32:
    """Z_(round, nonce)[start : start + size] of `stream`, shape (size,). Raises ValueError for an index out of range."""
    out = np.empty(size, np.float32)
    kernels().fill_normals(out, start, key_words(stream.key_of(round, nonce)))
    return out


def _add_to_grid(total: Any, start: int, keys: Any, weights: Any, dither: Any, width: float) -> None:
    for first, last, low, high in tiles(start, start + len(total)):
        noise = np.zeros((last - first) * TILE)
        for key, weight in zip(keys, weights, strict=True):
            add_tiles(key.astype("<u4").tobytes(), weight, first, last, noise)
        noise += np.multiply(words_of(dither.astype("<u4").tobytes(), first, last), width, dtype=np.float64)
        total[low - start : high - start] += np.rint(noise[low - first * TILE : high - first * TILE]).astype(np.int64)


def _fill_normals(out: Any, start: int, key: Any) -> None:
    for first, last, low, high in tiles(start, start + len(out)):
        noise = np.zeros((last - first) * TILE)
        add_tiles(key.astype("<u4").tobytes(), 1.0, first, last, noise)
        out[low - start : high - start] = noise[low - first * TILE : high - first * TILE]


NUMPY = Kernels(_add_to_grid, _fill_normals)


@cache
def kernels() -> Kernels:
    """Machine code; NumPy where it was not built, or does not work or gives other bits."""
    return checked(_load, _answer, _ANSWER) or NUMPY


def _load() -> Kernels:
    code = library(Path(__file__).with_name("normals.c"))
    integers, floats, key = array(np.int64), array(np.float32), array(np.uint32, 8)
    add = function(
        code, "add_to_grid", [integers, c_int64, c_int64, array(np.uint32), array(np.float64), c_int64, key, c_double]
    )
    fill = function(code, "fill_normals", [floats, c_int64, c_int64, key])

    def add_to_grid(total: Any, start: int, keys: Any, weights: Any, dither: Any, width: float) -> None:
        if keys.shape != (len(weights), 8):  # what is behind the array would be read
            raise ValueError(f"keys must have shape ({len(weights)}, 8), got {keys.shape}")
        add(total, len(total), start, keys, weights, len(weights), dither, width)

    return Kernels(add_to_grid, lambda out, start, key: fill(out, len(out), start, key))


_ANSWER = "96276df109af2e2dc41f0a3539048ba9ae7f268d98ab18a4d79025703d2f4d5f"


def _answer(made: Kernels) -> bytes:
    """Sums and normals across the number 2³² of a block, of three keys."""
    keys = np.stack([np.frombuffer(shake_256(b"key %d" % i).digest(32), "<u4").astype(np.uint32) for i in range(3)])
    start, size = 2**32 * 12 - 1001, 2003
    total, z = np.arange(size), np.empty(size, np.float32)
    made.add_to_grid(total, start, keys[:2], np.array([-0.9, 1e6]), keys[2], 1e-6)
    made.fill_normals(z, start, keys[0])
    return total.tobytes() + z.tobytes()
