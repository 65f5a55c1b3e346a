"""Mechanisms that are not Toeplitz: a diagonal, the binary tree, and matrices found by optimisation."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from fedcgd.mechanisms.mechanism import Matrix, Vector

DENSE_LIMIT = 8192  # rounds: n² numbers are kept


@dataclass(frozen=True)
class Diagonal:
    """C = diag((n − j)^(1/4)), j from 0: the best diagonal for b = 1, k = n (Theorem 4 of arXiv:2601.22334)."""

    @property
    def name(self) -> str:
        return "diagonal"

    def bandwidth(self, rounds: int) -> int:
        return 1

    def columns(self, rounds: int, indices: NDArray[np.intp]) -> Matrix:
        indices = np.asarray(indices)
        result = np.zeros((rounds, len(indices)))
        result[indices, np.arange(len(indices))] = (rounds - indices) ** 0.25
        return result

    def inverse_row(self, round: int, rounds: int) -> Vector:
        return np.array([(rounds - round) ** -0.25])


@dataclass(frozen=True)
class Tree:
    """Binary-tree aggregation with the best linear estimate of every prefix from all nodes (Honaker, 2015).

    The tree releases the noisy sum of every full dyadic block that ends within n rounds, by the matrix T of zeros and ones. The
    estimate has the law of x + (C⁻¹Z) for the lower-triangular C with CᵀC = TᵀT, which can be run round by round; and its
    sensitivity is that of T, because only the Gram matrix counts.
    """

    @property
    def name(self) -> str:
        return "tree"

    def columns(self, rounds: int, indices: NDArray[np.intp]) -> Matrix:
        return _tree(rounds)[0][:, np.asarray(indices)]

    def inverse_row(self, round: int, rounds: int) -> Vector:
        return _tree(rounds)[1][round, round::-1]


@dataclass(frozen=True)
class Explicit:
    """A C given by the entries of its band: `band[j][l]` = C[j + l, j], l < p. Only for the n it was made for.

    `name` says how it was found: `band-mf` or `dense`.
    """

    name: str
    band: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.band or not all(column and column[0] > 0 for column in self.band):
            raise ValueError("every column of C needs a positive entry on the diagonal")

    def bandwidth(self, rounds: int) -> int:
        self._check(rounds)
        return max(len(column) for column in self.band)

    def columns(self, rounds: int, indices: NDArray[np.intp]) -> Matrix:
        self._check(rounds)
        result = np.zeros((rounds, len(indices)))
        for at, j in enumerate(np.asarray(indices)):
            column = self.band[int(j)][: rounds - int(j)]
            result[j : j + len(column), at] = column
        return result

    def inverse_row(self, round: int, rounds: int) -> Vector:
        self._check(rounds)
        return _explicit_inverse(self)[round, round::-1]

    def _check(self, rounds: int) -> None:
        if rounds != len(self.band):
            raise ValueError(f"this {self.name} matrix is for {len(self.band)} rounds, not {rounds}; optimise another")


def check_dense(name: str, rounds: int) -> None:
    """Raise ValueError if an n × n matrix would be too large to keep."""
    if rounds > DENSE_LIMIT:
        raise ValueError(f"{name} keeps a dense matrix and is limited to {DENSE_LIMIT} rounds, got {rounds}")


@lru_cache(maxsize=2)
def _tree(rounds: int) -> tuple[Matrix, Matrix]:
    """(C, C⁻¹) of the tree mechanism."""
    check_dense("tree", rounds)
    gram = np.eye(rounds)
    size = 2
    while size <= rounds:
        for start in range(0, rounds - size + 1, size):
            gram[start : start + size, start : start + size] += 1
        size *= 2
    # CᵀC = gram with C lower-triangular: the Cholesky factor of the matrix read backwards.
    c = np.linalg.cholesky(gram[::-1, ::-1]).T[::-1, ::-1].copy()
    return c, _triangular_inverse(c)


@lru_cache(maxsize=2)
def _explicit_inverse(mechanism: Explicit) -> Matrix:
    n = len(mechanism.band)
    check_dense(mechanism.name, n)
    return _triangular_inverse(mechanism.columns(n, np.arange(n)))


def _triangular_inverse(c: Matrix) -> Matrix:
    return np.asarray(solve_triangular(c, np.eye(len(c)), lower=True))
