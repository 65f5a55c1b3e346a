"""Uniform bits to Gaussian pairs, in single IEEE-754 operations only, so that every machine gets the same numbers.

A pair takes 96 bits: a signed 64-bit integer k for the radius and a signed 32-bit integer a for the direction. With
u = k / 2⁶⁴ mod 1, uniform on (0, 1), and φ = (π/2)·(a / 2³¹), uniform on [−π/2, π/2),

    z₁ = ±√(−2 ln u)·cos φ,      z₂ = ±√(−2 ln u)·sin φ,      one random sign (the lowest bit of a) for both.

Library functions for log, sin and cos differ in their last bit between processors and versions, and between the body
and the tail of a vector. Here each step is one correctly rounded addition, multiplication, division or square root on a
whole array, so that the result depends on neither. What the approximations behind them cost: 1.2e-7 of the radius, at
both ends of u (k counts from 0 upwards for small u, and downwards for u just below 1), and 3e-8 rad of the direction.
"""

import math

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

BYTES_PER_PAIR = 12
LARGEST = 16.3  # every |z| is below: k = 0 (probability 2⁻⁶⁴) gives 16.28, and all other k at most 9.42

_MANTISSA = np.int32(0x007FFFFF)
_UNIT = 2.0**64  # f = float(k) is in units of 2⁻⁶⁴
_UNIT_BITS = np.int32((64 + 127) << 23)  # the bits of float32(2⁶⁴) that _UNIT also is, as an integer
_ROW = 4096  # _UNIT_ROW and _ZERO_ROW are broadcast over rows: NumPy's minimum is slow against a scalar
_UNIT_ROW = np.full(_ROW, _UNIT_BITS, np.uint32)
_ZERO_ROW = np.zeros(_ROW, np.float32)

_LOG2 = np.float32(-2 * math.log(2) * 2.0**-23)
# Minimax in s²: 4·atanh(s)/s for |s| ≤ 1/3 (relative error 1.8e-7), √2·sin(πx/4)/x for |x| ≤ 1 (relative error 2.6e-8).
_ATANH = tuple(map(np.float32, (3.9999992847442627, 1.3335200548171997, 0.7917892336845398, 0.6845210194587708)))
_SINE = tuple(map(np.float32, (1.1107207536697388, -0.11419128626585007, 0.003521393286064267, -5.084161603008397e-05)))
_TWO_UNITS = np.float32(2 * _UNIT)
_ONE, _TWO = np.float32(1), np.float32(2)
_ANGLE = np.float32(2.0**-31)
_SIGN_SHIFT = np.uint32(31)


class Workspace:
    """Memory for `pairs` pairs, 20 bytes each: their keystream, then over it the intermediate results."""

    def __init__(self, pairs: int) -> None:
        pairs = -(-pairs // _ROW) * _ROW
        raw = np.zeros(BYTES_PER_PAIR * pairs + 16, np.uint8)  # a cipher wants room for one block more
        self.radius_bytes, self.angle_bytes = raw.data, raw.data[8 * pairs :]
        self.radius_bits = raw[: 8 * pairs].view("<i8")
        self.angle_bits = raw[8 * pairs : 12 * pairs].view("<i4")
        floats = raw[: 8 * pairs].view(np.float32)
        self.floats = (floats[:pairs], floats[pairs:], np.zeros(pairs, np.float32), np.zeros(pairs, np.float32))


def polar(work: Workspace, pairs: int) -> tuple[Float32, Float32, Float32]:
    """(±radius, cos φ, sin φ) of the first `pairs` pairs of `work`; views of `work` that the next call overwrites."""
    size = -(-pairs // _ROW) * _ROW
    p, g, f, r = (a[:size] for a in work.floats)
    pi, gi = p.view(np.int32), g.view(np.int32)

    # ±k to the two ends of (0, 1): k > 0 is u = k/2⁶⁴ = 2^e·m, k < 0 is u = 1 + k/2⁶⁴ with e = 0 and m = 1 + k/2⁶⁴.
    np.copyto(f, work.radius_bits[:size], casting="unsafe")  # frees the memory that p and g are
    rows = (-1, _ROW)
    # Negative floats are the largest unsigned integers, so this replaces them by 1.
    np.minimum(f.view(np.uint32).reshape(rows), _UNIT_ROW, out=p.view(np.uint32).reshape(rows))
    np.minimum(f.reshape(rows), _ZERO_ROW, out=f.reshape(rows))
    np.bitwise_and(pi, _MANTISSA, gi)
    np.bitwise_or(gi, _UNIT_BITS, gi)
    np.subtract(pi, gi, pi)  # the mantissas cancel: e·2²³
    np.subtract(g, np.float32(_UNIT), g)
    np.add(g, f, g)  # m − 1
    np.copyto(f, pi, casting="unsafe")
    np.multiply(f, _LOG2, f)  # −2·e·ln 2

    # −2·ln m = −4·atanh(s), s = (m − 1)/(m + 1), |s| ≤ 1/3
    np.add(g, _TWO_UNITS, p)
    np.divide(g, p, g)
    np.multiply(g, g, p)
    _polynomial(_ATANH, p, r)
    np.multiply(r, g, r)
    np.subtract(f, r, r)
    np.sqrt(r, r)

    a = work.angle_bits[:size]
    np.copyto(p, a, casting="unsafe")
    np.multiply(p, _ANGLE, p)
    signs = a.view("<u4")
    np.left_shift(signs, _SIGN_SHIFT, signs)
    ri = r.view(np.uint32)
    np.bitwise_xor(ri, signs, ri)

    # With S = √2·sin(φ/2): cos φ = 1 − S² and sin φ = S·√(2 − S²), on the unit circle whatever the error of S.
    np.multiply(p, p, f)
    _polynomial(_SINE, f, g)
    np.multiply(g, p, g)
    np.multiply(g, g, f)
    np.subtract(_TWO, f, f)
    np.sqrt(f, p)
    np.subtract(f, _ONE, f)
    np.multiply(g, p, g)
    return r[:pairs], f[:pairs], g[:pairs]


def _polynomial(coefficients: tuple[np.float32, ...], x: Float32, out: Float32) -> None:
    """out = Σ coefficients[i]·xⁱ by Horner's rule, one rounding at a time."""
    np.multiply(x, coefficients[-1], out)
    for c in coefficients[-2:0:-1]:
        np.add(out, c, out)
        np.multiply(out, x, out)
    np.add(out, coefficients[0], out)
