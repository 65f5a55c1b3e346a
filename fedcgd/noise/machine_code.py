"""`stream`, `box_muller` and the addition to the grid as machine code (Numba): one pass over the sum, the same bits.

Nothing here defines anything: each function repeats arithmetic that is written out with NumPy elsewhere, in the same order,
every operation rounded by itself. LLVM may fuse a multiplication and an addition only where it is told that it may, and it is
not (`fastmath` is off). Short loops over the columns of a tile become vector instructions, and what they share stays in the
first cache. Importing this file needs Numba, `compiled` says whether it can be used.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from fedcgd.noise import box_muller as bm
from fedcgd.noise.chacha20 import CONSTANTS, DIAGONALS, QUARTERS
from fedcgd.noise.stream import COLUMNS, TILE

_A0, _A1, _A2, _A3 = bm.ATANH
_S0, _S1, _S2, _S3 = bm.SINE
_MAGNITUDE, _MANTISSA, _SHARE, _ODD, _SIGN = bm.MAGNITUDE, bm.MANTISSA, bm.SHARE, bm.ODD, ~bm.MAGNITUDE
_UNIT, _TWO_UNITS, _UNIT_BITS, _EXPONENT = bm.UNIT, bm.TWO_UNITS, bm.UNIT_BITS, bm.EXPONENT
_FRACTION, _TWO_FRACTIONS, _ONE, _TWO = bm.FRACTION, bm.TWO_FRACTIONS, bm.ONE, bm.TWO
_COLUMNS, _TILE, _NUMBERS = COLUMNS, TILE, bm.NUMBERS
# x + this, for |x| < 2⁵¹, is rounded as by rint, and holds the whole number in its lowest bits.
_ROUNDING = np.float64(1.5 * 2.0**52)
_ROUNDING_BITS = _ROUNDING.view(np.int64)


def _generated(typing: Any, k0, k1, k2, k3, k4, k5, k6, k7, low, high):
    """The sixteen words of a ChaCha20 block: unrolled, without Numba's own analysis of a thousand operations."""
    words = types.UniTuple(types.int32, 16)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        start = [*(word(c) for c in CONSTANTS), *arguments, word(0), word(0)]
        x = list(start)
        for _ in range(10):
            for four in (QUARTERS, DIAGONALS):  # in turns, as they do not depend on each other
                for step, bits in enumerate((16, 12, 8, 7)):
                    for a, b, c, d in four:
                        to, by, mixed = (c, d, b) if step % 2 else (a, b, d)
                        x[to] = builder.add(x[to], x[by])
                        turned = builder.xor(x[mixed], x[to])
                        x[mixed] = builder.or_(builder.shl(turned, word(bits)), builder.lshr(turned, word(32 - bits)))
        return context.make_tuple(builder, words, [builder.add(*pair) for pair in zip(x, start, strict=True)])

    return words(*[types.uint32] * 10), generate


_block: Any = intrinsic(_generated)


@njit(nogil=True, cache=True, error_model="numpy")
def _fill(key: Any, tile: int, w: Any) -> None:
    """w[i, c] = word i of block tile·128 + c."""
    k0, k1, k2, k3, k4, k5, k6, k7 = key[0], key[1], key[2], key[3], key[4], key[5], key[6], key[7]
    first = np.uint64(tile) * np.uint64(_COLUMNS)  # no carry within a tile: 128 divides 2³²
    low, high = np.uint32(first), np.uint32(first >> np.uint64(32))
    for c in range(_COLUMNS):
        x = _block(k0, k1, k2, k3, k4, k5, k6, k7, np.uint32(low + c), high)
        w[0, c], w[1, c], w[2, c], w[3, c], w[4, c], w[5, c], w[6, c], w[7, c] = x[:8]
        w[8, c], w[9, c], w[10, c], w[11, c], w[12, c], w[13, c], w[14, c], w[15, c] = x[8:]


@njit(nogil=True, cache=True, error_model="numpy")
def _lengths(k1: Any, k2: Any, k3: Any, lengths: Any) -> None:
    for c in range(_COLUMNS):
        factors = np.float32(np.int32(k1[c] | _ODD)) * np.float32(np.int32(k2[c] | _ODD))
        product = np.float32(factors * np.float32(np.int32(k3[c] | _ODD))).view(np.int32) & _MAGNITUDE
        mantissa = np.int32((product & _MANTISSA) | _UNIT_BITS)
        exponent = np.float32(np.int32(product - mantissa)) * _EXPONENT
        above = mantissa.view(np.float32) - _UNIT
        s = above / (above + _TWO_UNITS)
        q = s * s
        lengths[c] = (exponent - (((_A3 * q + _A2) * q + _A1) * q + _A0) * s) * _TWO_FRACTIONS


@njit(nogil=True, cache=True, error_model="numpy")
def _pair(which: int, lengths: Any, v1: Any, v2: Any, k: Any, a: Any, weight: float, cosines: Any, sines: Any) -> None:
    for c in range(_COLUMNS):
        first, second = np.int32((v1[c] & _SHARE) | np.int32(1)), np.int32((v2[c] & _SHARE) | np.int32(2))
        low, high = min(first, second), max(first, second)
        if which == 0:
            share = low
        elif which == 1:
            share = np.int32(high - low)
        else:
            share = np.int32(np.int32(_MAGNITUDE - high) + _ODD)
        r = np.float32(np.sqrt(np.float32(share) * lengths[c])).view(np.int32)
        radius = np.float64(np.int32(r ^ np.int32(k[c] & _SIGN)).view(np.float32)) * weight
        x = np.float32(a[c]) * _FRACTION
        q = x * x
        half = (((_S3 * q + _S2) * q + _S1) * q + _S0) * x
        rest = _TWO - half * half
        cosines[c] += radius * np.float64(rest - _ONE)
        sines[c] += radius * np.float64(half * np.sqrt(rest))


@njit(nogil=True, cache=True, error_model="numpy")
def _add_normals(w: Any, weight: float, lengths: Any, noise: Any) -> None:
    for g in range(2):
        group, rows = w[8 * g : 8 * g + 8], noise[6 * g : 6 * g + 6]
        _lengths(group[0], group[1], group[2], lengths)
        _pair(0, lengths, group[3], group[4], group[0], group[5], weight, rows[0], rows[1])
        _pair(1, lengths, group[3], group[4], group[1], group[6], weight, rows[2], rows[3])
        _pair(2, lengths, group[3], group[4], group[2], group[7], weight, rows[4], rows[5])


@njit(nogil=True, cache=True, error_model="numpy")
def add_to_grid(total: Any, start: int, keys: Any, weights: Any, smoothing: Any, width: float) -> None:
    """total += round(Σ weights[j]·Z_j + width·words), int64; `keys` are those of the Z_j, `smoothing` that of the words."""
    stop = start + len(total)
    w, lengths = np.empty((16, _COLUMNS), np.int32), np.empty(_COLUMNS, np.float32)
    noise = np.empty((_NUMBERS, _COLUMNS), np.float64)
    flat, flat_words = noise.reshape(-1), w.reshape(-1)
    for tile in range(start // _TILE, (stop + _TILE - 1) // _TILE):
        flat[:] = 0.0
        for j in range(len(weights)):
            _fill(keys[j], tile, w)
            _add_normals(w, weights[j], lengths, noise)
        _fill(smoothing, tile, w)
        begin = tile * _TILE
        low, high = max(start, begin), min(stop, begin + _TILE)
        part, values, words = total[low - start : high - start], flat[low - begin :], flat_words[low - begin :]
        for i in range(len(part)):
            rounded = np.float64(values[i] + width * np.float64(words[i]) + _ROUNDING)
            part[i] += rounded.view(np.int64) - _ROUNDING_BITS


@njit(nogil=True, cache=True, error_model="numpy")
def fill_normals(out: Any, start: int, key: Any) -> None:
    """out = Z, float32."""
    stop = start + len(out)
    w, lengths = np.empty((16, _COLUMNS), np.int32), np.empty(_COLUMNS, np.float32)
    noise = np.empty((_NUMBERS, _COLUMNS), np.float64)
    flat = noise.reshape(-1)
    for tile in range(start // _TILE, (stop + _TILE - 1) // _TILE):
        flat[:] = 0.0
        _fill(key, tile, w)
        _add_normals(w, 1.0, lengths, noise)
        begin = tile * _TILE
        low, high = max(start, begin), min(stop, begin + _TILE)
        part, values = out[low - start : high - start], flat[low - begin :]
        for i in range(len(part)):
            part[i] = values[i]
