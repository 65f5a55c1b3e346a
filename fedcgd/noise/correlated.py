"""x += stddev·Σ_j w_j·Z_j in one pass: the rows of C⁻¹Z, without any Z ever being whole in memory."""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcgd.noise.box_muller import LARGEST, Workspace
from fedcgd.noise.stream import Chunk, NoiseStream, check_coordinates, check_index, chunks, workspace

Term = tuple[int, int, float]
"""(round, attempt, weight): which noise, and how much of it."""

Noise = NDArray[Any]
"""float32 or float64."""

MAX_THREADS = 2  # unless asked: each takes 7 MiB (float64: 11 MiB)


def add_correlated(
    x: Noise | torch.Tensor,
    stream: NoiseStream,
    terms: Sequence[Term],
    stddev: float,
    *,
    start: int = 0,
    threads: int | None = None,
) -> None:
    """x[i] += stddev·Σ_j w_j·Z_(round_j, attempt_j)[start + i], in place; `terms` are the (round_j, attempt_j, w_j).

    `x` is a float32 or float64 array or CPU tensor, contiguous, of any shape (i counts its entries in order). The sum
    over j is made in the type of `x`. The same numbers for any `threads` (default: one for each core, at most 2) and
    any split of `x` over calls. Extra memory: 7 MiB a thread (11 MiB for float64). Raises ValueError before x is
    touched.
    """
    flat = _flat_view(x)

    def add(begin: int, noise: Noise) -> None:
        part = flat[begin - start : begin - start + len(noise)]
        np.add(part, noise, out=part)

    for_each_chunk(add, stream, terms, stddev, start, start + len(flat), dtype=flat.dtype, threads=threads)


def for_each_chunk(
    consume: Callable[[int, Noise], None],
    stream: NoiseStream,
    terms: Sequence[Term],
    stddev: float,
    start: int,
    stop: int,
    *,
    dtype: np.dtype[Any],
    threads: int | None = None,
) -> None:
    """Calls consume(begin, noise) until [start, stop) is covered; noise = stddev·Σ_j w_j·Z_j[begin : …].

    The parts do not overlap; they come in any order and from several threads, and `consume` may overwrite them. In
    float64, Z is the exact product of the radius and the sine or cosine (float32 each); `NoiseStream.normal` gives it
    rounded to float32. Raises ValueError for indices out of range, and for a stddev or weights that are not finite or
    too large for float32.
    """
    check_coordinates(start, stop)
    if not 0 <= stddev < math.inf:
        raise ValueError(f"stddev must be finite and not negative, got {stddev}")
    scaled = []
    for round, attempt, weight in terms:
        check_index("round", round)
        check_index("attempt", attempt)
        if not LARGEST * len(terms) * abs(stddev * weight) < 1e38:
            raise ValueError(f"stddev · weight must be finite and below 1e36 / terms, got {stddev} · {weight}")
        scaled.append((round, attempt, stddev * weight))
    if threads is None:
        threads = min(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MAX_THREADS
        )
    elif threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    if not scaled or start == stop:
        return

    def work(share: Sequence[Chunk]) -> None:
        memory = workspace(share)
        total = np.empty(max(c.size for c in share), dtype)
        product = np.empty(
            max(c.size // (2 if c.quarter is None else 1) for c in share) if dtype == np.float64 else 0, dtype
        )
        for chunk in share:
            noise = _chunk_noise(stream, memory, scaled, chunk, total, product)
            low, high = max(start, chunk.begin), min(stop, chunk.begin + chunk.size)
            consume(low, noise[low - chunk.begin : high - chunk.begin])

    every = list(chunks(start, stop))
    shares = [every[len(every) * i // threads : len(every) * (i + 1) // threads] for i in range(threads)]
    shares = [share for share in shares if share]
    if len(shares) == 1:
        work(shares[0])
        return
    with ThreadPoolExecutor(len(shares)) as pool:
        for done in [pool.submit(work, share) for share in shares]:
            done.result()


def _chunk_noise(
    stream: NoiseStream, memory: Workspace, terms: Sequence[Term], chunk: Chunk, total: Noise, product: Noise
) -> Noise:
    """Σ_j weight_j·Z_j over the chunk, in `total`; `product` is room for a part of it where total is float64."""
    total = total[: chunk.size]
    wide = total.dtype == np.float64
    for j, (round, attempt, weight) in enumerate(terms):
        scale = total.dtype.type(weight)
        pairs = stream.polar(memory, round, attempt, chunk)
        if not wide:
            np.multiply(pairs[0][0], scale, pairs[0][0])
        for i, (radius, direction) in enumerate(pairs):
            part = total[i * len(radius) : (i + 1) * len(radius)]
            out = part if j == 0 else product[: len(radius)] if wide else direction
            np.multiply(radius, direction, out=out, dtype=total.dtype)
            if wide:
                np.multiply(out, scale, out=out)
            if j:
                np.add(part, out, out=part)
    return total


def _flat_view(x: Noise | torch.Tensor) -> Noise:
    """`x` as a flat NumPy array that shares its memory."""
    if isinstance(x, torch.Tensor):
        if x.device.type != "cpu" or not x.is_contiguous():
            raise ValueError(f"x must be a contiguous CPU tensor, got one on {x.device} with strides {x.stride()}")
        if x.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"x must be float32 or float64, got {x.dtype}")
        x = x.detach().numpy()
    if x.dtype not in (np.float32, np.float64):
        raise ValueError(f"x must be float32 or float64, got {x.dtype}")
    if not x.flags.c_contiguous or not x.flags.writeable:
        raise ValueError("x must be contiguous and writable, because the noise is added in place")
    return x.reshape(-1)
