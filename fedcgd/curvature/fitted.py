"""Mechanisms whose numbers are best for a quadratic: λ, ν, coefficients and buffers, at equal privacy under (k, b).

The objective is log(final_loss · sens²), with the sensitivity that is valid for each kind of mechanism.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from fedcgd.curvature.factor import thin_factor
from fedcgd.curvature.loss import final_loss
from fedcgd.curvature.quadratic import Quadratic
from fedcgd.mechanisms import BLT, BandedToeplitz, BandInvMF, LambdaCGD, Mechanism, NuDPFTRL
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.optimisation import Progress
from fedcgd.optimisation.toeplitz import LogError, least_band_inv_mf, least_banded_toeplitz, least_blt
from fedcgd.participation import Participation

_GRID = 24
OneNumber = TypeVar("OneNumber", LambdaCGD, NuDPFTRL)


def lambda_cgd(participation: Participation, *, quadratic: Quadratic, progress: Progress | None = None) -> LambdaCGD:
    """The λ of least loss at equal privacy, by a search on the scale 1/(1 − λ); 0 (DP-SGD) if nothing is better."""
    longest = math.log(4.0 * participation.rounds + 4.0)
    plain = LambdaCGD(0.0)
    found = _search(lambda x: LambdaCGD(-math.expm1(-x)), (0.0, longest), participation, quadratic, progress)
    return min(plain, found, key=lambda one: _log_error(one, participation, quadratic))


def nu_dp_ftrl(participation: Participation, *, quadratic: Quadratic, progress: Progress | None = None) -> NuDPFTRL:
    """The ν of least loss at equal privacy, by a search on a logarithmic scale."""
    ends = (math.log(1e-2 / participation.rounds), math.log(1 - 1e-6))
    return _search(lambda x: NuDPFTRL(math.exp(x)), ends, participation, quadratic, progress)


def band_inv_mf(
    bandwidth: int, participation: Participation, *, quadratic: Quadratic, progress: Progress | None = None
) -> BandInvMF:
    """The C⁻¹ with p Toeplitz coefficients of least loss at equal privacy."""
    return least_band_inv_mf(bandwidth, participation, _series_error(quadratic, participation.rounds), progress)


def banded_toeplitz(
    bandwidth: int, participation: Participation, *, quadratic: Quadratic, progress: Progress | None = None
) -> BandedToeplitz:
    """The non-increasing banded Toeplitz C of least loss at equal privacy."""
    return least_banded_toeplitz(bandwidth, participation, _series_error(quadratic, participation.rounds), progress)


def blt(degree: int, participation: Participation, *, quadratic: Quadratic, progress: Progress | None = None) -> BLT:
    """The BLT with `degree` buffers of least loss at equal privacy."""
    return least_blt(degree, participation, _series_error(quadratic, participation.rounds), progress)


def _search(
    make: Callable[[float], OneNumber],
    ends: tuple[float, float],
    participation: Participation,
    quadratic: Quadratic,
    progress: Progress | None,
) -> OneNumber:
    """The best on a grid, then by a bounded search between the neighbours of its best point."""

    def error(x: float) -> float:
        return _log_error(make(x), participation, quadratic)

    grid = np.linspace(*ends, _GRID)
    least = int(np.argmin([error(float(x)) for x in grid]))
    if progress is not None:
        progress(_GRID, error(float(grid[least])))
    bounds = (float(grid[max(least - 1, 0)]), float(grid[min(least + 1, _GRID - 1)]))
    return make(float(minimize_scalar(error, bounds=bounds, method="bounded", options={"xatol": 1e-5}).x))


def _log_error(mechanism: Mechanism, participation: Participation, quadratic: Quadratic) -> float:
    loss = final_loss(mechanism, participation.rounds, quadratic)
    return math.log(loss) + 2 * math.log(sensitivity(mechanism, participation).value)


def _series_error(quadratic: Quadratic, rounds: int) -> LogError:
    """log ‖C⁻ᵀL‖²: backwards in time a product of series, of C⁻¹ and of each column of L."""
    backwards = torch.from_numpy(thin_factor(quadratic, rounds)[::-1].copy())
    spectra = torch.fft.rfft(backwards, 2 * rounds, dim=0)

    def log_error(inverse: Tensor) -> Tensor:
        products = torch.fft.irfft(torch.fft.rfft(inverse, 2 * rounds)[:, None] * spectra, 2 * rounds, dim=0)
        return torch.log((products[:rounds] ** 2).sum())

    return log_error
