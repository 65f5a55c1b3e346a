"""Toeplitz mechanisms of least error: banded C, banded C⁻¹, and buffered linear Toeplitz (BLT).

The objective is log(‖A·C⁻¹‖² · sens²), with the Frobenius norm (RMSE) or the largest row (MaxSE). The sensitivity is a valid one:
exact where C is non-increasing (Theorem 1 of arXiv:2601.22334), else a bound on the products of columns by their lags.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy.special import expit, log_softmax, logit, logsumexp

from fedcgd.mechanisms import BLT, BandedToeplitz, BandInvMF
from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.toeplitz import power_coefficients
from fedcgd.mechanisms.workload import PREFIX_SUMS, Objective, Workload
from fedcgd.optimisation import Progress
from fedcgd.optimisation.lbfgs import minimise
from fedcgd.optimisation.scheduled import scheduled_error
from fedcgd.optimisation.series import quotient, sum_of_leftmost
from fedcgd.participation import Participation

PrivateError = Callable[[Vector, Vector], tuple[float, Vector, Vector]]
"""(coefficients of C, 0 behind the last; those of C⁻¹, shape (rounds,)) ↦ log(error²·sens²), its derivatives by both."""

LogError = Callable[[Vector], tuple[float, Vector]]
"""Coefficients ↦ the log of a square, and its derivative by them."""


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
    return least_banded_toeplitz(bandwidth, participation, _sum(log_sensitivity, participation, log_error), progress)


def least_banded_toeplitz(
    bandwidth: int, participation: Participation, private_error: PrivateError, progress: Progress | None = None
) -> BandedToeplitz:
    """As `banded_toeplitz`, for an error of any kind."""
    n, p = participation.rounds, _check(bandwidth, participation)
    impulse = np.eye(1, n)[0]

    def coefficients(theta: Vector) -> Vector:
        return np.concatenate([[1.0], np.cumprod(expit(theta))])

    def objective(theta: Vector) -> tuple[float, Vector]:
        c = coefficients(theta)
        inverse, back = quotient(c, impulse)
        value, by_c, by_inverse = private_error(c, inverse)
        by_c = by_c + back(by_inverse)[0]
        # θ_m is in all c[l] with l ≥ m, whose logs change by 1 − sigmoid(θ_m).
        by_theta: Vector = expit(-theta) * np.cumsum((by_c * c)[:0:-1])[::-1]
        return value, by_theta

    ratios = np.arange(1.0, p)
    theta, _ = minimise(objective, np.log(2 * ratios - 1), progress=progress)  # of BSR: sigmoid(θ_l) = (l − ½)/l
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
        bandwidth, participation, _sum(log_sensitivity_by_lags, participation, log_error), progress
    )


def least_band_inv_mf(
    bandwidth: int, participation: Participation, private_error: PrivateError, progress: Progress | None = None
) -> BandInvMF:
    """As `band_inv_mf`, for an error of any kind."""
    n, p = participation.rounds, _check(bandwidth, participation)
    impulse = np.eye(1, n)[0]

    def objective(free: Vector) -> tuple[float, Vector]:
        w = np.concatenate([[1.0], free])
        c, back = quotient(w, impulse)
        if not np.abs(c).max() < _DIVERGED:  # the line search left the stable region: 0, which is DP-SGD, lies inside
            return _FAR + float(free @ free), 2 * free
        value, by_c, by_inverse = private_error(c, np.pad(w, (0, n - p)))
        return value, (by_inverse[:p] + back(by_c)[0])[1:]

    starts = [power_coefficients(p, 0.5, 1 - damping)[1:] for damping in _DAMPINGS]
    start = min(starts, key=lambda free: objective(free)[0])
    free, _ = minimise(objective, start, progress=progress)
    return BandInvMF((1.0, *free.tolist()))


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
    Decays are sigmoids, and the scales are positive with a sum of at most 1, so that C is positive and non-increasing. For long
    runs this search is that of a shorter one, and one descent from what it found follows.
    """

    def private_error(run: Participation) -> PrivateError:
        return _sum(log_sensitivity, run, _running_error(workload, error, run.rounds))

    near = None
    if participation.rounds > _LONG and not workload.learning_rates:
        short = _shortened(participation)
        found = least_blt(degree, short, private_error(short), progress)
        near = _stretched(found, math.log1p(participation.min_separation) / math.log1p(short.min_separation))
    return least_blt(degree, participation, private_error(participation), progress, near=near)


def least_blt(
    degree: int,
    participation: Participation,
    private_error: PrivateError,
    progress: Progress | None = None,
    *,
    near: Vector | None = None,
) -> BLT:
    """As `blt`, for an error of any kind; free numbers `near` the best spare the search."""
    if degree < 1:
        raise ValueError(f"degree must be at least 1, got {degree}; 4 is usual")
    n = participation.rounds

    def objective(x: Vector) -> tuple[float, Vector]:
        p, q, back = _polynomials(x)
        c, back_c = quotient(q, _cut(p, n))
        inverse, back_inverse = quotient(p, _cut(q, n))
        value, by_c, by_inverse = private_error(c, inverse)
        (q_by_c, p_by_c), (p_by_inverse, q_by_inverse) = back_c(by_c), back_inverse(by_inverse)
        return value, back(_cut(p_by_c, len(p)) + p_by_inverse, q_by_c + _cut(q_by_inverse, len(q)))

    if near is not None:
        x, _ = minimise(objective, near, tolerance=1e-6, progress=progress)
        return _blt(x)
    x = np.array([-1.0])
    for _ in range(degree):
        tries = [
            minimise(objective, _one_more(x, memory), iterations=60, tolerance=1e-6, progress=progress)
            for memory in _memories(n)
        ]
        x, _ = minimise(objective, min(tries, key=lambda found: found[1])[0], tolerance=1e-11, progress=progress)
    return _blt(x)


_LONG = 10_000
"""Rounds, from which on the thousand steps of a search would take minutes."""


def _shortened(participation: Participation) -> Participation:
    """`_LONG` rounds: turns as far apart, or where these would be few, as many turns."""
    n, b, k = participation.rounds, participation.min_separation, participation.participations
    separation = min(b, max(_LONG // 10, b * _LONG // n))
    return Participation(
        rounds=_LONG, min_separation=separation, max_participations=min(k, math.ceil(_LONG / separation))
    )


def _stretched(short: BLT, factor: float) -> Vector:
    """The free numbers of a BLT whose memories are those of `short`, to the power of `factor`, in the proportion of t^(−1/2)."""
    scales, logits = np.array(short.scales), logit(np.array(short.decays) / _LONGEST)
    longer = np.maximum(logits, factor * logits)
    total = min(float(scales.sum()), 1 - 1e-6)
    return np.concatenate([[logit(total)], np.log(scales) - (longer - logits) / 2, longer])


def _blt(x: Vector) -> BLT:
    scales, decays = _buffers(x)
    return BLT(tuple(scales.tolist()), tuple(decays.tolist()))


_LONGEST = 1 - 2.0**-40  # a sigmoid can round to 1, and decays are below it


def _cut(series: Vector, size: int) -> Vector:
    """Its first `size` coefficients, 0 behind the last."""
    result = np.zeros(size)
    result[: len(series)] = series[:size]
    return result


def _buffers(x: Vector) -> tuple[Vector, Vector]:
    """(scales, decays) of the free numbers: the logit of the sum of the scales, then log weights, then logits of decays."""
    degree = len(x) // 2
    scales: Vector = expit(x[0]) * np.exp(log_softmax(x[1 : degree + 1]))
    return scales, _LONGEST * expit(x[degree + 1 :])


def _one_more(x: Vector, memory: float) -> Vector:
    """`x` with one more buffer, of a tenth of the weight of all others, that remembers about `memory` rounds."""
    weights, decays = x[1 : len(x) // 2 + 1], x[len(x) // 2 + 1 :]
    weight = float(logsumexp(weights)) - math.log(10) if len(weights) else 0.0
    return np.concatenate([x[:1], weights, [weight], decays, [math.log(memory)]])


def _memories(rounds: int) -> list[float]:
    return [float(memory) for memory in np.geomspace(1.3, 2 * rounds, 6)]


def _polynomials(x: Vector) -> tuple[Vector, Vector, Callable[[Vector, Vector], Vector]]:
    """(P, Q, back) with Σ c_t x^t = P/Q, as `BLT.polynomials`, of the free numbers; each has degree + 1 coefficients.

    Q = Π_i (1 − d_i·x) and P = Q + x·Σ_i s_i·Π_{j≠i} (1 − d_j·x). `back` takes the derivatives by P and Q to that by the numbers.
    """
    scales, decays = _buffers(x)
    degree = len(scales)

    def product(*left_out: int) -> Vector:
        """Π (1 − d_j·x) over the others, shape (degree + 1,)."""
        result = np.zeros(degree + 1)
        result[0] = 1
        for j in set(range(degree)) - set(left_out):
            result[1:] -= decays[j] * result[:-1]
        return result

    def shifted(series: Vector) -> Vector:
        return np.concatenate([[0.0], series[:-1]])

    others = [shifted(product(i)) for i in range(degree)]
    q = product()
    p = q + sum((scale * series for scale, series in zip(scales, others, strict=True)), np.zeros(degree + 1))

    def back(by_p: Vector, by_q: Vector) -> Vector:
        by_scale, by_decay = np.empty(degree), np.empty(degree)
        for i in range(degree):
            by_scale[i] = by_p @ others[i]
            by_decay[i] = -(by_p + by_q) @ others[i]
            for j in range(degree):
                if j != i:
                    by_decay[i] -= scales[j] * (by_p @ shifted(shifted(product(i, j))))
        # Scales are sigmoid(x_0) times a softmax.
        total = by_scale @ scales
        share = scales / scales.sum()
        by_sum, by_weight = total * expit(-x[0]), scales * by_scale - share * total
        return np.concatenate([[by_sum], by_weight, by_decay * decays * (1 - decays / _LONGEST)])

    return p, q, back


def _sum(
    log_sensitivity: Callable[[Vector, Participation], tuple[float, Vector]],
    participation: Participation,
    log_error: LogError,
) -> PrivateError:
    """log error² of C⁻¹ + log sens² of |C|."""

    def private_error(c: Vector, inverse: Vector) -> tuple[float, Vector, Vector]:
        error, by_inverse = log_error(inverse)
        squared, by_c = log_sensitivity(np.abs(c), participation)
        return error + squared, by_c * np.sign(c), by_inverse

    return private_error


def _running_error(workload: Workload, error: Objective, rounds: int) -> LogError:
    """The error in the model, in which noise is summed up as 1/((1 − x)(1 − βx)); with a schedule in O(n²) a step."""
    beta, rates = workload.momentum, workload.rates(rounds)
    constant = not workload.learning_rates
    divisor = np.array([1.0, -1.0 - beta, beta]) if constant else np.array([1.0, -beta])

    def log_error(inverse: Vector) -> tuple[float, Vector]:
        noise, back = quotient(divisor, inverse)
        square, by_noise = _squared_error(noise, error) if constant else scheduled_error(noise, rates, error)
        return math.log(square), back(by_noise / square)[1]

    return log_error


def _squared_error(noise: Vector, error: Objective) -> tuple[float, Vector]:
    """The squared error norm of the Toeplitz B with these coefficients, and its derivative."""
    n = len(noise)
    weights = np.ones(n) if error == "max-se" else np.arange(n, 0, -1) / n
    return float(weights @ noise**2), 2 * weights * noise


def log_sensitivity(c: Vector, participation: Participation) -> tuple[float, Vector]:
    """log sens² of the non-increasing c ≥ 0, and its derivative by c."""
    n, k, b = participation.rounds, participation.participations, participation.min_separation
    total = sum_of_leftmost(c, n, k, b)
    square = float(total @ total)
    by_c = sum_of_leftmost((2 / square * total)[::-1], n, k, b)[::-1]
    return math.log(square), _cut(by_c, len(c))


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


def _check(bandwidth: int, participation: Participation) -> int:
    if not 1 <= bandwidth <= participation.rounds:
        raise ValueError(f"bandwidth must be in 1 … {participation.rounds} (rounds), got {bandwidth}")
    return bandwidth
