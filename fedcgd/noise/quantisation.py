"""Sum and noise on one fixed lattice, so that the low bits of a floating-point number tell nothing about the users.

The Gaussian mechanism is private for real numbers. A float x + Z is not that: which floats can come out depends on x (Mironov,
"On significance of the least significant bits for differential privacy", CCS 2012). Here everything lives on the multiples of one
step, a power of two:

1. Each clipped update is rounded to the lattice towards zero, coordinate by coordinate: no norm grows, so the sensitivity stays.
2. Lattice updates are summed as 64-bit integers, exactly, in any order. Let X be the sum, in steps.
3. The noise is rounded to the lattice. For X on it, X + round(Z) = round(X + Z): a function of the ideal mechanism's output
   X + Z and nothing else, and so exactly as private. What comes out is a multiple of the step whatever X is.

Step 3 holds for a real-valued Z. The Z of `NoiseStream` has steps of its own: it takes about 2⁴⁹ values, and where the
lattice is as fine as for large models, a cell of it holds few of them. So independent noise S, the dither, `DITHER` times as
large, is added before the rounding. Adding anything independent of the users to a private output keeps it private, whatever its
distribution: so it is uniform, 32 bits of keystream a coordinate, and no logarithm. It spreads each value of Z over many cells
of the lattice (2²⁴ in the finest use, 2⁻⁷ of a standard deviation always), and adds 5e-6 to the variance, 2.5e-6 to the length of
the noise. It is fresh under every nonce and never cancelled.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcgd.native.threads import usable_cores
from fedcgd.noise.box_muller import LARGEST
from fedcgd.noise.stream import TILE, NoiseStream, Term, check_coordinates, kernels, key_words, tiles, words_of
from fedcgd.support.numbers import as_positive

Integers = NDArray[np.int64]

DITHER = 2.0**-8
"""The dither is uniform between plus and minus this part of the standard deviation of Z."""

RELATIVE_LOSS = 2.0**-10
"""Rounding to a `Lattice.fitting` moves a vector by at most this part of the clip norm."""

_EXACT = 2**53  # float64 holds all integers up to here
_MOST_STEPS = 2.0**50  # of noise: beyond, Z would be coarser than the lattice
_PURPOSE = "smoothing"  # of the stream that the dither comes from: a part of the noise's definition


@dataclass(frozen=True)
class Lattice:
    """The multiples of one step; numbers on it are held as whole numbers of steps, int64.

    Args:
        step: a power of two between 2⁻⁵⁰⁰ and 2⁵⁰⁰, in units of the update.

    Raises:
        ValueError: for another step.

    >>> Lattice(0.5).to_steps(np.array([1.3, -1.3])).tolist()
    [2, -2]
    """

    step: float

    def __post_init__(self) -> None:
        if not (0 < self.step < math.inf) or math.frexp(self.step)[0] != 0.5 or not 2.0**-500 < self.step < 2.0**500:
            raise ValueError(
                f"step must be a power of two between 2⁻⁵⁰⁰ and 2⁵⁰⁰, got {self.step}; Lattice.fitting gives one"
            )

    @staticmethod
    def fitting(*, clip_norm: float, size: int, stddev: float) -> "Lattice":
        """The coarsest lattice on which rounding moves an update by at most 2⁻¹⁰ of the clip norm.

        Args:
            clip_norm: ζ, in units of the update.
            size: coordinates of an update.
            stddev: the standard deviation of the noise, in units of the update.

        Raises:
            ValueError: if the noise has 2⁴⁰ steps or more, for it would not fit the integers; and for numbers out of range.
        """
        clip_norm = as_positive("clip_norm", clip_norm)
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        step = math.ldexp(1.0, math.floor(math.log2(RELATIVE_LOSS * clip_norm / math.sqrt(size))))
        if not 0 <= stddev < 2.0**40 * step:
            raise ValueError(
                f"noise of standard deviation {stddev} on updates of norm {clip_norm} with {size} coordinates is more than "
                f"the lattice holds (below {2.0**40 * step:.3g}), and would leave nothing of the updates; take a larger ε"
            )
        return Lattice(step)

    def to_steps(self, update: NDArray[np.floating[Any]]) -> Integers:
        """An update in steps, rounded towards zero.

        Guarantee: |step · result| ≤ |update| in every coordinate, so no norm grows.

        Args:
            update: of any shape, in any floating-point type.

        Returns:
            int64, of the same shape.

        Raises:
            ValueError: if an entry is not finite or has 2⁵³ steps or more (an update that is clipped to ζ has far fewer).
        """
        steps: NDArray[np.float64] = np.trunc(
            np.multiply(update, 1.0 / self.step, dtype=np.float64)
        )  # exact: 1 / step is a power of two
        if not (np.abs(steps) < _EXACT).all():
            raise ValueError(
                f"an entry is not finite or too large for steps of {self.step}; clip the update, or take larger steps"
            )
        return steps.astype(np.int64)

    def from_steps(self, total: NDArray[np.signedinteger[Any]]) -> NDArray[np.float64]:
        """step · `total`, float64. A function of what is released, so its rounding costs no privacy.

        Args:
            total: whole numbers of steps.
        """
        values: NDArray[np.float64] = np.multiply(total, self.step, dtype=np.float64)
        return values


def add_noise(
    total: Integers,
    stream: NoiseStream,
    terms: Sequence[Term],
    stddev: float,
    lattice: Lattice,
    *,
    start: int = 0,
    threads: int | None = None,
) -> None:
    """total += round(stddev·(Σ_j w_j·Z_j + S) / step), in place. S is the dither, uniform between ±`DITHER`.

    The numbers are the same for any number of threads and any split into calls.

    Args:
        total: a sum in steps of `lattice`, int64, contiguous; entry i gets the noise of coordinate `start` + i.
        stream: where Z comes from.
        terms: (round, nonce, w) of each Z. The first is the newest noise; its (round, nonce) also names the dither.
        stddev: ζσ, in units of the update.
        lattice: that of `total`.
        start: the coordinate of the first entry.
        threads: by default one for each core, at most 2, and one for few numbers.

    Raises:
        ValueError: before `total` is touched, if there is no term, for indices out of range, or if the noise could reach 2⁵⁰
            steps, where Z would be coarser than the lattice.
    """
    flat = _flat(total)
    stop = start + len(flat)
    check_coordinates(start, stop)
    keys, weights, dither = keyed_noise(stream, terms, stddev, lattice)
    width = dither_width(stddev, lattice)
    if threads is None:  # to begin one costs as much as some hundred thousand coordinates
        threads = 1 if len(flat) < 2**20 else min(usable_cores(), 2)
    add_to_grid = kernels().add_to_grid
    if threads == 1:
        add_to_grid(flat, start, keys, weights, dither, width)
        return
    whole = -(-len(flat) // TILE)
    cuts = [start, *(min(start + whole * i // threads * TILE, stop) for i in range(1, threads)), stop]
    with ThreadPoolExecutor(threads) as pool:
        parts = [(flat[low - start : high - start], low) for low, high in pairwise(cuts) if low < high]
        for done in [pool.submit(add_to_grid, *part, keys, weights, dither, width) for part in parts]:
            done.result()


def keyed_noise(
    stream: NoiseStream, terms: Sequence[Term], stddev: float, lattice: Lattice
) -> tuple[NDArray[np.uint32], NDArray[np.float64], NDArray[np.uint32]]:
    """ChaCha20 keys of the terms, (terms, 8), their weights in steps of the lattice, and the key of their dither, (8,).

    Args:
        stream: as in `add_noise`.
        terms: as in `add_noise`.
        stddev: as in `add_noise`.
        lattice: as in `add_noise`.

    Raises:
        ValueError: as `add_noise` does.
    """
    if not terms:
        raise ValueError("at least one term is needed: a sum without noise is not private")
    if not 0 <= stddev < math.inf:
        raise ValueError(f"stddev must be finite and not negative, got {stddev}")
    # Exact: the step is a power of two.
    weights = np.array([weight * (stddev / lattice.step) for _, _, weight in terms])
    if not LARGEST * np.abs(weights).sum() < _MOST_STEPS:
        raise ValueError(
            f"noise of standard deviation {stddev} with weights {[weight for _, _, weight in terms]} must be finite and below "
            f"2⁵⁰ steps of {lattice.step}; take larger steps"
        )
    keys = key_words(b"".join([stream.key_of(round, nonce) for round, nonce, _ in terms]))
    return keys.reshape(-1, 8), weights, dither_key(stream, terms[0])


def add_values(
    total: Integers,
    noise: NDArray[np.floating[Any]],
    stream: NoiseStream,
    newest: Term,
    stddev: float,
    lattice: Lattice,
    *,
    start: int = 0,
) -> None:
    """total += round(stddev·(noise + S) / step), in place, for noise that was made elsewhere. S is the dither.

    Args:
        total: a sum in steps of `lattice`, int64, contiguous.
        noise: in standard deviations, of the shape of `total`.
        stream: where the dither comes from.
        newest: the (round, nonce, w) that names the dither.
        stddev: ζσ, in units of the update.
        lattice: that of `total`.
        start: the coordinate of the first number of `total` and of `noise`.

    Raises:
        ValueError: before `total` is touched, if `noise` has another shape or stddev·noise is not finite or reaches 2⁵⁰ steps.
    """
    flat = _flat(total)
    values = noise.reshape(-1)
    scale = stddev / lattice.step
    check_values(noise, total, stddev, lattice)
    dither, width = dither_key(stream, newest), dither_width(stddev, lattice)
    for first, last, low, high in tiles(start, start + len(flat)):
        here, words = slice(low - start, high - start), words_of(dither.astype("<u4").tobytes(), first, last)
        steps = np.multiply(values[here], scale, dtype=np.float64)
        steps += np.multiply(words[low - first * TILE : high - first * TILE], width, dtype=np.float64)
        flat[here] += np.rint(steps).astype(np.int64)


def check_values(noise: Any, total: Any, stddev: float, lattice: Lattice) -> None:
    """Refuse noise that `add_values` may not add.

    Args:
        noise: an array or a tensor.
        total: what it is for.
        stddev: ζσ, in units of the update.
        lattice: that of `total`.

    Raises:
        ValueError: for another shape, and for what is not finite or reaches 2⁵⁰ steps.
    """
    if noise.shape != total.shape or not bool((abs(noise) * (stddev / lattice.step) < _MOST_STEPS).all()):
        raise ValueError(
            f"noise must be finite, of shape {tuple(total.shape)} and below 2⁵⁰ steps of {lattice.step}, got shape "
            f"{tuple(noise.shape)}"
        )


def dither_key(stream: NoiseStream, newest: Term) -> NDArray[np.uint32]:
    """The ChaCha20 key of the dither of a round, shape (8,).

    Args:
        stream: that of the noise.
        newest: the (round, nonce, w) of its newest noise.
    """
    round, nonce, _ = newest
    return key_words(stream.derive(_PURPOSE).key_of(round, nonce))


def dither_width(stddev: float, lattice: Lattice) -> float:
    """Steps of dither for each unit of a 32-bit word.

    Args:
        stddev: ζσ, in units of the update.
        lattice: what it is added on.
    """
    return DITHER * 2.0**-31 * (stddev / lattice.step)


def _flat(total: Integers) -> Integers:
    """`total` as a flat view. Raises ValueError unless that is possible."""
    if total.dtype != np.int64 or not total.flags.c_contiguous or not total.flags.writeable:
        raise ValueError(f"total must be contiguous, writable int64, got {total.dtype}")
    return total.reshape(-1)
