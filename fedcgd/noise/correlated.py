"""stddev·Σ_j w_j·Z_j chunk by chunk: the rows of C⁻¹Z, without any Z ever being whole in memory."""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from fedcgd.noise.box_muller import LARGEST, Workspace
from fedcgd.noise.compiled import kernels
from fedcgd.noise.stream import Chunk, NoiseStream, check_coordinates, check_index, chunks, workspace

Term = tuple[int, int, float]
"""(round, nonce, weight): which noise, and how much of it."""

Noise = NDArray[np.float64]

MAX_THREADS = 2  # unless asked: each takes 11 MiB


def for_each_chunk(
    consume: Callable[[int, Noise], None],
    stream: NoiseStream,
    terms: Sequence[Term],
    stddev: float,
    start: int,
    stop: int,
    *,
    threads: int | None = None,
) -> None:
    """Calls consume(begin, noise) until [start, stop) is covered; noise = stddev·Σ_j w_j·Z_(round_j, nonce_j)[begin : …].

    Noise is float64. The parts do not overlap; they come in any order and from several threads (default: one for each core,
    at most 2), and `consume` may overwrite them. The numbers are the same for any `threads` and any split into calls. Z is
    the exact product of the radius and the sine or cosine (float32 each); `NoiseStream.normal` gives it rounded to float32.
    Raises ValueError, before the first call, for indices out of range, and for a stddev or weights that are not finite or too
    large for float32.
    """
    check_coordinates(start, stop)
    if not 0 <= stddev < math.inf:
        raise ValueError(f"stddev must be finite and not negative, got {stddev}")
    scaled = []
    for round, nonce, weight in terms:
        check_index(round, nonce)
        if not LARGEST * len(terms) * abs(stddev * weight) < 1e38:
            raise ValueError(f"stddev · weight must be finite and below 1e36 / terms, got {stddev} · {weight}")
        scaled.append((round, nonce, stddev * weight))
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
        total = np.empty(max(c.size for c in share))
        product = np.empty(max(c.size // (2 if c.quarter is None else 1) for c in share))
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
    """Σ_j weight_j·Z_j over the chunk, in `total`; `product` is room for a part of it."""
    total = total[: chunk.size]
    fast = kernels() if chunk.quarter is None else None
    for j, (round, nonce, weight) in enumerate(terms):
        if fast is not None:
            stream.fill(memory, round, nonce, chunk)
            fast.weighted(*memory.words(chunk.padded), weight, j == 0, total)
            continue
        for i, (radius, direction) in enumerate(stream.polar(memory, round, nonce, chunk)):
            part = total[i * len(radius) : (i + 1) * len(radius)]
            out = product[: len(radius)] if j else part
            np.multiply(radius, direction, out=out, dtype=np.float64)
            np.multiply(out, weight, out=out)
            if j:
                np.add(part, out, out=part)
    return total
