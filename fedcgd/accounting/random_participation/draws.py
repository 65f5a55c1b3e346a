"""Draws in blocks, each with its own generator, so that any number of threads finds the same."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from fedcgd.accounting.tolerances import TOLERANCES
from fedcgd.native.threads import one_thread, usable_cores

Drawn = TypeVar("Drawn")
Seed = tuple[int, int]  # of a question, and the number of its draws


def run_in_blocks(
    draw: Callable[[np.random.Generator, int], Drawn],
    count: int,
    width: int,
    seed: Seed,
    is_hopeless: Callable[[list[Drawn]], bool] = lambda _: False,
) -> list[Drawn]:
    """`count` draws in blocks, each with its own generator; no more than a quarter of them if these say that it `is_hopeless`."""
    size = max(1, min(-(-count // 4), max(64, TOLERANCES.memory.block // width)))
    sizes = [min(size, count - start) for start in range(0, count, size)]
    seeds = np.random.SeedSequence(seed).spawn(len(sizes))
    parts = list(zip(seeds, sizes, strict=True))

    def block(part: tuple[np.random.SeedSequence, int]) -> Drawn:
        return draw(np.random.Generator(np.random.SFC64(part[0])), part[1])

    # Threads that BLAS starts inside ours wait for each other: up to six times as slow where others use the processor too.
    with one_thread(), ThreadPoolExecutor(min(len(sizes), usable_cores())) as pool:
        first = list(pool.map(block, parts[: len(parts) // 4]))
        return first if first and is_hopeless(first) else [*first, *pool.map(block, parts[len(first) :])]
