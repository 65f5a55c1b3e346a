"""Draws of what Balls-in-Bins accounting needs: y_j = ⟨u_j, x⟩ for the bins j, Gaussian with covariance G."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from fedcgd.mechanisms.mechanism import Matrix, Vector

Single = NDArray[np.float32]
Drawn = TypeVar("Drawn")
Seed = tuple[int, int]  # of a question, and the number of its draws

_CHUNK = 2**17  # numbers in one block of draws, so that they stay in the cache


@dataclass(frozen=True)
class Sample:
    """What is asked for is the product of the means of two sets of independent draws."""

    values: Vector
    """In [0, `range`]; the mean of their squares is at most `square`."""
    range: float
    square: float
    shares: Vector | None = None
    """In [0, 1]; None stands for 1."""


@dataclass(frozen=True, eq=False)
class Bins:
    """G for σ = 1, and its root."""

    gram: Matrix
    root: Single = field(init=False)  # G = rootᵀ·root

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", np.linalg.cholesky(self.gram).T.astype(np.float32))

    @property
    def are_independent(self) -> bool:
        """Whether no bin overlaps another, as for C = I."""
        return int(np.count_nonzero(self.gram)) == len(self.gram)

    def noise(self, generator: np.random.Generator, count: int) -> Single:
        """`count` draws of N(0, G)."""
        normal = generator.standard_normal((count, len(self.gram)), dtype=np.float32)
        return np.asarray(normal @ self.root)


def run_in_blocks(draw: Callable[[np.random.Generator, int], Drawn], count: int, width: int, seed: Seed) -> list[Drawn]:
    """`count` draws in blocks, each with its own generator: the same for any number of threads."""
    size = max(1, min(count, max(128, _CHUNK // width)))
    sizes = [min(size, count - start) for start in range(0, count, size)]
    seeds = np.random.SeedSequence(seed).spawn(len(sizes))
    # Threads that BLAS starts inside ours wait for each other: up to six times as slow where others use the processor too.
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(min(len(sizes), len(os.sched_getaffinity(0)))) as pool:
        blocks = pool.map(
            lambda pair: draw(np.random.Generator(np.random.SFC64(pair[0])), pair[1]), zip(seeds, sizes, strict=True)
        )
        return list(blocks)
