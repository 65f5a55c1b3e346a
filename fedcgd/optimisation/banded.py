"""Banded matrices with unit columns and all entries free: BandMF, and with all diagonals the dense optimum.

The error without a dense matrix is Algorithm 2 of McKenna, "Scaling up the Banded Matrix Factorization Mechanism for
Differentially Private ML", 2024, arXiv:2405.15913.
"""

import math
from collections.abc import Callable

import numpy as np
import scipy

from fedcgd.mechanisms import Dense
from fedcgd.mechanisms.dense import transposed_bands
from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.mechanisms.toeplitz import power_coefficients
from fedcgd.mechanisms.workload import PREFIX_SUMS, Objective, Workload
from fedcgd.optimisation import Progress
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
    progress: Progress | None = None,
) -> Dense:
    """The p-banded C with unit columns of least RMSE for participations at least p apart, by L-BFGS from BSR's columns.

    With p ≤ b the columns of different participations do not overlap, so that the sensitivity is √k, whatever C is. Raises
    ValueError for a larger bandwidth, and for another error than RMSE.
    """
    _check_error("band-mf", error)
    check_bandwidth("band-mf", bandwidth, participation)
    return _optimise("band-mf", bandwidth, participation.rounds, workload, progress)


def dense(
    participation: Participation,
    *,
    error: Objective = "rmse",
    workload: Workload = PREFIX_SUMS,
    progress: Progress | None = None,
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
    return _optimise("dense", bands, n, workload, progress)


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


def _optimise(name: str, p: int, n: int, workload: Workload, progress: Progress | None) -> Dense:
    band, start = unit_columns(name, n, p)

    def objective(x: Vector) -> tuple[float, Vector]:
        entries, back = band(x)
        value, gradient = error_and_gradient(entries, workload)
        return math.log(value), back(gradient / value)

    x, _ = minimise(objective, start, tolerance=1e-10, progress=progress)
    return Dense(name, band(x)[0])


def error_and_gradient(band: Matrix, workload: Workload = PREFIX_SUMS) -> tuple[float, Matrix]:
    """‖A·C⁻¹‖²_F/n and its derivative by each band[j, l], both shape as `band`.

    Column by column: X = C⁻¹E, Y = AX, U = C⁻ᵀAᵀY; then d‖Y‖²/dC = −2·U·Xᵀ, of which only the band is needed.
    """
    n, p = band.shape
    lower = np.ascontiguousarray(band.T)  # row l: the l-th diagonal, as LAPACK wants it
    upper = transposed_bands(band)
    total, gradient = 0.0, np.zeros_like(band)
    rates = workload.rates(n)[:, None]
    step = max(1, min(n, EFFORT.chunk // n))
    for start in range(0, n, step):
        stop = min(n, start + step)
        # Columns from `start` on vanish above row `start`.
        rows = n - start
        unit = np.zeros((rows, stop - start))
        unit[np.arange(stop - start), np.arange(stop - start)] = 1
        x = scipy.linalg.solve_banded((p - 1, 0), lower[:, start:], unit, overwrite_b=True, check_finite=False)
        y = np.cumsum(rates[start:] * _momentum(x, workload.momentum), axis=0)
        total += float(np.vdot(y, y))
        back = _momentum((rates[start:] * np.cumsum(y[::-1], axis=0)[::-1])[::-1], workload.momentum)[::-1]
        u = scipy.linalg.solve_banded((0, p - 1), upper[:, start:], back, check_finite=False)
        for lag in range(min(p, rows)):
            gradient[start : n - lag, lag] -= 2 * np.einsum("ij,ij->i", u[lag:], x[: rows - lag])
    return total / n, gradient / n


def _momentum(x: Matrix, momentum: float) -> Matrix:
    """M·x with M[i, j] = momentum^(i − j)."""
    if momentum == 0:
        return x
    result = np.array(x)
    for row in range(1, len(result)):
        result[row] += momentum * result[row - 1]
    return result
