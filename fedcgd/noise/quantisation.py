"""Sum and noise on one fixed grid, so that the low bits of a floating-point number tell nothing about the users.

The Gaussian mechanism is private for real numbers. A float x + Z is not that: which floats can come out depends on x (Mironov,
"On significance of the least significant bits for differential privacy", CCS 2012). Here everything lives on the multiples of one
step, a power of two:

1. Each clipped update is rounded to the grid towards zero, coordinate by coordinate: no norm grows, so the sensitivity stays.
2. Grid updates are summed as 64-bit integers, exactly, in any order. Let X be the sum, in steps.
3. The noise is rounded to the grid. For X on the grid, X + round(Z) = round(X + Z): a function of the ideal mechanism's output
   X + Z and nothing else, and so exactly as private. What comes out is a multiple of the step whatever X is.

Step 3 holds for a real-valued Z. The Z of `NoiseStream` has steps of its own: it takes about 2⁴⁹ values, and where the
grid is as fine as for large models, a cell of it holds few of them. So an independent Gaussian of 1/256 the standard
deviation is added in the same way (`SMOOTHING`). Adding anything independent to a private output keeps it private; this
spreads each value of Z over very many cells, and lengthens the noise by 8e-6 of itself. It is fresh in every attempt and never
cancelled.

Grid integers are also what secure aggregation adds, modulo 2³²: `to_modular`, `from_modular`, `check_modular`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcgd.noise import NoiseStream, Term, for_each_chunk
from fedcgd.noise.box_muller import LARGEST

Integers = NDArray[np.int64]

SMOOTHING = 2.0**-8
"""Standard deviation of the smoothing noise, as a part of that of Z."""

_RELATIVE_LOSS = 2.0**-10
_EXACT = 2**53  # float64 holds all integers up to here
_MOST_STEPS = 2.0**50  # of noise: beyond, Z would be coarser than the grid
_CHUNK = 2**20


def lattice_step(*, clip_norm: float, size: int, stddev: float) -> float:
    """The largest power of two at which rounding `size` coordinates moves an update by at most 2⁻¹⁰ · `clip_norm`.

    Raises ValueError if noise of standard deviation `stddev` has 2⁴⁰ such steps or more: it would not fit the integers.
    """
    if not 0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm must be positive and finite, got {clip_norm}")
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    step = math.ldexp(1.0, math.floor(math.log2(_RELATIVE_LOSS * clip_norm / math.sqrt(size))))
    if not 0 <= stddev < 2.0**40 * step:
        raise ValueError(
            f"noise of standard deviation {stddev} on updates of norm {clip_norm} with {size} coordinates is more than the "
            f"grid holds (below {2.0**40 * step:.3g}), and would leave nothing of the updates; take a larger ε"
        )
    return step


def to_lattice(update: NDArray[np.floating[Any]], step: float) -> Integers:
    """`update` in steps, rounded towards zero, int64 of the same shape.

    Guarantee: |step · result| ≤ |update| in every coordinate, so no norm grows. Raises ValueError if an entry is not finite
    or has 2⁵³ steps or more (an update that is clipped to ζ has far fewer).
    """
    _check_step(step)
    steps: NDArray[np.float64] = np.trunc(
        np.multiply(update, 1.0 / step, dtype=np.float64)
    )  # exact: 1 / step is a power of two
    if not (np.abs(steps) < _EXACT).all():
        raise ValueError(
            f"an entry is not finite or too large for steps of {step}; clip the update, or take larger steps"
        )
    return steps.astype(np.int64)


def from_lattice(total: Integers, step: float) -> NDArray[np.float64]:
    """step · `total`, float64. A function of what is released, so its rounding costs no privacy."""
    _check_step(step)
    return np.multiply(total, step, dtype=np.float64)


def add_noise(
    total: Integers,
    stream: NoiseStream,
    terms: Sequence[Term],
    stddev: float,
    step: float,
    *,
    start: int = 0,
    threads: int | None = None,
) -> None:
    """total += round(stddev·Σ_j w_j·Z_j / step) + smoothing, in place; total is int64 in steps and contiguous.

    As `fedcgd.noise.add_correlated` otherwise. The first term is the newest noise; its (round, attempt) also names the
    smoothing noise. Raises ValueError, before total is touched, if there is no term or if the noise could reach 2⁵⁰
    steps, where Z would be coarser than the grid.
    """
    if not terms:
        raise ValueError("at least one term is needed: a sum without noise is not private")
    _add_stream(total, stream, terms, stddev, step, start, threads)
    round, attempt, _ = terms[0]
    add_smoothing(total, stream, round, attempt, stddev, step, start=start, threads=threads)


def add_values(total: Integers, noise: NDArray[np.floating[Any]], step: float) -> None:
    """total += round(noise / step), in place, for noise that was made elsewhere; `add_smoothing` has to follow.

    Raises ValueError, before total is touched, if `noise` is not finite, has another shape or reaches 2⁵⁰ steps.
    """
    flat = _flat(total, step)
    values = noise.reshape(-1)
    if noise.shape != total.shape or not (np.abs(values) < _MOST_STEPS * step).all():
        raise ValueError(
            f"noise must be finite, of shape {total.shape} and below 2⁵⁰ steps of {step}, got shape {noise.shape}"
        )
    for begin in range(0, len(flat), _CHUNK):
        part = flat[begin : begin + _CHUNK]
        part += np.rint(np.multiply(values[begin : begin + _CHUNK], 1.0 / step, dtype=np.float64)).astype(np.int64)


def add_smoothing(
    total: Integers,
    stream: NoiseStream,
    round: int,
    attempt: int,
    stddev: float,
    step: float,
    *,
    start: int = 0,
    threads: int | None = None,
) -> None:
    """total += round(`SMOOTHING`·stddev·Z′ / step), in place, with Z′ of (round, attempt) independent of all Z of `stream`."""
    _add_stream(total, stream.derive("smoothing"), [(round, attempt, SMOOTHING)], stddev, step, start, threads)


def _add_stream(
    total: Integers,
    stream: NoiseStream,
    terms: Sequence[Term],
    stddev: float,
    step: float,
    start: int,
    threads: int | None,
) -> None:
    flat = _flat(total, step)
    reach = LARGEST * stddev * sum(abs(weight) for _, _, weight in terms) / step
    if not reach < _MOST_STEPS:
        raise ValueError(f"noise of standard deviation {stddev} is too large for steps of {step}; take larger steps")

    def add(begin: int, noise: NDArray[Any]) -> None:
        np.rint(noise, out=noise)
        part = flat[begin - start : begin - start + len(noise)]
        np.add(part, noise.astype(np.int64), out=part)

    steps = stddev / step  # exact: step is a power of two
    for_each_chunk(add, stream, terms, steps, start, start + len(flat), dtype=np.dtype(np.float64), threads=threads)


def _flat(total: Integers, step: float) -> Integers:
    """`total` as a flat view. Raises ValueError unless that is possible, and `step` a power of two."""
    _check_step(step)
    if total.dtype != np.int64 or not total.flags.c_contiguous or not total.flags.writeable:
        raise ValueError(f"total must be contiguous, writable int64, got {total.dtype}")
    return total.reshape(-1)


def to_modular(values: Integers) -> NDArray[np.uint32]:
    """`values` modulo 2³², the numbers that secure aggregation adds."""
    return values.astype(np.uint32)  # NumPy wraps two's complement, which is the residue


def from_modular(residues: NDArray[np.uint32]) -> Integers:
    """The numbers in −2³¹ … 2³¹ − 1 with these residues modulo 2³²."""
    return residues.astype(np.uint32).view(np.int32).astype(np.int64)


def check_modular(*, users: int, clip_norm: float, step: float) -> None:
    """Raise ValueError unless a sum of `users` grid updates, each clipped to `clip_norm`, is known from its residues."""
    _check_step(step)
    most = users * math.floor(clip_norm / step)
    if not most < 2**31:
        enough = 2.0 ** math.ceil(math.log2(users * clip_norm / (2**31 - 1)))
        raise ValueError(
            f"{users} users of norm {clip_norm} can reach {most} steps of {step}, and modulo 2³² only sums below 2³¹ are "
            f"known; take steps of {enough} or more"
        )


def _check_step(step: float) -> None:
    if not (0 < step < math.inf) or math.frexp(step)[0] != 0.5 or not 2.0**-500 < step < 2.0**500:
        raise ValueError(f"step must be a power of two between 2⁻⁵⁰⁰ and 2⁵⁰⁰, got {step}; lattice_step gives one")
