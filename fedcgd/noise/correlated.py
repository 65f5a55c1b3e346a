"""stddev·Σ_j w_j·Z_j: the rows of C⁻¹Z, as floating-point numbers or rounded, by NumPy."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedcgd.noise.box_muller import LARGEST, Float64
from fedcgd.noise.stream import TILE, NoiseStream, add_tiles, check_coordinates, tiles, words_of

Term = tuple[int, int, float]
"""(round, nonce, weight): which noise, and how much of it."""

Keyed = tuple[bytes, float]
"""(ChaCha20 key, weight): the same, ready to be made."""


def keyed(stream: NoiseStream, terms: Sequence[Term], stddev: float) -> list[Keyed]:
    """The terms of stddev·Σ_j w_j·Z_j. Raises ValueError for indices out of range, and if the noise is too large for float32."""
    found = []
    for round, nonce, weight in terms:
        key = stream.key_of(round, nonce)
        if not LARGEST * len(terms) * abs(stddev * weight) < 1e38:
            raise ValueError(f"stddev · weight must be finite and below 1e36 / terms, got {stddev} · {weight}")
        found.append((key, stddev * weight))
    return found


def correlated_noise(stream: NoiseStream, terms: Sequence[Term], stddev: float, start: int, stop: int) -> Float64:
    """stddev·Σ_j w_j·Z_(round_j, nonce_j)[start:stop]; by NumPy.

    Z is the exact product of the radius and the sine or cosine (float32 each), and `NoiseStream.normal` gives it rounded to
    float32. The numbers do not depend on the split into calls.

    Args:
        stream: where Z comes from.
        terms: (round, nonce, w) of each Z.
        stddev: ζσ, in units of the update.
        start: the first coordinate.
        stop: the one after the last.

    Returns:
        Shape (stop − start,), float64.

    Raises:
        ValueError: for bad indices, stddev or weights.
    """
    check_coordinates(start, stop)
    check_stddev(stddev)
    made = keyed(stream, terms, stddev)
    out = np.empty(stop - start)
    for first, last, low, high in tiles(start, stop):
        total = np.zeros((last - first) * TILE)
        for key, weight in made:
            add_tiles(key, weight, first, last, total)
        out[low - start : high - start] = total[low - first * TILE : high - first * TILE]
    return out


def add_rounded(total: NDArray[np.int64], start: int, terms: Sequence[Keyed], dither: bytes, width: float) -> None:
    """total += round(Σ weight·Z + width·word), for the coordinates from `start` on: by NumPy. See `fedcgd.noise.quantisation`."""
    for first, last, low, high in tiles(start, start + len(total)):
        noise = np.zeros((last - first) * TILE)
        for key, weight in terms:
            add_tiles(key, weight, first, last, noise)
        noise += np.multiply(words_of(dither, first, last), width, dtype=np.float64)
        total[low - start : high - start] += np.rint(noise[low - first * TILE : high - first * TILE]).astype(np.int64)


def check_stddev(stddev: float) -> None:
    if not 0 <= stddev < math.inf:
        raise ValueError(f"stddev must be finite and not negative, got {stddev}")
