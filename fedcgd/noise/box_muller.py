"""Uniform bits to Gaussian numbers, in single IEEE-754 operations only, so that every machine gets the same ones.

Box–Muller, four numbers at a time, from 224 bits: two signed 64-bit integers k₁, k₂ for the length, a 32-bit integer v
that splits it over two pairs, and a signed 32-bit integer a for the direction of each pair. With u = |k| / 2⁶³ on (0, 1],
V = ((v mod 2³¹) | 1) / 2³¹ on (0, 1), and φ = (π/2)·(a / 2³¹) on [−π/2, π/2),

    E = −ln(u₁·u₂),    r₁ = ±√(2EV),    r₂ = ±√(2E(1 − V)),
    (z₁, z₃) = r₁·(cos φ₁, sin φ₁),    (z₂, z₄) = r₂·(cos φ₂, sin φ₂),

each sign the lowest bit of its a. This is two Box–Muller pairs for one logarithm: −ln u₁ and −ln u₂ are exponential,
their sum and the share that the first has of it are independent, and the share is uniform; so E with a new uniform
share gives two independent exponentials again, EV and E(1 − V), which are half the squared radii. Both factors have 64
bits, so the tails are right to where they end: |z| up to 13.2.

Library functions for log, sin and cos differ in their last bit between processors and versions, and between the body
and the tail of a vector. Here each step is one correctly rounded addition, multiplication, division or square root on a
whole array, so that the result depends on neither. What the approximations behind them cost: 3e-7 of E (for E below 1,
3e-7 in itself) and 3e-8 rad of the direction.
"""

import math

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

BYTES = 28  # of keystream for four numbers
PLANES = ((0, 8), (8, 8), (16, 4), (20, 4), (24, 4))  # of k₁, k₂, v, a₁, a₂: where each starts, and its size
LARGEST = 18.8  # every |z| is below: k = 0 (probability 2⁻⁶²) can give 18.73, and all other bits at most 13.22

MAGNITUDE = np.int32(0x7FFFFFFF)
MANTISSA = np.int32(0x007FFFFF)
UNIT = np.float32(2.0**126)  # of |k₁·k₂|
TWO_UNITS = np.float32(2.0**127)
UNIT_BITS = np.int32((126 + 127) << 23)  # those of UNIT
EXPONENT = np.float32(-math.log(2) * 2.0**-23)
ODD = np.int32(1)
COMPLEMENT = np.int32(0x7FFFFFFE)
FRACTION = np.float32(2.0**-31)
_SIGN = np.uint32(31)
_ONE, _TWO = np.float32(1), np.float32(2)
# Minimax in s²: 2·atanh(s)/s for |s| ≤ 1/3 (relative error 1.8e-7), √2·sin(πx/4)/x for |x| ≤ 1 (relative error 2.6e-8).
ATANH = tuple(map(np.float32, (1.9999996423721313, 0.6667600274085999, 0.3958946168422699, 0.3422605097293854)))
SINE = tuple(map(np.float32, (1.1107207536697388, -0.11419128626585007, 0.003521393286064267, -5.084161603008397e-05)))


class Workspace:
    """Memory for 4·`columns` numbers, 44 bytes a column: their keystream, then over it the intermediate results."""

    def __init__(self, columns: int) -> None:
        raw = np.zeros(BYTES * columns + 16, np.uint8)  # a cipher wants room for one block more
        self._floats = np.zeros((2, 2 * columns), np.float32)
        self.keystream = raw.data
        self._raw = raw

    def words(self, columns: int) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
        """(k₁ k₂, v, a₁ a₂), each of all columns: views of the first 28·`columns` bytes of keystream."""
        n, raw = columns, self._raw
        return raw[: 16 * n].view("<i8"), raw[16 * n : 20 * n].view("<i4"), raw[20 * n : 28 * n].view("<i4")

    def polar(self, columns: int) -> tuple[Float32, Float32, Float32]:
        """(±radius, cosine, sine), each r₁ φ₁ of all columns and then r₂ φ₂, from the first 28·`columns` bytes of keystream.

        Views of this memory, which the next call overwrites, as this one overwrites the keystream.
        """
        n = columns
        k, v, a = self.words(n)
        radius, x = self._floats[0, : 2 * n], self._floats[1, : 2 * n]
        over_k = self._raw[: 16 * n].view(np.float32)
        np.copyto(x, k, casting="unsafe")  # the last use of k
        length = over_k[3 * n :]
        _log(x[:n], x[n:], over_k[:n], over_k[n : 2 * n], over_k[2 * n : 3 * n], length)

        share = over_k[:n]
        np.bitwise_and(v, MAGNITUDE, v)
        np.bitwise_or(v, ODD, v)
        np.multiply(length, _TWO * FRACTION, length)
        for half in (radius[:n], radius[n:]):
            np.copyto(share, v, casting="unsafe")
            np.multiply(share, length, half)
            np.bitwise_xor(v, COMPLEMENT, v)  # 2³¹ − v, odd too: no share is 0, and the small ones are as exact
        np.sqrt(radius, radius)

        np.copyto(x, a, casting="unsafe")
        np.multiply(x, FRACTION, x)
        signs, bits = a.view("<u4"), radius.view(np.uint32)
        np.left_shift(signs, _SIGN, signs)
        np.bitwise_xor(bits, signs, bits)
        cosine, sine = over_k[: 2 * n], over_k[2 * n :]
        _directions(x, cosine, sine)
        return radius, cosine, sine


def _log(a: Float32, b: Float32, p: Float32, g: Float32, e: Float32, out: Float32) -> None:
    """out = −ln(|a·b| / 2¹²⁶) ≥ 0 for whole numbers a, b up to 2⁶³; p, g and e are overwritten."""
    np.multiply(a, b, p)
    pi, gi = p.view(np.int32), g.view(np.int32)
    np.bitwise_and(pi, MAGNITUDE, pi)  # |a·b| = 2^e · m in units, 1 ≤ m < 2
    np.bitwise_and(pi, MANTISSA, gi)
    np.bitwise_or(gi, UNIT_BITS, gi)  # m
    np.subtract(pi, gi, pi)  # the mantissas cancel: 2²³ · e
    np.copyto(e, pi, casting="unsafe")
    np.multiply(e, EXPONENT, e)  # −e·ln 2
    np.subtract(g, UNIT, g)
    np.add(g, TWO_UNITS, p)
    np.divide(g, p, g)  # s = (m − 1)/(m + 1), and ln m = 2·atanh(s)
    np.multiply(g, g, p)
    _polynomial(ATANH, p, out)
    np.multiply(out, g, out)
    np.subtract(e, out, out)


def _directions(x: Float32, cosine: Float32, sine: Float32) -> None:
    """The cosine and sine of πx/2 for |x| ≤ 1; x is overwritten.

    With S = √2·sin(πx/4): cosine 1 − S², sine S·√(2 − S²), on the unit circle whatever the error of S.
    """
    np.multiply(x, x, cosine)
    _polynomial(SINE, cosine, sine)
    np.multiply(sine, x, sine)
    np.multiply(sine, sine, cosine)
    np.subtract(_TWO, cosine, cosine)
    np.sqrt(cosine, x)
    np.multiply(sine, x, sine)
    np.subtract(cosine, _ONE, cosine)


def _polynomial(coefficients: tuple[np.float32, ...], x: Float32, out: Float32) -> None:
    """out = Σ coefficients[i]·xⁱ by Horner's rule, one rounding at a time."""
    np.multiply(x, coefficients[-1], out)
    for c in coefficients[-2:0:-1]:
        np.add(out, c, out)
        np.multiply(out, x, out)
    np.add(out, coefficients[0], out)
