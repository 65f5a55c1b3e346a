"""What a mechanism is: a lower-triangular matrix C, and how a row of C⁻¹ combines noise vectors.

The server releases x̂_t = x_t + ζσ·(C⁻¹Z)_t, which is a post-processing of CX + ζσZ (arXiv:2601.22334, Section 2). Rounds are
counted from 0 here, so that round t is row t of C.

To add a mechanism, write its class in a file of this folder (`lambda_cgd.py` is the shortest) and its row in the table of
`fedcgd.optimisation.catalogue`, which everything else reads.
"""

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

DENSE_LIMIT = 8192  # rounds up to which an n × n matrix may be kept (0.5 GiB)


@runtime_checkable
class Mechanism(Protocol):
    """A lower-triangular C with a positive diagonal, for any number of rounds n (which C may depend on). An immutable value."""

    def __hash__(self) -> int:
        return object.__hash__(self)

    @property
    def name(self) -> str:
        """The command line's name of this mechanism, for example `lambda-cgd`."""
        ...

    def columns(self, rounds: int, indices: NDArray[np.intp]) -> Matrix:
        """C[:, indices] for n = `rounds`, shape (rounds, len(indices))."""
        ...

    def inverse_row(self, round: int, rounds: int) -> Vector:
        """The last entries of row `round` of C⁻¹, newest first: (C⁻¹Z)_t = Σ_i w[i]·Z_{t−i}.

        w[0] is the diagonal entry; entries older than the last of w are zero. At most `round` + 1 long.
        """
        ...

    # The rest has an answer for every mechanism whose C⁻¹ has few bands; one with long inverse rows overrides all three.

    def num_buffers(self, rounds: int) -> int:
        """How many vectors `multiply_next` keeps between rounds, at most; a replay from the key keeps none."""
        return self.inverse_bandwidth(rounds) - 1

    def inverse_bandwidth(self, rounds: int) -> int:
        """How many vectors Z are made in the last round if nothing is kept: the bands of C⁻¹."""
        return len(self.inverse_row(rounds - 1, rounds))

    def multiply_next(self, round: int, rounds: int, z: Any, buffers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """(C⁻¹Z)_t from Z_t = `z` and what the round before returned in second place (() for the first), and what to keep now.

        `z` is an array or a tensor; nothing is changed in place.
        """
        weights = self.inverse_row(round, rounds)
        y = z * float(weights[0])
        for weight, earlier in zip(weights[1:], buffers, strict=False):
            y = y + earlier * float(weight)
        return y, (z, *buffers)[: self.num_buffers(rounds)]

    def inverse_diagonal(self, lag: int, rounds: int) -> Vector:
        """C⁻¹[t, t − lag] for every round t, shape (rounds,); anything for t < lag."""
        rows = (self.inverse_row(t, rounds) for t in range(rounds))
        return np.array([row[lag] if lag < len(row) else 0.0 for row in rows])


@runtime_checkable
class Banded(Mechanism, Protocol):
    """A mechanism that knows that C[i, j] = 0 for i − j at least its bandwidth."""

    def bandwidth(self, rounds: int) -> int:
        """The number p of diagonals of C that are not zero, at most `rounds`."""
        ...


@runtime_checkable
class Toeplitz(Mechanism, Protocol):
    """A mechanism with C[i, j] = c[i − j], and so C⁻¹[i, j] = c⁻¹[i − j]."""

    def coefficients(self, rounds: int) -> Vector:
        """The first column of C, shape (rounds,), float64."""
        ...

    def inverse_coefficients(self, rounds: int) -> Vector:
        """The first column of C⁻¹ up to its last non-zero entry, at most (rounds,), float64."""
        ...


def bandwidth(mechanism: Mechanism, rounds: int) -> int:
    """How many diagonals of C may differ from zero: `rounds` unless the mechanism says less."""
    if isinstance(mechanism, Banded):
        return min(mechanism.bandwidth(rounds), rounds)
    if isinstance(mechanism, Toeplitz):
        used = np.flatnonzero(mechanism.coefficients(rounds))
        return int(used[-1]) + 1
    return rounds


def matrix(mechanism: Mechanism, rounds: int) -> Matrix:
    """C, dense, shape (rounds, rounds). For small n: takes 8·n² bytes."""
    return mechanism.columns(rounds, np.arange(rounds))


def inverse_matrix(mechanism: Mechanism, rounds: int) -> Matrix:
    """C⁻¹, dense, from `inverse_row`, shape (rounds, rounds). For small n."""
    inverse = np.zeros((rounds, rounds))
    for t in range(rounds):
        weights = mechanism.inverse_row(t, rounds)
        inverse[t, t + 1 - len(weights) : t + 1] = weights[::-1]
    return inverse


def check_dense(name: str, rounds: int) -> None:
    """Raise ValueError if an n × n matrix would be too large to keep."""
    if rounds > DENSE_LIMIT:
        raise ValueError(f"{name} keeps a dense matrix and is limited to {DENSE_LIMIT} rounds, got {rounds}")


def triangular_inverse(c: Matrix) -> Matrix:
    """The inverse of a lower-triangular matrix."""
    result: Matrix = np.asarray(solve_triangular(c, np.eye(len(c)), lower=True, check_finite=False))
    return result
