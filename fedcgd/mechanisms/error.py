"""How far the noise moves the model: norms of B = A·C⁻¹, whose rows give the noise in each intermediate model."""

import math
from dataclasses import dataclass

import numpy as np

from fedcgd.mechanisms.mechanism import Mechanism, Vector
from fedcgd.mechanisms.normalized import Normalized
from fedcgd.mechanisms.streaming import inverse_rows
from fedcgd.mechanisms.toeplitz import Toeplitz, divided, padded
from fedcgd.mechanisms.workload import PREFIX_SUMS, Workload


@dataclass(frozen=True)
class ErrorNorms:
    """The norms of B = A·C⁻¹, for clip norm 1 and σ = 1. Multiply by σ, of which the sensitivity is a factor.

    Attributes:
        rounds: n.
        frobenius: ‖B‖_F.
        max_row: the largest norm of a row of B.
    """

    rounds: int
    frobenius: float
    max_row: float

    def rmse(self, noise_multiplier: float) -> float:
        """‖B‖_F/√n·σ: the root mean squared error of a model coordinate over all rounds (eq. 6 of arXiv:2601.22334).

        Args:
            noise_multiplier: σ, noise per unit of clip norm.

        Returns:
            In units of the clip norm.
        """
        return self.frobenius / math.sqrt(self.rounds) * noise_multiplier

    def max_se(self, noise_multiplier: float) -> float:
        """max_t ‖B[t]‖·σ: the error of a model coordinate in the worst round (eq. 6 of arXiv:2601.22334).

        Args:
            noise_multiplier: σ, noise per unit of clip norm.

        Returns:
            In units of the clip norm.
        """
        return self.max_row * noise_multiplier


def error_norms(mechanism: Mechanism, rounds: int, workload: Workload = PREFIX_SUMS) -> ErrorNorms:
    """How far the noise moves the model: the norms of A·C⁻¹.

    O(n) for a Toeplitz C with a constant learning rate; O(n·p) for one with a schedule where p coefficients of C⁻¹ count (with
    momentum β 30/(1 − β) more), and for its normalisation without momentum; else O(n²·p) time with p vectors of length n in
    memory, where p is what the mechanism keeps.

    Args:
        mechanism: the matrix C.
        rounds: n, the releases of the run.
        workload: A, what turns releases into models; by default plain SGD's prefix sums.

    Returns:
        The norms; their `rmse` and `max_se` are the errors at a noise multiplier.

    >>> from fedcgd.mechanisms import DPSGD
    >>> error_norms(DPSGD(), 100).max_row
    10.0
    """
    rates = workload.rates(rounds)
    if isinstance(mechanism, Normalized) and not workload.momentum:  # C̃⁻¹ = D·C⁻¹, as if the rates were those of D too
        rates, mechanism = rates * mechanism.column_norms(rounds), mechanism.mechanism
    if not isinstance(mechanism, Toeplitz):
        return _by_rows(mechanism, rounds, workload)
    series = divided(np.array([1.0, -workload.momentum]), padded(mechanism.inverse_coefficients(rounds), rounds))
    if np.any(rates != 1):
        return _with_rates(series, rates)
    squares = np.cumsum(series) ** 2  # B is Toeplitz too
    frobenius = math.sqrt(float(np.dot(squares, np.arange(rounds, 0, -1))))
    return ErrorNorms(rounds, frobenius, math.sqrt(float(squares.sum())))


_NEGLIGIBLE = 1e-14  # of the largest coefficient: a sum of all of them is right to 12 digits


def _with_rates(series: Vector, rates: Vector) -> ErrorNorms:
    """For the Toeplitz M·C⁻¹ of the `series`, of which p coefficients count: B[j + l, j] = Σ_{i≤l} rates[j + i]·series[i].

    It does not change any more from l = p − 1 on.
    """
    n, p = len(rates), int(np.flatnonzero(np.abs(series) > _NEGLIGIBLE * np.abs(series).max())[-1]) + 1
    entries, row_squares = np.zeros(n), np.zeros(n)
    for lag in range(p):
        entries[: n - lag] += rates[lag:] * series[lag]
        if lag < p - 1:
            row_squares[lag:] += entries[: n - lag] ** 2
    row_squares[p - 1 :] += np.cumsum(entries[: n - p + 1] ** 2)
    return ErrorNorms(n, math.sqrt(float(row_squares.sum())), math.sqrt(float(row_squares.max())))


def _by_rows(mechanism: Mechanism, rounds: int, workload: Workload) -> ErrorNorms:
    """Run SGD's own recursion on rows of C⁻¹: the velocity, then the position, which is a row of B."""
    rates = workload.rates(rounds)
    velocity, position = np.zeros(rounds), np.zeros(rounds)
    total, largest = 0.0, 0.0
    for t, (first, row) in enumerate(inverse_rows(mechanism, rounds)):
        velocity *= workload.momentum
        velocity[first : t + 1] += row
        position += rates[t] * velocity
        square = float(np.dot(position[: t + 1], position[: t + 1]))
        total += square
        largest = max(largest, square)
    return ErrorNorms(rounds, math.sqrt(total), math.sqrt(largest))
