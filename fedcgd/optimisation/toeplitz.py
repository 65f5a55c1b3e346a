"""Toeplitz mechanisms of least error: banded C, banded C⁻¹, and buffered linear Toeplitz (BLT).

The objective is log(‖A·C⁻¹‖² · sens²), with the Frobenius norm (RMSE) or the largest row (MaxSE). The sensitivity is a valid one:
exact where C is non-increasing (Theorem 1 of arXiv:2601.22334), else a bound on the products of columns by their lags.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedcgd.mechanisms import BLT, BandedToeplitz, BandInvMF
from fedcgd.mechanisms.toeplitz import root_coefficients
from fedcgd.mechanisms.workload import PREFIX_SUMS, Objective, Workload
from fedcgd.optimisation import Progress
from fedcgd.optimisation.lbfgs import minimise
from fedcgd.optimisation.scheduled import scheduled_error
from fedcgd.optimisation.series import quotient, sum_of_leftmost
from fedcgd.participation import Participation

PrivateError = Callable[[Tensor, Tensor], Tensor]
"""log(error²·sens²) of the coefficients of C, which are 0 behind the last, and those of C⁻¹, shape (rounds,); differentiable."""


def banded_toeplitz(
    bandwidth: int,
    participation: Participation,
    *,
    error: Objective = "rmse",
    workload: Workload = PREFIX_SUMS,
    progress: Progress | None = None,
) -> BandedToeplitz:
    """The banded Toeplitz C of least error, by L-BFGS from BSR's coefficients, in O(n·p) a step (arXiv:2405.15913, Section 3.2).

    c[l] = c[l−1]·sigmoid(θ_l), so that C is positive and non-increasing, and its sensitivity exact. Its column-normalised form,
    `Normalized`, is hardly ever worse for one participation.
    """
    log_error = _running_error(workload, error, participation.rounds)
    return least_banded_toeplitz(
        bandwidth, participation, lambda c, w: log_error(w) + log_sensitivity(c, participation), progress
    )


def least_banded_toeplitz(
    bandwidth: int, participation: Participation, private_error: PrivateError, progress: Progress | None = None
) -> BandedToeplitz:
    """As `banded_toeplitz`, for an error of any kind."""
    n, p = participation.rounds, _check(bandwidth, participation)
    impulse = torch.eye(1, n, dtype=torch.float64)[0]

    def coefficients(theta: Tensor) -> Tensor:
        return torch.cat([torch.ones(1, dtype=torch.float64), torch.cumprod(torch.sigmoid(theta), dim=0)])

    def objective(theta: Tensor) -> Tensor:
        c = coefficients(theta)
        return private_error(c, quotient(c, impulse))

    ratios = torch.arange(1, p, dtype=torch.float64)
    theta, _ = minimise(objective, torch.logit((ratios - 0.5) / ratios), progress=progress)
    return BandedToeplitz(tuple(coefficients(theta).tolist()))


def band_inv_mf(
    bandwidth: int,
    participation: Participation,
    *,
    error: Objective = "rmse",
    workload: Workload = PREFIX_SUMS,
    progress: Progress | None = None,
) -> BandInvMF:
    """The C⁻¹ with p Toeplitz coefficients of least error under a valid sensitivity, by L-BFGS from the best damped BISR.

    Were the leftmost columns taken for the sensitivity, as if C were monotone, the optimum would have negative Gram entries, and
    an error far larger than it seems.
    """
    log_error = _running_error(workload, error, participation.rounds)
    return least_band_inv_mf(
        bandwidth, participation, lambda c, w: log_error(w) + log_sensitivity_by_lags(c.abs(), participation), progress
    )


def least_band_inv_mf(
    bandwidth: int, participation: Participation, private_error: PrivateError, progress: Progress | None = None
) -> BandInvMF:
    """As `band_inv_mf`, for an error of any kind."""
    n, p = participation.rounds, _check(bandwidth, participation)
    impulse = torch.eye(1, n, dtype=torch.float64)[0]

    def inverse(free: Tensor) -> Tensor:
        return torch.cat([torch.ones(1, dtype=torch.float64), free])

    def objective(free: Tensor) -> Tensor:
        w = inverse(free)
        c = quotient(w, impulse)
        if not bool(c.detach().abs().max() < _DIVERGED):
            return _FAR + (free**2).sum()  # the line search left the stable region: 0, which is DP-SGD, lies inside
        return private_error(c, torch.nn.functional.pad(w, (0, n - p)))

    starts = [torch.from_numpy(root_coefficients(p, +1, 1 - damping)[1:].copy()) for damping in _DAMPINGS]
    start = min(starts, key=lambda free: float(objective(free)))
    free, _ = minimise(objective, start, progress=progress)
    return BandInvMF(tuple(inverse(free).tolist()))


_DIVERGED = 1e6
_FAR = 1e3  # above any log error
_DAMPINGS = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)


def blt(
    degree: int,
    participation: Participation,
    *,
    error: Objective = "rmse",
    workload: Workload = PREFIX_SUMS,
    progress: Progress | None = None,
) -> BLT:
    """The BLT with `degree` buffers of least error, by L-BFGS, one more buffer at a time.

    Each new buffer is tried with several decays: a start with all buffers at once ends where two of them have the same decay.
    Decays are sigmoids, and the scales are positive with a sum of at most 1, so that C is positive and non-increasing.
    """
    log_error = _running_error(workload, error, participation.rounds)
    return least_blt(degree, participation, lambda c, w: log_error(w) + log_sensitivity(c, participation), progress)


def least_blt(
    degree: int, participation: Participation, private_error: PrivateError, progress: Progress | None = None
) -> BLT:
    """As `blt`, for an error of any kind."""
    if degree < 1:
        raise ValueError(f"degree must be at least 1, got {degree}; 4 is usual")
    n = participation.rounds

    def objective(x: Tensor) -> Tensor:
        p, q = _polynomials(*_buffers(x))
        longer_p, longer_q = (torch.nn.functional.pad(series, (0, n))[:n] for series in (p, q))
        return private_error(quotient(q, longer_p), quotient(p, longer_q))

    x = torch.tensor([-1.0], dtype=torch.float64)
    for _ in range(degree):
        tries = [
            minimise(objective, _one_more(x, memory), iterations=60, tolerance=1e-6, progress=progress)
            for memory in _memories(n)
        ]
        x, _ = minimise(objective, min(tries, key=lambda found: found[1])[0], tolerance=1e-11, progress=progress)
    scales, decays = _buffers(x)
    return BLT(tuple(scales.tolist()), tuple(decays.tolist()))


_LONGEST = 1 - 2.0**-40  # a sigmoid can round to 1, and decays are below it


def _buffers(x: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, decays) of the free numbers: the logit of the sum of the scales, then log weights, then logits of decays."""
    degree = len(x) // 2
    decays = _LONGEST * torch.sigmoid(x[degree + 1 :])
    return torch.sigmoid(x[0]) * torch.softmax(x[1 : degree + 1], dim=0), decays


def _one_more(x: Tensor, memory: float) -> Tensor:
    """`x` with one more buffer, of a tenth of the weight of all others, that remembers about `memory` rounds."""
    weights, decays = x[1 : len(x) // 2 + 1], x[len(x) // 2 + 1 :]
    weight = torch.logsumexp(weights, dim=0) - math.log(10) if len(weights) else torch.zeros((), dtype=torch.float64)
    return torch.cat([x[:1], weights, weight[None], decays, torch.tensor([math.log(memory)], dtype=torch.float64)])


def _memories(rounds: int) -> list[float]:
    return [float(memory) for memory in np.geomspace(1.3, 2 * rounds, 6)]


def _polynomials(scales: Tensor, decays: Tensor) -> tuple[Tensor, Tensor]:
    """(P, Q) with Σ c_t x^t = P/Q, as `BLT.polynomials`, differentiable."""
    degree = len(scales)

    def product(skip: int | None) -> Tensor:
        result = torch.ones(1, dtype=torch.float64)
        for i in range(degree):
            if i != skip:
                padded = torch.nn.functional.pad(result, (0, 1))
                result = padded - decays[i] * torch.nn.functional.pad(result, (1, 0))
        return result

    q = product(None)
    lower = torch.stack([scales[i] * product(i) for i in range(degree)]).sum(dim=0)
    return q + torch.nn.functional.pad(lower, (1, 0)), q


def _running_error(workload: Workload, error: Objective, rounds: int) -> Callable[[Tensor], Tensor]:
    """The error in the model, in which noise is summed up as 1/((1 − x)(1 − βx)); with a schedule in O(n²) a step."""
    beta = workload.momentum
    if workload.learning_rates:
        momentum = torch.tensor([1.0, -beta], dtype=torch.float64)[: min(2, rounds)]
        rates = workload.rates(rounds)
        return lambda inverse: torch.log(scheduled_error(quotient(momentum, inverse), rates, error))
    steps = torch.tensor([1.0, -1.0 - beta, beta], dtype=torch.float64)[: min(3, rounds)]
    return lambda inverse: _log_error(quotient(steps, inverse), error)


def _log_error(noise: Tensor, error: Objective) -> Tensor:
    """log of the squared error norm of the Toeplitz B with these coefficients."""
    squares = noise**2
    if error == "max-se":
        return torch.log(squares.sum())
    n = len(noise)
    return torch.log(torch.dot(squares, torch.arange(n, 0, -1, dtype=torch.float64)) / n)


def log_sensitivity(c: Tensor, participation: Participation) -> Tensor:
    """log sens² of the non-increasing c ≥ 0."""
    n, k, b = participation.rounds, participation.participations, participation.min_separation
    return torch.log((sum_of_leftmost(c, n, k, b) ** 2).sum())


def log_sensitivity_by_lags(c: Tensor, participation: Participation) -> Tensor:
    """log of a bound on sens² for non-negative c, monotone or not; the sensitivity where the leftmost columns attain it.

    The a-th participation is in round a·b or later, and the r-th after it at least r·b later. A later column has fewer rows, so
    its product with another is at most that of column a·b with the same lag: ⟨C[:, i], C[:, i + l]⟩ ≤ g_a(l) for i ≥ a·b. Hence
    sens² ≤ Σ_a (g_a(0) + 2·Σ_r max_{l ≥ r·b} g_a(l)).
    """
    n, k, b = participation.rounds, participation.participations, participation.min_separation
    total = torch.zeros((), dtype=torch.float64)
    for a in range(k):
        cut = c[: n - a * b]
        spectrum = torch.fft.rfft(cut, 2 * len(cut))
        products = torch.fft.irfft(spectrum * spectrum.conj(), 2 * len(cut))[: len(cut)]
        largest_from = torch.cummax(products.flip(0), dim=0).values.flip(0)
        total = total + products[0] + 2 * largest_from[b : (k - a - 1) * b + 1 : b].sum()
    return torch.log(total)


def _check(bandwidth: int, participation: Participation) -> int:
    if not 1 <= bandwidth <= participation.rounds:
        raise ValueError(f"bandwidth must be in 1 … {participation.rounds} (rounds), got {bandwidth}")
    return bandwidth
