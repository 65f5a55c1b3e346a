"""Uniform bits to Gaussian numbers, in single IEEE-754 operations only, so that every machine gets the same ones.

Box–Muller, six numbers at a time, from eight 32-bit words: k₁, k₂, k₃ for the length, v₁, v₂ that split it over three pairs,
and a₁, a₂, a₃ for the direction of each pair. As signed integers, with u = |k | 1| / 2³¹ on (0, 1], the shares
V₁ ≤ V₂ the sorted v / 2³¹ (31 bits of each), and φ = (π/2)·(a / 2³¹) on [−π/2, π/2),

    E = −ln(u₁·u₂·u₃),    r₁ = ±√(2E·V₁),    r₂ = ±√(2E·(V₂ − V₁)),    r₃ = ±√(2E·(1 − V₂)),
    (z₁, z₂) = r₁·(cos φ₁, sin φ₁), and so on,

each sign that of its k. This is three Box–Muller pairs for one logarithm: −ln u₁, −ln u₂, −ln u₃ are exponential, their sum
and the shares that they have of it are independent, and the shares are those into which two uniform numbers cut the unit
interval; so E with new shares of that kind gives three independent exponentials again, which are half the squared radii.

How far this is from the real-valued law: |z| ends at 11.36 (chance beyond: 7e-30). Each u stands for a cell of width 2⁻³⁰
around it, so that the law of E is a midpoint rule, 1e-10 from the true one in total variation. The lengths are rounded
at 4e-7 of E (for E below 1, 4e-7 in itself), the directions at 3e-8 rad.

Library functions for log, sin and cos differ in their last bit between processors and versions, and between the body
and the tail of a vector. Here each step is one correctly rounded addition, multiplication, division or square root, so that
the result depends on neither. This file says what the numbers are; `normals.c` and `gpu_code` repeat it, step by step.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

NUMBERS = 12  # from sixteen words: two groups of eight, k₁ k₂ k₃ v₁ v₂ a₁ a₂ a₃
LARGEST = 11.4  # every |z| is below


class Constants:
    """Of this definition, by the names that `normals.c` has for them; each float is one of float32."""

    MAGNITUDE = 0x7FFFFFFF
    MANTISSA = 0x007FFFFF
    UNIT = 2.0**93  # of |k₁·k₂·k₃|
    TWO_UNITS = 2.0**94
    UNIT_BITS = (93 + 127) << 23  # those of UNIT
    EXPONENT = float(np.float32(-math.log(2) * 2.0**-23))
    SHARE = 0x7FFFFFFC  # v₁ becomes 1 modulo 4 and v₂ becomes 2, so that no share is 0
    FRACTION = 2.0**-31
    TWO_FRACTIONS = 2.0**-30
    # Minimax in s²: 2·atanh(s)/s for |s| ≤ 1/3 (relative error 1.8e-7), √2·sin(πx/4)/x for |x| ≤ 1 (relative error 2.6e-8).
    ATANH = (1.9999996423721313, 0.6667600274085999, 0.3958946168422699, 0.3422605097293854)
    SINE = (1.1107207536697388, -0.11419128626585007, 0.003521393286064267, -5.084161603008397e-05)


def add_normals(words: NDArray[np.int32], weight: float, total: Float64) -> None:
    """total += (weight·r)·(cos φ or sin φ), in float64; `words` has shape (16, …), `total` (12, …).

    Radius and direction are float32: with a weight of 1 the products are exact. Row 6g + 2i + j of `total` belongs to group g,
    pair i, and to the cosine (j = 0) or the sine (j = 1).
    """
    groups = words.reshape(2, 8, *words.shape[1:])
    k, v, a = groups[:, :3], groups[:, 3:5], groups[:, 5:]
    radius = np.multiply(_radii(k, v), weight, dtype=np.float64)
    rows = total.reshape(2, 3, 2, *total.shape[1:])
    cosine, sine = _directions(np.multiply(a.astype(np.float32), Constants.FRACTION))
    rows[:, :, 0] += radius * cosine
    rows[:, :, 1] += radius * sine


def _radii(k: NDArray[np.int32], v: NDArray[np.int32]) -> Float32:
    """±√(2E·share), shape (2, 3, …), from k of that shape and v of shape (2, 2, …)."""
    factors = np.bitwise_or(k, 1).astype(np.float32)
    length = minus_log(factors[:, 0] * factors[:, 1] * factors[:, 2]) * Constants.TWO_FRACTIONS
    first, second = v[:, 0] & Constants.SHARE | 1, v[:, 1] & Constants.SHARE | 2
    low, high = np.minimum(first, second), np.maximum(first, second)
    shares = np.stack([low, high - low, Constants.MAGNITUDE - high + 1], axis=1)
    radius = np.sqrt(shares.astype(np.float32) * length[:, None])
    radius.view(np.int32)[...] ^= k & ~Constants.MAGNITUDE
    return radius


def minus_log(product: Float32) -> Float32:
    """−ln(|product| / 2⁹³) ≥ 0 for 1 ≤ |product| ≤ 2⁹³."""
    bits = product.view(np.int32) & Constants.MAGNITUDE  # |product| = 2^e · m in units, 1 ≤ m < 2
    m = bits & Constants.MANTISSA | Constants.UNIT_BITS
    exponent = (bits - m).astype(np.float32) * Constants.EXPONENT  # the mantissas cancel: 2²³ · e, times −ln 2
    above = m.view(np.float32) - Constants.UNIT
    s = above / (above + Constants.TWO_UNITS)  # (m − 1)/(m + 1), and ln m = 2·atanh(s)
    log: Float32 = _polynomial(Constants.ATANH, s * s) * s
    return exponent - log


def _directions(x: Float32) -> tuple[Float32, Float32]:
    """The cosine and sine of πx/2 for |x| ≤ 1.

    With S = √2·sin(πx/4): cosine 1 − S², sine S·√(2 − S²), on the unit circle whatever the error of S.
    """
    half = _polynomial(Constants.SINE, x * x) * x
    rest = 2 - half * half
    return rest - 1, half * np.sqrt(rest)


def _polynomial(coefficients: tuple[float, ...], x: Float32) -> Any:
    """Σ coefficients[i]·xⁱ by Horner's rule, one rounding at a time."""
    value: Any = np.float32(coefficients[-1])
    for c in coefficients[-2::-1]:
        value = value * x + c
    return value
