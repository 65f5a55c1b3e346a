"""What a mechanism is: a lower-triangular matrix C, and how a row of C⁻¹ combines noise vectors.

The server releases x̂_t = x_t + ζσ·(C⁻¹Z)_t, which is a post-processing of CX + ζσZ (arXiv:2601.22334, Section 2). Rounds are
counted from 0 here, so that round t is row t of C.

To add a mechanism, write its class in a file of this folder (`lambda_cgd.py` is the shortest) and its row in the table of
`fedcgd.optimisation.table`, which everything else reads.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

DENSE_LIMIT = 8192  # rounds up to which an n × n matrix may be kept (0.5 GiB)


class Mechanism(ABC):
    """A lower-triangular C with a positive diagonal, for any number of rounds n (which C may depend on). An immutable value."""

    name: str
    """The command line's name of this mechanism, for example `lambda-cgd`."""

    @abstractmethod
    def columns(self, rounds: int, indices: NDArray[np.intp]) -> Matrix:
        """C[:, indices] for n = `rounds`.

        Args:
            rounds: n, the releases of the run.
            indices: numbers of columns, from 0, shape (m,).

        Returns:
            Shape (rounds, m), float64; zeros above the diagonal.
        """

    @abstractmethod
    def inverse_row(self, round: int, rounds: int) -> Vector:
        """The last entries of row t = `round` of C⁻¹, newest first: (C⁻¹Z)_t = Σ_i w[i]·Z_{t−i}.

        Args:
            round: t, from 0.
            rounds: n, the releases of the run.

        Returns:
            w, float64, at most t + 1 long: w[0] is the diagonal entry, and entries older than the last of w are zero.
        """

    def bandwidth(self, rounds: int) -> int:
        """How many diagonals of C may differ from zero: `rounds` unless the mechanism knows of fewer.

        Args:
            rounds: n, the releases of the run.
        """
        return rounds

    # The rest has an answer for every mechanism whose C⁻¹ has few bands; one with long inverse rows overrides all three.

    def num_buffers(self, rounds: int) -> int:
        """How many vectors `multiply_next` keeps between rounds, at most; a replay from the key keeps none.

        Args:
            rounds: n, the releases of the run.
        """
        return self.inverse_bandwidth(rounds) - 1

    def inverse_bandwidth(self, rounds: int) -> int:
        """How many vectors Z are made in the last round if nothing is kept: the bands of C⁻¹.

        Args:
            rounds: n, the releases of the run.
        """
        return len(self.inverse_row(rounds - 1, rounds))

    def multiply_next(self, round: int, rounds: int, z: Any, buffers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """(C⁻¹Z)_t from Z_t and what the round before kept. Nothing is changed in place.

        Args:
            round: t, from 0.
            rounds: n, the releases of the run.
            z: Z_t, an array or a tensor of any shape.
            buffers: what the round before returned in second place; () for the first round.

        Returns:
            (C⁻¹Z)_t, and what the next round needs: at most `num_buffers` arrays of the shape of `z`.
        """
        weights = self.inverse_row(round, rounds)
        y = z * float(weights[0])
        for weight, earlier in zip(weights[1:], buffers, strict=False):
            y = y + earlier * float(weight)
        return y, (z, *buffers)[: self.num_buffers(rounds)]


def matrix(mechanism: Mechanism, rounds: int) -> Matrix:
    """C, dense. For small n: takes 8·n² bytes.

    Args:
        mechanism: the matrix C.
        rounds: n, the releases of the run.

    Returns:
        Shape (rounds, rounds), float64.

    >>> from fedcgd.mechanisms import LambdaCGD
    >>> matrix(LambdaCGD(0.5), 3).tolist()
    [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]]
    """
    return mechanism.columns(rounds, np.arange(rounds))


def inverse_matrix(mechanism: Mechanism, rounds: int) -> Matrix:
    """C⁻¹, dense, from `inverse_row`. For small n: takes 8·n² bytes.

    Args:
        mechanism: the matrix C.
        rounds: n, the releases of the run.

    Returns:
        Shape (rounds, rounds), float64.

    >>> from fedcgd.mechanisms import LambdaCGD
    >>> inverse_matrix(LambdaCGD(0.5), 3).tolist()
    [[1.0, 0.0, 0.0], [-0.5, 1.0, 0.0], [0.0, -0.5, 1.0]]
    """
    inverse = np.zeros((rounds, rounds))
    for t in range(rounds):
        weights = mechanism.inverse_row(t, rounds)
        inverse[t, t + 1 - len(weights) : t + 1] = weights[::-1]
    return inverse


def check_dense(name: str, rounds: int) -> None:
    """Raise ValueError if an n × n matrix would be too large to keep."""
    if rounds > DENSE_LIMIT:
        raise ValueError(
            f"{name} keeps a dense matrix and is limited to {DENSE_LIMIT} rounds, got {rounds}; take one that is constant along "
            "diagonals, such as banded-toeplitz"
        )


def triangular_inverse(c: Matrix) -> Matrix:
    """The inverse of a lower-triangular matrix."""
    result: Matrix = np.asarray(scipy.linalg.solve_triangular(c, np.eye(len(c)), lower=True, check_finite=False))
    return result
