"""Banded matrices with unit columns and all entries free: BandMF, and with all diagonals the dense optimum.

The error without a dense matrix is Algorithm 2 of McKenna, "Scaling up the Banded Matrix Factorization Mechanism for
Differentially Private ML", 2024, arXiv:2405.15913.
"""

import math
from collections.abc import Callable

import numpy as np

from fedcgd.mechanisms import Dense
from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.mechanisms.toeplitz import divided, power_coefficients, solved
from fedcgd.mechanisms.workload import PREFIX_SUMS, Objective, Workload
from fedcgd.optimisation.effort import EFFORT
from fedcgd.optimisation.lbfgs import minimise
from fedcgd.participation import Participation

Back = Callable[[Matrix], Vector]


def band_mf(
    bandwidth: int,
    participation: Participation,
    *,
    error: Objective = "rmse",
    workload: Workload = PREFIX_SUMS,
) -> Dense:
    """The p-banded C with unit columns of least RMSE for participations at least p apart, by L-BFGS from BSR's columns.

    With p ≤ b the columns of different participations do not overlap, so that the sensitivity is √k, whatever C is. Raises
    ValueError for a larger bandwidth, and for another error than RMSE.
    """
    _check_error("band-mf", error)
    check_bandwidth("band-mf", bandwidth, participation)
    return _optimise("band-mf", bandwidth, participation.rounds, workload)


def dense(
    participation: Participation,
    *,
    error: Objective = "rmse",
    workload: Workload = PREFIX_SUMS,
) -> Dense:
    """The lower-triangular C with unit columns of least RMSE (Denisov et al., 2022): all diagonals for one participation.

    For several participations the diagonals beyond b stay zero, so that the sensitivity √k stays exact. Raises ValueError for
    more than 2048 rounds, and for another error than RMSE.
    """
    _check_error("dense", error)
    n = participation.rounds
    if n > 2048:
        raise ValueError(f"dense is limited to 2048 rounds, got {n}; band-mf and banded-toeplitz go further")
    bands = n if participation.participations == 1 else participation.min_separation
    return _optimise("dense", bands, n, workload)


def _check_error(name: str, error: Objective) -> None:
    if error != "rmse":
        raise ValueError(f"{name} is optimised for rmse only, not for {error}; banded-toeplitz and blt know both")


def check_bandwidth(name: str, bandwidth: int, participation: Participation) -> None:
    """Raise ValueError where columns of `bandwidth` entries of two participations would overlap."""
    most = participation.rounds if participation.participations == 1 else participation.min_separation
    if not 1 <= bandwidth <= most:
        raise ValueError(
            f"p of {name} must be between 1 and {most}, the rounds between two participations of a user, got {bandwidth}: "
            f"write {name}:{most}, or banded-toeplitz:{bandwidth}, whose columns may overlap"
        )


def unit_columns(name: str, rounds: int, bandwidth: int) -> tuple[Callable[[Vector], tuple[Matrix, Back]], Vector]:
    """(free numbers ↦ the band of a C with unit columns, shape (rounds, bandwidth), and `back`; the free numbers of BSR's).

    Free are the columns before they are divided by their norms, the diagonal by its log. `back` takes the derivative by the band
    to that by the free numbers. Raises ValueError for more than can be optimised.
    """
    n, p = rounds, bandwidth
    if n * p > EFFORT.entries:
        raise ValueError(f"{name} with {n} rounds and {p} bands has too many entries to optimise; use banded-toeplitz")
    inside = np.add.outer(np.arange(n), np.arange(p)) < n

    def band(x: Vector) -> tuple[Matrix, Back]:
        entries = np.where(inside, x.reshape(n, p), 0.0)
        entries[:, 0] = np.exp(entries[:, 0])
        norms = np.linalg.norm(entries, axis=1, keepdims=True)
        unit = entries / norms

        def back(gradient: Matrix) -> Vector:
            by_entry = (gradient - unit * np.einsum("ij,ij->i", gradient, unit)[:, None]) / norms
            by_entry[:, 0] *= entries[:, 0]
            return np.where(inside, by_entry, 0.0).reshape(-1)

        return unit, back

    return band, np.tile(np.concatenate([[0.0], power_coefficients(p, -0.5)[1:]]), (n, 1)).reshape(-1)


def _optimise(name: str, p: int, n: int, workload: Workload) -> Dense:
    band, start = unit_columns(name, n, p)

    def objective(x: Vector) -> tuple[float, Vector]:
        entries, back = band(x)
        value, gradient = error_and_gradient(entries, workload)
        return math.log(value), back(gradient / value)

    x, _ = minimise(objective, start, tolerance=1e-10)
    return Dense(name, band(x)[0])


def error_and_gradient(band: Matrix, workload: Workload = PREFIX_SUMS) -> tuple[float, Matrix]:
    """‖A·C⁻¹‖²_F/n and its derivative by each band[j, l], shape as `band`; a few rows of A at a time."""
    n, rates = len(band), workload.rates(len(band))[:, None]
    total, gradient = 0.0, np.zeros_like(band)
    step = max(1, min(n, EFFORT.chunk // n))
    for start in range(0, n, step):
        stop = min(n, start + step)  # these rows of A vanish from column `stop` on
        rows = rates[:stop] * (np.arange(stop)[:, None] <= np.arange(start, stop))
        rows = divided(np.array([1.0, -workload.momentum]), rows[::-1])[::-1]
        square, by_band = square_and_gradient(band[:stop], rows)
        total += square
        gradient[:stop] += by_band
    return total / n, gradient / n


def square_and_gradient(band: Matrix, form: Matrix) -> tuple[float, Matrix]:
    """‖C⁻ᵀL‖² and its derivative by the band of C.

    With X = C⁻ᵀL and U = C⁻¹X the derivative of ‖X‖² by C[i, j] is −2·⟨X[i], U[j]⟩.

    Args:
        band: C[j + l, j] at [j, l], shape (n, p).
        form: L, shape (n, r).

    Returns:
        The number, and the derivative, shape (n, p).
    """
    n, p = band.shape
    x = solved(band, form, transposed=True)
    u = solved(band, x)
    gradient = np.zeros((n, p))
    for lag in range(min(n, p)):
        gradient[: n - lag, lag] = -2 * np.einsum("ij,ij->i", x[lag:], u[: n - lag])
    return float(np.vdot(x, x)), gradient
