"""What an optimised Toeplitz mechanism is best at: log(error² · sens²), or log(loss · sens²) on a quadratic, and its derivatives.

The error is the Frobenius norm of A·C⁻¹ (RMSE) or its largest row (MaxSE). The sensitivity is a valid one: exact where C is
non-increasing (Theorem 1 of arXiv:2601.22334), else a bound on the products of columns by their lags.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.mechanisms.sensitivity import sum_of_leftmost
from fedcgd.mechanisms.workload import Objective, Workload
from fedcgd.optimisation.scheduled import scheduled_error
from fedcgd.optimisation.series import quotient
from fedcgd.participation import Participation
from fedcgd.quadratic import Quadratic
from fedcgd.quadratic.factor import thin_factor

PrivateError = Callable[[Vector, Vector], tuple[float, Vector, Vector]]
"""(coefficients of C, 0 behind the last; those of C⁻¹, shape (rounds,)) ↦ log(error²·sens²), its derivatives by both."""

LogSensitivity = Callable[[Vector, Participation], tuple[float, Vector]]
"""|c| ↦ log sens², and its derivative by |c|."""


def private_error(
    log_sensitivity: LogSensitivity,
    participation: Participation,
    error: Objective,
    workload: Workload,
    quadratic: Quadratic | None,
    normalized: bool,
) -> PrivateError:
    """What is minimised: the running error, or where there is a `quadratic` its loss."""
    if quadratic is None:
        return _running_error(log_sensitivity, participation, error, workload)
    return _final_loss(log_sensitivity, participation, quadratic, normalized)


def _running_error(
    log_sensitivity: LogSensitivity, participation: Participation, error: Objective, workload: Workload
) -> PrivateError:
    """log error² of C⁻¹ + log sens² of |C|, of the error in the model.

    Noise is summed up as 1/((1 − x)(1 − βx)); with a schedule in O(n²) a step.
    """
    beta, rates = workload.momentum, workload.rates(participation.rounds)
    constant = not workload.learning_rates
    divisor = np.array([1.0, -1.0 - beta, beta]) if constant else np.array([1.0, -beta])

    def log_error(c: Vector, inverse: Vector) -> tuple[float, Vector, Vector]:
        noise, back = quotient(divisor, inverse)
        square, by_noise = _squared_error(noise, error) if constant else scheduled_error(noise, rates, error)
        squared, by_c = log_sensitivity(np.abs(c), participation)
        return math.log(square) + squared, by_c * np.sign(c), back(by_noise / square)[1]

    return log_error


def _squared_error(noise: Vector, error: Objective) -> tuple[float, Vector]:
    """The squared error norm of the Toeplitz B with these coefficients, and its derivative."""
    n = len(noise)
    weights = np.ones(n) if error == "max-se" else np.arange(n, 0, -1) / n
    return float(weights @ noise**2), 2 * weights * noise


def _final_loss(
    log_sensitivity: LogSensitivity, participation: Participation, quadratic: Quadratic, normalized: bool
) -> PrivateError:
    """log(‖C⁻ᵀL‖²·sens²), of the loss at the end: backwards in time a product of series, of C⁻¹ and of each column of L.

    With `normalized` it is that of the column-normalised form.
    """
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


def log_sensitivity(c: Vector, participation: Participation) -> tuple[float, Vector]:
    """log sens² of the non-increasing c ≥ 0, and its derivative by c.

    The sum of the leftmost columns is linear in c, and the transposed of a Toeplitz matrix is that matrix between two reversals:
    the derivative by c is the same sum of the reversed gradient, reversed.
    """
    n, k, b = participation.rounds, participation.participations, participation.min_separation
    total = sum_of_leftmost(np.pad(c, (0, n - len(c))), k, b)
    square = float(total @ total)
    by_c = sum_of_leftmost((2 / square * total)[::-1], k, b)[::-1]
    return math.log(square), by_c[: len(c)]


def log_sensitivity_by_lags(c: Vector, participation: Participation) -> tuple[float, Vector]:
    """log of a bound on sens² for c ≥ 0, monotone or not, and its derivative; sens² where the leftmost columns attain it.

    The a-th participation is in round a·b or later, and the r-th after it at least r·b later. A later column has fewer rows, so
    its product with another is at most that of column a·b with the same lag: ⟨C[:, i], C[:, i + l]⟩ ≤ g_a(l) for i ≥ a·b. Hence
    sens² ≤ Σ_a (g_a(0) + 2·Σ_r max_{l ≥ r·b} g_a(l)).
    """
    n, k, b = participation.rounds, participation.participations, participation.min_separation
    total, by_c = 0.0, np.zeros(len(c))
    for a in range(k):
        cut = c[: n - a * b]
        size = len(cut)
        spectrum = np.fft.rfft(cut, 2 * size)
        products = np.fft.irfft(spectrum * spectrum.conj(), 2 * size)[:size]
        # The lag of the largest product from each lag on.
        backwards = np.maximum.accumulate(products[::-1])
        new = np.concatenate([[True], products[::-1][1:] >= backwards[:-1]])
        largest = size - 1 - np.maximum.accumulate(np.where(new, np.arange(size), 0))[::-1]
        lags = largest[b : (k - a - 1) * b + 1 : b]
        total += products[0] + 2 * products[lags].sum()
        # A product is Σ_t c[t]·c[t + l]: its derivative is c moved by l both ways.
        weights = np.bincount(lags, minlength=size) * 2.0
        weights[0] += 1
        moved = np.fft.rfft(weights, 2 * size)
        by_c[:size] += np.fft.irfft(spectrum * (moved + moved.conj()), 2 * size)[:size]
    return math.log(total), by_c / total
