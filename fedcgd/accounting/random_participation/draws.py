"""Draws in blocks, each with its own generator, so that any number of threads finds the same."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from fedcgd.accounting.effort import EFFORT
from fedcgd.native.threads import one_thread, usable_cores

Drawn = TypeVar("Drawn")
Seed = tuple[int, int]  # of a question, and the number of its draws


def run_in_blocks(draw: Callable[[np.random.Generator, int], Drawn], count: int, width: int, seed: Seed) -> list[Drawn]:
    """`count` draws in blocks, each with its own generator: the same for any number of threads."""
    size = max(1, min(count, max(128, EFFORT.memory.block // width)))
    sizes = [min(size, count - start) for start in range(0, count, size)]
    seeds = np.random.SeedSequence(seed).spawn(len(sizes))
    # Threads that BLAS starts inside ours wait for each other: up to six times as slow where others use the processor too.
    with one_thread(), ThreadPoolExecutor(min(len(sizes), usable_cores())) as pool:
        blocks = pool.map(
            lambda pair: draw(np.random.Generator(np.random.SFC64(pair[0])), pair[1]), zip(seeds, sizes, strict=True)
        )
        return list(blocks)
