"""Draws of what Balls-in-Bins accounting needs: y_j = ⟨u_j, x⟩ for the bins j, Gaussian with covariance G.

What all bins have in common is not drawn. For c² ≤ 1/(1ᵀG⁻¹1), G′ = G − c²·11ᵀ has no negative eigenvalue. So y_j = y′_j + c·t
with y′ of covariance G′ and t standard normal, independent of it; and with V_j = exp(y_j − G_jj/2), V′_j = exp(y′_j − G′_jj/2),

    S = mean_j V_j = L·S′,   S′ = mean_j V′_j,   L = exp(ct − c²/2).

Where the bins are many and alike, L is most of what S varies by; a mean over it needs no draws (`log_excess`).
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.special import log_ndtr

from fedcgd.blas import one_thread, usable_cores
from fedcgd.mechanisms.mechanism import Matrix, Vector

Single = NDArray[np.float32]
Drawn = TypeVar("Drawn")
Seed = tuple[int, int]  # of a question, and the number of its draws

_CHUNK = 2**17  # numbers in one block of draws, so that they stay in the cache
_JITTER = 1e-11


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
    """G for σ = 1, and its parts: G = G′ + c²·11ᵀ."""

    gram: Matrix
    common: float = field(init=False)
    """c²."""
    apart: Matrix = field(init=False)
    """G′."""
    root: Single = field(init=False)  # G′ = rootᵀ·root

    def __post_init__(self) -> None:
        ones = np.ones(len(self.gram))
        common = 0.999 / float(ones @ cho_solve(cho_factor(self.gram), ones))
        apart = self.gram - common
        # G′ keeps a thousandth of G. As δ does not decrease with an entry of the Gram matrix, this covers rounding.
        apart[np.diag_indices(len(apart))] += _JITTER * self.gram.max()
        object.__setattr__(self, "common", common)
        object.__setattr__(self, "apart", apart)
        object.__setattr__(self, "root", np.linalg.cholesky(apart).T.astype(np.float32))

    @property
    def are_independent(self) -> bool:
        """Whether no bin overlaps another, as for C = I."""
        return int(np.count_nonzero(self.gram)) == len(self.gram)

    def noise(self, generator: np.random.Generator, count: int) -> Single:
        """`count` draws of y."""
        common = generator.standard_normal((count, 1), dtype=np.float32)
        y = self.noise_apart(generator, count)
        y += np.float32(math.sqrt(self.common)) * common
        return y

    def noise_apart(self, generator: np.random.Generator, count: int) -> Single:
        """`count` draws of y′."""
        normal = generator.standard_normal((count, len(self.gram)), dtype=np.float32)
        return np.asarray(normal @ self.root)


def log_excess(x: Vector, c: float) -> Vector:
    """log E (L·e^x − 1)₊. Concave in x, as (e^u − 1)₊ and the normal density are log-concave."""
    first, second = x + log_ndtr(x / c + c / 2), log_ndtr(x / c - c / 2)
    less = second - first
    # Where rounding hides that the second is less, it is left out, which makes the result larger.
    result: Vector = first + np.log(-np.expm1(less, where=less < 0, out=np.full_like(less, -1.0)))
    return result


def run_in_blocks(draw: Callable[[np.random.Generator, int], Drawn], count: int, width: int, seed: Seed) -> list[Drawn]:
    """`count` draws in blocks, each with its own generator: the same for any number of threads."""
    size = max(1, min(count, max(128, _CHUNK // width)))
    sizes = [min(size, count - start) for start in range(0, count, size)]
    seeds = np.random.SeedSequence(seed).spawn(len(sizes))
    # Threads that BLAS starts inside ours wait for each other: up to six times as slow where others use the processor too.
    with one_thread(), ThreadPoolExecutor(min(len(sizes), usable_cores())) as pool:
        blocks = pool.map(
            lambda pair: draw(np.random.Generator(np.random.SFC64(pair[0])), pair[1]), zip(seeds, sizes, strict=True)
        )
        return list(blocks)
