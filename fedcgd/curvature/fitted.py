"""Mechanisms whose numbers are best for a quadratic: λ, ν, coefficients and buffers, at equal privacy under (k, b).

The objective is log(final_loss · sens²), with the sensitivity that is valid for each kind of mechanism. With `normalized` it is
that of the mechanism's column-normalised form, which other numbers make best; the mechanism itself is what is returned.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from scipy.optimize import minimize_scalar

from fedcgd.mechanisms import BLT, BandedToeplitz, BandInvMF, LambdaCGD, Normalized, NuDPFTRL
from fedcgd.mechanisms.mechanism import Matrix, Toeplitz, Vector
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.optimisation import Progress
from fedcgd.optimisation.toeplitz import (
    PrivateError,
    least_band_inv_mf,
    least_banded_toeplitz,
    least_blt,
    log_sensitivity,
    log_sensitivity_by_lags,
)
from fedcgd.participation import Participation
from fedcgd.quadratic import Quadratic
from fedcgd.quadratic.factor import thin_factor
from fedcgd.quadratic.loss import final_loss

_GRID = 24
OneNumber = TypeVar("OneNumber", LambdaCGD, NuDPFTRL)


def lambda_cgd(
    participation: Participation, *, quadratic: Quadratic, normalized: bool = False, progress: Progress | None = None
) -> LambdaCGD:
    """The λ of least loss at equal privacy, by a search on the scale 1/(1 − λ); 0 (DP-SGD) if nothing is better.

    Args:
        participation: (n, k, b); its sampling does not count.
        quadratic: what is descended on, and how.
        normalized: whether the sensitivity is that of the column-normalised form.
        progress: is called with how far the search is: iterations, and the objective.
    """

    def error(one: LambdaCGD) -> float:
        return _log_error(one, participation, quadratic, normalized)

    longest = math.log(4.0 * participation.rounds + 4.0)
    found = _search(lambda x: LambdaCGD(-math.expm1(-x)), (0.0, longest), error, progress)
    return min(LambdaCGD(0.0), found, key=error)


def nu_dp_ftrl(
    participation: Participation, *, quadratic: Quadratic, normalized: bool = False, progress: Progress | None = None
) -> NuDPFTRL:
    """The ν of least loss at equal privacy, by a search on a logarithmic scale.

    Args:
        participation: (n, k, b); its sampling does not count.
        quadratic: what is descended on, and how.
        normalized: whether the sensitivity is that of the column-normalised form.
        progress: is called with how far the search is: iterations, and the objective.
    """

    def error(one: NuDPFTRL) -> float:
        return _log_error(one, participation, quadratic, normalized)

    ends = (math.log(1e-2 / participation.rounds), math.log(1 - 1e-6))
    return _search(lambda x: NuDPFTRL(math.exp(x)), ends, error, progress)


def band_inv_mf(
    bandwidth: int,
    participation: Participation,
    *,
    quadratic: Quadratic,
    normalized: bool = False,
    progress: Progress | None = None,
) -> BandInvMF:
    """The C⁻¹ with p Toeplitz coefficients of least loss at equal privacy.

    Args:
        bandwidth: p.
        participation: (n, k, b); its sampling does not count.
        quadratic: what is descended on, and how.
        normalized: whether the sensitivity is that of the column-normalised form.
        progress: is called with how far the search is: iterations, and the objective.
    """
    error = _private_error(log_sensitivity_by_lags, participation, quadratic, normalized)
    return least_band_inv_mf(bandwidth, participation, error, progress)


def banded_toeplitz(
    bandwidth: int,
    participation: Participation,
    *,
    quadratic: Quadratic,
    normalized: bool = False,
    progress: Progress | None = None,
) -> BandedToeplitz:
    """The non-increasing banded Toeplitz C of least loss at equal privacy.

    Args:
        bandwidth: p, the diagonals of C.
        participation: (n, k, b); its sampling does not count.
        quadratic: what is descended on, and how.
        normalized: whether the sensitivity is that of the column-normalised form.
        progress: is called with how far the search is: iterations, and the objective.
    """
    error = _private_error(log_sensitivity, participation, quadratic, normalized)
    return least_banded_toeplitz(bandwidth, participation, error, progress)


def blt(
    degree: int,
    participation: Participation,
    *,
    quadratic: Quadratic,
    normalized: bool = False,
    progress: Progress | None = None,
) -> BLT:
    """The BLT with `degree` buffers of least loss at equal privacy.

    Args:
        degree: d, the number of buffers.
        participation: (n, k, b); its sampling does not count.
        quadratic: what is descended on, and how.
        normalized: whether the sensitivity is that of the column-normalised form.
        progress: is called with how far the search is: iterations, and the objective.
    """
    error = _private_error(log_sensitivity, participation, quadratic, normalized)
    return least_blt(degree, participation, error, progress)


def _search(
    make: Callable[[float], OneNumber],
    ends: tuple[float, float],
    error: Callable[[OneNumber], float],
    progress: Progress | None,
) -> OneNumber:
    """The best on a grid, then by a bounded search between the neighbours of its best point."""

    def at(x: float) -> float:
        return error(make(x))

    grid = np.linspace(*ends, _GRID)
    least = int(np.argmin([at(float(x)) for x in grid]))
    if progress is not None:
        progress(_GRID, at(float(grid[least])))
    bounds = (float(grid[max(least - 1, 0)]), float(grid[min(least + 1, _GRID - 1)]))
    return make(float(minimize_scalar(at, bounds=bounds, method="bounded", options={"xatol": 1e-5}).x))


def _log_error(one: Toeplitz, participation: Participation, quadratic: Quadratic, normalized: bool) -> float:
    mechanism = Normalized(one) if normalized else one
    loss = final_loss(mechanism, participation.rounds, quadratic)
    return math.log(loss) + 2 * math.log(sensitivity(mechanism, participation).value)


def _private_error(
    log_sensitivity: Callable[[Vector, Participation], tuple[float, Vector]],
    participation: Participation,
    quadratic: Quadratic,
    normalized: bool,
) -> PrivateError:
    """log(‖C⁻ᵀL‖²·sens²): backwards in time a product of series, of C⁻¹ and of each column of L."""
    n = participation.rounds
    backwards = np.ascontiguousarray(thin_factor(quadratic, n)[::-1])
    spectra = np.fft.rfft(backwards, 2 * n, axis=0)

    def log_error(inverse: Vector, spectra: Any) -> tuple[float, Vector, Matrix]:
        """log ‖C⁻ᵀL‖², its derivative by C⁻¹ and that by each entry of L backwards, shape as `backwards`."""
        spectrum = np.fft.rfft(inverse, 2 * n)[:, None]
        products = np.fft.irfft(spectrum * spectra, 2 * n, axis=0)[:n]
        square = float(np.vdot(products, products))
        by_product = np.fft.rfft(products * (2 / square), 2 * n, axis=0)
        by_inverse = np.fft.irfft((by_product * spectra.conj()).sum(axis=1), 2 * n)[:n]
        return math.log(square), by_inverse, np.fft.irfft(by_product * spectrum.conj(), 2 * n, axis=0)[:n]

    def plain(c: Vector, inverse: Vector) -> tuple[float, Vector, Vector]:
        error, by_inverse, _ = log_error(inverse, spectra)
        squared, by_c = log_sensitivity(np.abs(c), participation)
        return error + squared, by_c * np.sign(c), by_inverse

    def with_unit_columns(signed: Vector, inverse: Vector) -> tuple[float, Vector, Vector]:
        """Of C·D⁻¹, whose inverse is D·C⁻¹. The columns are the leftmost: the sensitivity, or near it, as |c| cancels nothing."""
        c = np.pad(np.abs(signed), (0, n - len(signed)))
        norms = np.sqrt(np.cumsum(c**2))  # of the columns, the last first
        error, by_inverse, by_form = log_error(inverse, np.fft.rfft(backwards * norms[:, None], 2 * n, axis=0))
        by_norm = np.einsum("ij,ij->i", by_form, backwards)
        firsts = range(0, participation.participations * participation.min_separation, participation.min_separation)
        total = np.zeros(n)
        for first in firsts:
            total[first:] += c[: n - first] / norms[n - 1 - first]
        square = float(total @ total)
        by_total, by_c = 2 / square * total, np.zeros(n)
        for first in firsts:
            norm = norms[n - 1 - first]
            by_c[: n - first] += by_total[first:] / norm
            by_norm[n - 1 - first] -= by_total[first:] @ c[: n - first] / norm**2
        by_c += c * np.cumsum((by_norm / norms)[::-1])[::-1]  # a norm is made of all coefficients before it
        return error + math.log(square), by_c[: len(signed)] * np.sign(signed), by_inverse

    return with_unit_columns if normalized else plain
