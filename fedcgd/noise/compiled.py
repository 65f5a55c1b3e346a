"""The loops of `box_muller` and `quantisation` as machine code, one pass instead of thirty: the same bits, if Numba is there.

Nothing here defines anything: each function repeats arithmetic that is written out with NumPy where it is called, in the same
order, every operation rounded by itself. LLVM may fuse a multiplication and an addition only where it is told that it may, and
it is not (`fastmath` is off).
"""

from collections.abc import Callable
from functools import cache
from hashlib import shake_256
from typing import Any, NamedTuple

import numpy as np

from fedcgd.noise import box_muller as bm


class Kernels(NamedTuple):
    """What is compiled. All release the interpreter's lock."""

    weighted: Callable[..., None]
    """(k, v, a, weight, first, total): total = weight·Z, or += if not `first`; Z of all 4·len(v) coordinates, total float64."""
    add_rounded: Callable[..., None]
    """(noise, words, width, total): total += round(noise) + round(width·words); int32 words, int64 total."""


@cache
def kernels() -> Kernels | None:
    """None without Numba, or where it does not work or gives other bits than NumPy."""
    try:
        import numba

        compiled = Kernels(*(numba.njit(nogil=True, cache=True)(work) for work in (_weighted, _add_rounded)))
        return compiled if _same_bits(compiled) else None
    except Exception:  # whatever a compiler can raise on a machine that it does not know
        return None


def _same_bits(compiled: Kernels) -> bool:
    """Whether a thousand numbers are those of NumPy. Numba's cache on disk, for one, does not see that a constant has changed."""
    columns = 256
    work = bm.Workspace(columns)
    work.keystream[: bm.BYTES * columns] = shake_256(b"numbers to compare").digest(bm.BYTES * columns)
    total, steps = np.empty(4 * columns), np.zeros(4 * columns, np.int64)
    k, v, a = work.words(columns)
    words = np.tile(a, 2)
    compiled.weighted(k, v, a, -0.9, True, total)
    compiled.weighted(k, v, a, 1.7, False, total)
    compiled.add_rounded(total, words, 1e-6, steps)
    radius, cosine, sine = work.polar(columns)
    z = np.multiply(radius, np.stack([cosine, sine]), dtype=np.float64).reshape(-1)
    expected = z * -0.9 + z * 1.7
    rounded = np.rint(expected).astype(np.int64) + np.rint(words * 1e-6).astype(np.int64)
    return total.tobytes() == expected.tobytes() and np.array_equal(steps, rounded)


_A0, _A1, _A2, _A3 = bm.ATANH
_S0, _S1, _S2, _S3 = bm.SINE
_MAGNITUDE, _MANTISSA, _UNIT_BITS, _COMPLEMENT = bm.MAGNITUDE, bm.MANTISSA, bm.UNIT_BITS, bm.COMPLEMENT
_ODD, _BLOCK = bm.ODD, 1024
_UNIT, _TWO_UNITS, _EXPONENT, _FRACTION = bm.UNIT, bm.TWO_UNITS, bm.EXPONENT, bm.FRACTION
_TWO_FRACTIONS, _ONE, _TWO = np.float32(2) * bm.FRACTION, np.float32(1), np.float32(2)


def _weighted(k: Any, v: Any, a: Any, weight: float, first: bool, total: Any) -> None:
    n = len(v)
    lengths = np.empty(_BLOCK, np.float32)
    for begin in range(
        0, n, _BLOCK
    ):  # in blocks that stay in the first cache, by short loops that become vector instructions
        size = min(_BLOCK, n - begin)
        k1, k2, shares = k[begin : begin + size], k[n + begin : n + begin + size], v[begin : begin + size]
        for c in range(size):
            product = np.float32(np.float32(k1[c]) * np.float32(k2[c])).view(np.int32) & _MAGNITUDE
            mantissa = np.int32((product & _MANTISSA) | _UNIT_BITS)
            e = np.float32(np.int32(product - mantissa)) * _EXPONENT
            g = mantissa.view(np.float32) - _UNIT
            s = g / (g + _TWO_UNITS)
            q = s * s
            lengths[c] = (e - (((_A3 * q + _A2) * q + _A1) * q + _A0) * s) * _TWO_FRACTIONS
        for half in range(2):
            at = half * n + begin
            angles, z, w = a[at : at + size], total[at : at + size], total[2 * n + at : 2 * n + at + size]
            flip = np.int32(half) * _COMPLEMENT
            for c in range(size):
                share = np.float32(np.int32(((shares[c] & _MAGNITUDE) | _ODD) ^ flip))
                r = np.sqrt(share * lengths[c])
                r = np.int32(np.float32(r).view(np.int32) ^ np.int32(angles[c] << 31)).view(np.float32)
                x = np.float32(angles[c]) * _FRACTION
                y = x * x
                sine = (((_S3 * y + _S2) * y + _S1) * y + _S0) * x
                square = _TWO - sine * sine
                sine = sine * np.sqrt(square)
                cosine = square - _ONE
                one, two = np.float64(r) * np.float64(cosine) * weight, np.float64(r) * np.float64(sine) * weight
                z[c] = one if first else z[c] + one
                w[c] = two if first else w[c] + two


def _add_rounded(noise: Any, words: Any, width: float, total: Any) -> None:
    for i in range(len(total)):
        total[i] += np.int64(np.rint(noise[i])) + np.int64(np.rint(width * np.float64(words[i])))
