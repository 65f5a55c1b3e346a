"""`stream`, `box_muller` and the addition to the grid on a GPU (Triton): keystream and noise in registers alone, the same bits.

Nothing here defines anything: each function repeats arithmetic that is written out with NumPy elsewhere, in the same order,
every operation rounded by itself. So a multiplication and an addition must never be fused (`enable_fp_fusion`), and division and
square root are the correctly rounded ones. A program makes one tile, each of its threads the twelve numbers of one block, and
reads and writes the sum once. Importing this file needs Triton; `compiled` says whether it can be used.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fedcgd.noise.box_muller import Constants
from fedcgd.noise.stream import COLUMNS, CONSTANTS, TILE

_C0, _C1, _C2, _C3 = (tl.constexpr(c) for c in CONSTANTS)
_A0, _A1, _A2, _A3 = (tl.constexpr(float(a)) for a in Constants.ATANH)
_S0, _S1, _S2, _S3 = (tl.constexpr(float(s)) for s in Constants.SINE)
_MAGNITUDE, _MANTISSA, _SHARE = (
    tl.constexpr(int(m)) for m in (Constants.MAGNITUDE, Constants.MANTISSA, Constants.SHARE)
)
_SIGN, _UNIT_BITS = tl.constexpr(int(~Constants.MAGNITUDE)), tl.constexpr(int(Constants.UNIT_BITS))
_UNIT, _TWO_UNITS, _EXPONENT = (
    tl.constexpr(float(x)) for x in (Constants.UNIT, Constants.TWO_UNITS, Constants.EXPONENT)
)
_FRACTION, _TWO_FRACTIONS = tl.constexpr(float(Constants.FRACTION)), tl.constexpr(float(Constants.TWO_FRACTIONS))
_COLUMNS, _TILE = tl.constexpr(COLUMNS), tl.constexpr(TILE)

_ANY = ["terms", "start", "stop"]  # else a run compiles the kernel again, for one term and for 16
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _key_word(keys, i: tl.constexpr):
    return tl.zeros([_COLUMNS], tl.uint32) + tl.load(keys + i).to(tl.uint32, bitcast=True)


@triton.jit
def _blocks(keys, tile):
    """The sixteen words of the blocks of a tile, as signed integers."""
    first = tile * _COLUMNS  # int64; no carry within a tile
    x0, x1 = tl.full([_COLUMNS], _C0, tl.uint32), tl.full([_COLUMNS], _C1, tl.uint32)
    x2, x3 = tl.full([_COLUMNS], _C2, tl.uint32), tl.full([_COLUMNS], _C3, tl.uint32)
    x4, x5, x6, x7 = _key_word(keys, 0), _key_word(keys, 1), _key_word(keys, 2), _key_word(keys, 3)
    x8, x9, x10, x11 = _key_word(keys, 4), _key_word(keys, 5), _key_word(keys, 6), _key_word(keys, 7)
    x12 = (first + tl.arange(0, _COLUMNS)).to(tl.uint32)
    x13 = tl.zeros([_COLUMNS], tl.uint32) + (first >> 32).to(tl.uint32)
    x14, x15 = tl.zeros([_COLUMNS], tl.uint32), tl.zeros([_COLUMNS], tl.uint32)
    low, high = x12, x13
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    x0, x1, x2, x3 = x0 + _C0, x1 + _C1, x2 + _C2, x3 + _C3
    x4, x5 = x4 + _key_word(keys, 0), x5 + _key_word(keys, 1)
    x6, x7 = x6 + _key_word(keys, 2), x7 + _key_word(keys, 3)
    x8, x9 = x8 + _key_word(keys, 4), x9 + _key_word(keys, 5)
    x10, x11 = x10 + _key_word(keys, 6), x11 + _key_word(keys, 7)
    x12, x13 = x12 + low, x13 + high
    return (
        _signed(x0), _signed(x1), _signed(x2), _signed(x3), _signed(x4), _signed(x5), _signed(x6), _signed(x7),
        _signed(x8), _signed(x9), _signed(x10), _signed(x11), _signed(x12), _signed(x13), _signed(x14), _signed(x15),
    )  # fmt: skip


@triton.jit
def _signed(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _length(k1, k2, k3):
    product = (k1 | 1).to(tl.float32) * (k2 | 1).to(tl.float32) * (k3 | 1).to(tl.float32)
    bits = product.to(tl.int32, bitcast=True) & _MAGNITUDE
    m = (bits & _MANTISSA) | _UNIT_BITS
    exponent = (bits - m).to(tl.float32) * _EXPONENT
    above = m.to(tl.float32, bitcast=True) - _UNIT
    s = tl.math.div_rn(above, above + _TWO_UNITS)
    q = s * s
    return (exponent - (((q * _A3 + _A2) * q + _A1) * q + _A0) * s) * _TWO_FRACTIONS


@triton.jit
def _pair(share, length, k, a, weight):
    r = tl.math.sqrt_rn(share.to(tl.float32) * length).to(tl.int32, bitcast=True) ^ (k & _SIGN)
    radius = r.to(tl.float32, bitcast=True).to(tl.float64) * weight
    x = a.to(tl.float32) * _FRACTION
    q = x * x
    half = (((q * _S3 + _S2) * q + _S1) * q + _S0) * x
    rest = 2.0 - half * half
    return radius * (rest - 1.0).to(tl.float64), radius * (half * tl.math.sqrt_rn(rest)).to(tl.float64)


@triton.jit
def _group(words, at: tl.constexpr, weight):
    """Of the eight words from `at` on: k₁ k₂ k₃ v₁ v₂ a₁ a₂ a₃."""
    length = _length(words[at], words[at + 1], words[at + 2])
    first, second = (words[at + 3] & _SHARE) | 1, (words[at + 4] & _SHARE) | 2
    low, high = tl.minimum(first, second), tl.maximum(first, second)
    z0, z1 = _pair(low, length, words[at], words[at + 5], weight)
    z2, z3 = _pair(high - low, length, words[at + 1], words[at + 6], weight)
    z4, z5 = _pair((high ^ _MAGNITUDE) + 1, length, words[at + 2], words[at + 7], weight)  # 2³¹ − high
    return z0, z1, z2, z3, z4, z5


@triton.jit
def _at(tile, start, stop, i: tl.constexpr):
    """Where the i-th numbers of a tile's blocks are in the sum, and which of them are."""
    coordinate = tile * _TILE + i * _COLUMNS + tl.arange(0, _COLUMNS)
    return coordinate - start, (coordinate >= start) & (coordinate < stop)


@triton.jit
def _made_elsewhere(values, scale, tile, start, stop, i: tl.constexpr):
    noise = tl.zeros([_COLUMNS], tl.float64)
    if values is not None:
        at, there = _at(tile, start, stop, i)
        noise = tl.load(values + at, mask=there, other=0.0).to(tl.float64) * scale
    return noise


@triton.jit
def _add(total, noise, word, width, tile, start, stop, i: tl.constexpr):
    at, there = _at(tile, start, stop, i)
    steps = noise + word.to(tl.float64) * width
    half = tl.full([_COLUMNS], 1.5 * 2.0**52, tl.float64)
    steps = (steps + half) - half  # for |x| < 2⁵¹ this is x rounded as by rint
    tl.store(total + at, tl.load(total + at, mask=there, other=0) + steps.to(tl.int64), mask=there)


@triton.jit
def _set(out, noise, tile, start, stop, i: tl.constexpr):
    at, there = _at(tile, start, stop, i)
    tl.store(out + at, noise.to(tl.float32), mask=there)


@triton.jit(do_not_specialize=_ANY)
def _noise(total, values, keys, numbers, terms, start, stop, ROUND: tl.constexpr):
    """`keys` are those of the terms and then that of the dither; `numbers` the weights, the width, the scale of `values`."""
    tile = tl.program_id(0).to(tl.int64) + start // _TILE
    scale = tl.load(numbers + terms + 1)
    n0 = _made_elsewhere(values, scale, tile, start, stop, 0)
    n1 = _made_elsewhere(values, scale, tile, start, stop, 1)
    n2 = _made_elsewhere(values, scale, tile, start, stop, 2)
    n3 = _made_elsewhere(values, scale, tile, start, stop, 3)
    n4 = _made_elsewhere(values, scale, tile, start, stop, 4)
    n5 = _made_elsewhere(values, scale, tile, start, stop, 5)
    n6 = _made_elsewhere(values, scale, tile, start, stop, 6)
    n7 = _made_elsewhere(values, scale, tile, start, stop, 7)
    n8 = _made_elsewhere(values, scale, tile, start, stop, 8)
    n9 = _made_elsewhere(values, scale, tile, start, stop, 9)
    n10 = _made_elsewhere(values, scale, tile, start, stop, 10)
    n11 = _made_elsewhere(values, scale, tile, start, stop, 11)
    for j in range(terms):
        weight = tl.load(numbers + j)
        words = _blocks(keys + 8 * j, tile)
        z0, z1, z2, z3, z4, z5 = _group(words, 0, weight)
        n0, n1, n2, n3, n4, n5 = n0 + z0, n1 + z1, n2 + z2, n3 + z3, n4 + z4, n5 + z5
        z0, z1, z2, z3, z4, z5 = _group(words, 8, weight)
        n6, n7, n8, n9, n10, n11 = n6 + z0, n7 + z1, n8 + z2, n9 + z3, n10 + z4, n11 + z5
    if ROUND:
        width = tl.load(numbers + terms)
        words = _blocks(keys + 8 * terms, tile)
        _add(total, n0, words[0], width, tile, start, stop, 0)
        _add(total, n1, words[1], width, tile, start, stop, 1)
        _add(total, n2, words[2], width, tile, start, stop, 2)
        _add(total, n3, words[3], width, tile, start, stop, 3)
        _add(total, n4, words[4], width, tile, start, stop, 4)
        _add(total, n5, words[5], width, tile, start, stop, 5)
        _add(total, n6, words[6], width, tile, start, stop, 6)
        _add(total, n7, words[7], width, tile, start, stop, 7)
        _add(total, n8, words[8], width, tile, start, stop, 8)
        _add(total, n9, words[9], width, tile, start, stop, 9)
        _add(total, n10, words[10], width, tile, start, stop, 10)
        _add(total, n11, words[11], width, tile, start, stop, 11)
    else:
        _set(total, n0, tile, start, stop, 0)
        _set(total, n1, tile, start, stop, 1)
        _set(total, n2, tile, start, stop, 2)
        _set(total, n3, tile, start, stop, 3)
        _set(total, n4, tile, start, stop, 4)
        _set(total, n5, tile, start, stop, 5)
        _set(total, n6, tile, start, stop, 6)
        _set(total, n7, tile, start, stop, 7)
        _set(total, n8, tile, start, stop, 8)
        _set(total, n9, tile, start, stop, 9)
        _set(total, n10, tile, start, stop, 10)
        _set(total, n11, tile, start, stop, 11)


@triton.jit(do_not_specialize=["size"])
def _tile_hashes(out, numbers, coefficients, size, HASHES: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK)
    at = tile * BLOCK + within
    x = tl.load(numbers + at, mask=at < size, other=0).to(tl.int64)
    for i in tl.static_range(HASHES):
        tl.store(out + tile * HASHES + i, tl.sum(x * tl.load(coefficients + i * BLOCK + within)))


def add_to_grid(total: Tensor, start: int, keys: Any, weights: Any, dither: Any, width: float) -> None:
    """total += round(Σ weights[j]·Z_j + width·words), int64; arguments as in `stream.Kernels`."""
    _launch(total, None, start, [*keys, dither], [*weights, width, 0.0])


def add_values_to_grid(total: Tensor, start: int, values: Tensor, scale: float, dither: Any, width: float) -> None:
    """total += round(scale·values + width·words), int64."""
    _launch(total, values, start, [dither], [width, scale])


def fill_normals(out: Tensor, start: int, key: Any) -> None:
    """out = Z, float32."""
    _launch(out, None, start, [key, key], [1.0, 0.0, 0.0], rounded=False)  # the second is not used


def tile_hashes(numbers: Tensor, coefficients: Tensor) -> Tensor:
    """[Σ_j coefficients[i, j]·tile[j] mod 2⁶⁴ for each i] of each tile of `numbers`, one after the other, int64.

    `numbers` are whole, float64 or int64, and a tile is as many of them as a row of `coefficients`, int64, has: a power of two.
    """
    hashes, block = coefficients.shape
    tiles = -(-numbers.numel() // block)
    out = torch.empty(tiles * hashes, dtype=torch.int64, device=numbers.device)
    with torch.cuda.device_of(numbers):
        _tile_hashes[(tiles,)](out, _contiguous(numbers), coefficients, numbers.numel(), hashes, block, **OPTIONS)
    return out


def _launch(
    out: Tensor, values: Tensor | None, start: int, keys: list[Any], numbers: list[float], *, rounded: bool = True
) -> None:
    if not out.numel():
        return
    stop = start + out.numel()
    programs = -(-stop // TILE) - start // TILE
    words = torch.from_numpy(np.stack(keys).astype(np.uint32).view(np.int32)).to(out.device)
    scales = torch.tensor(numbers, dtype=torch.float64, device=out.device)
    values = None if values is None else _contiguous(values)
    with torch.cuda.device_of(out):  # Triton launches on the current device, wherever the tensors are
        _noise[(programs,)](_contiguous(out), values, words, scales, len(keys) - 1, start, stop, rounded, **OPTIONS)
    words.zero_()  # after the kernel: else the keys would stay in memory that the allocator keeps


def _contiguous(numbers: Tensor) -> Tensor:
    """`numbers`. Raises ValueError if they are apart in memory, where a kernel would not find them."""
    if not numbers.is_contiguous():
        raise ValueError(f"the numbers must be contiguous, got strides {numbers.stride()}")
    return numbers
