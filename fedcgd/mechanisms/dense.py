"""Mechanisms that are not Toeplitz: a diagonal, and matrices found by optimisation."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcgd.mechanisms.mechanism import Matrix, Mechanism, Vector, check_dense, triangular_inverse
from fedcgd.mechanisms.toeplitz import banded_next, solved

_BANDS_SOLVED = 256  # up to which a row of C⁻¹ is found alone; with more bands all rows are found at once and kept


@dataclass(frozen=True)
class Diagonal(Mechanism):
    """C = diag((n − j)^(1/4)), j from 0: the best diagonal for b = 1, k = n.

    Theorem 4 of Kalinin, McKenna, Pagh and Lampert, "DP-λCGD: Efficient Noise Correlation for Differentially Private Model
    Training", 2026, arXiv:2601.22334.

    >>> [float(Diagonal().inverse_row(t, 16)[0]) for t in (0, 15)]
    [0.5, 1.0]
    """

    name = "diagonal"

    def bandwidth(self, rounds: int) -> int:
        return 1

    def columns(self, rounds: int, indices: NDArray[np.intp]) -> Matrix:
        indices = np.asarray(indices)
        result = np.zeros((rounds, len(indices)))
        result[indices, np.arange(len(indices))] = (rounds - indices) ** 0.25
        return result

    def inverse_row(self, round: int, rounds: int) -> Vector:
        return np.array([(rounds - round) ** -0.25])


@dataclass(frozen=True, eq=False)
class Dense(Mechanism):
    """A C given by its p bands, only for the n rounds it was made for.

    Args:
        name: how it was found: `band-mf`, or `dense` where p = n.
        band: shape (n, p), `band[j, l]` = C[j + l, j]; copied. Entries with j + l ≥ n lie outside C and must be 0.

    Raises:
        ValueError: for a band that makes no invertible C; and, from every method, for another number of rounds than n.

    >>> import numpy as np
    >>> from fedcgd.mechanisms import matrix
    >>> matrix(Dense("band-mf", np.array([[1.0, 0.5], [2.0, 0.0]])), 2).tolist()
    [[1.0, 0.0], [0.5, 2.0]]
    """

    name: str
    band: Matrix = field(repr=False)

    def __post_init__(self) -> None:
        band = np.array(self.band, dtype=np.float64)
        if band.ndim != 2 or not 1 <= band.shape[1] <= band.shape[0]:
            raise ValueError(f"band must have shape (rounds, p) with 1 ≤ p ≤ rounds, got {band.shape}")
        if not np.all(np.isfinite(band)) or not np.all(band[:, 0] > 0):
            raise ValueError("band must be finite with a positive diagonal, band[:, 0] > 0")
        if np.any(np.triu(band[::-1], 1)):
            raise ValueError(
                "band[j, l] must be 0 for j + l ≥ rounds: it lies outside the matrix; the band of a lower-triangular matrix C is "
                "[np.pad(C[j:, j], (0, j)) for j in range(rounds)]"
            )
        band.setflags(write=False)
        object.__setattr__(self, "band", band)
        object.__setattr__(self, "_hash", hash((self.name, band.shape, band.tobytes())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dense) and self.name == other.name and np.array_equal(self.band, other.band)

    def __hash__(self) -> int:
        return int(self.__dict__["_hash"])

    def bandwidth(self, rounds: int) -> int:
        self._check(rounds)
        return int(self.band.shape[1])

    def columns(self, rounds: int, indices: NDArray[np.intp]) -> Matrix:
        self._check(rounds)
        result = np.zeros((rounds, len(indices)))
        for at, j in enumerate(np.asarray(indices)):
            column = self.band[j, : rounds - j]
            result[j : j + len(column), at] = column
        return result

    def inverse_row(self, round: int, rounds: int) -> Vector:
        self._check(rounds)
        p = min(self.band.shape[1], round + 1)
        if p > _BANDS_SOLVED:
            return _inverse(self)[round, round::-1]
        # Row t solves x·C = e_t, in the first t + 1 rows and columns: a system with p bands above the diagonal.
        unit = np.eye(1, round + 1, round)[0]
        return solved(self.band[: round + 1, :p], unit, transposed=True)[::-1]

    def num_buffers(self, rounds: int) -> int:
        """The last p − 1 rounds of C⁻¹Z."""
        return self.bandwidth(rounds) - 1

    def inverse_bandwidth(self, rounds: int) -> int:
        return rounds

    def multiply_next(self, round: int, rounds: int, z: Any, buffers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        self._check(rounds)
        lags = np.arange(min(round + 1, self.band.shape[1]))
        return banded_next(self.band[round - lags, lags], z, buffers, self.band.shape[1] - 1)

    def _check(self, rounds: int) -> None:
        if rounds != len(self.band):
            raise ValueError(f"this {self.name} matrix is for {len(self.band)} rounds, not {rounds}; optimise another")


@lru_cache(maxsize=2)
def _inverse(mechanism: Dense) -> Matrix:
    n = len(mechanism.band)
    check_dense(mechanism.name, n)
    return triangular_inverse(mechanism.columns(n, np.arange(n)))
