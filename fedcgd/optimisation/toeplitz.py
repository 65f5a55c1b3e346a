"""Toeplitz mechanisms of least error, or of least loss on a quadratic: banded C, banded C⁻¹, and buffered linear Toeplitz (BLT).

Each is found for the running error of a `workload`, or with a `quadratic` for what the noise adds to its loss; `normalized` then
says that the column-normalised form is used, which other numbers make best. What is minimised, `private_error` says.
"""

import math
from collections.abc import Callable

import numpy as np
import scipy

from fedcgd.mechanisms import BLT, BandedToeplitz, BandInvMF
from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.toeplitz import power_coefficients
from fedcgd.mechanisms.workload import PREFIX_SUMS, Objective, Workload
from fedcgd.optimisation.bfgs import minimise_with_kinks
from fedcgd.optimisation.effort import EFFORT
from fedcgd.optimisation.lbfgs import minimise
from fedcgd.optimisation.private_error import PrivateError, log_sensitivity, log_sensitivity_by_lags, private_error
from fedcgd.optimisation.series import quotient
from fedcgd.participation import Participation
from fedcgd.quadratic import Quadratic


def banded_toeplitz(
    bandwidth: int,
    participation: Participation,
    *,
    error: Objective = "rmse",
    workload: Workload = PREFIX_SUMS,
    quadratic: Quadratic | None = None,
    normalized: bool = False,
) -> BandedToeplitz:
    """The banded Toeplitz C of least error, by L-BFGS from BSR's coefficients, in O(n·p) a step (arXiv:2405.15913, Section 3.2).

    c[l] = c[l−1]·sigmoid(θ_l), so that C is positive and non-increasing, and its sensitivity exact. Its column-normalised form,
    `Normalized`, is hardly ever worse for one participation.
    """
    minimised = private_error(log_sensitivity, participation, error, workload, quadratic, normalized)
    n, p = participation.rounds, _check(bandwidth, participation)
    impulse = np.eye(1, n)[0]

    def coefficients(theta: Vector) -> Vector:
        return np.concatenate([[1.0], np.cumprod(scipy.special.expit(theta))])

    def objective(theta: Vector) -> tuple[float, Vector]:
        c = coefficients(theta)
        inverse, back = quotient(c, impulse)
        value, by_c, by_inverse = minimised(c, inverse)
        by_c = by_c + back(by_inverse)[0]
        # θ_m is in all c[l] with l ≥ m, whose logs change by 1 − sigmoid(θ_m).
        by_theta: Vector = scipy.special.expit(-theta) * np.cumsum((by_c * c)[:0:-1])[::-1]
        return value, by_theta

    ratios = np.arange(1.0, p)
    theta, _ = minimise(objective, np.log(2 * ratios - 1))  # of BSR: sigmoid(θ_l) = (l − ½)/l
    return BandedToeplitz(tuple(coefficients(theta).tolist()))


def band_inv_mf(
    bandwidth: int,
    participation: Participation,
    *,
    error: Objective = "rmse",
    workload: Workload = PREFIX_SUMS,
    quadratic: Quadratic | None = None,
    normalized: bool = False,
) -> BandInvMF:
    """The C⁻¹ with p Toeplitz coefficients of least error under a valid sensitivity, by BFGS from the best damped BISR.

    The sensitivity has kinks, where another lag has the largest product or an entry of C changes its sign. Were the leftmost
    columns taken for it, as if C were monotone, the optimum would have negative Gram entries, and an error far larger than it
    seems.
    """
    minimised = private_error(log_sensitivity_by_lags, participation, error, workload, quadratic, normalized)
    n, p = participation.rounds, _check(bandwidth, participation)
    impulse = np.eye(1, n)[0]

    def objective(free: Vector) -> tuple[float, Vector]:
        w = np.concatenate([[1.0], free])
        c, back = quotient(w, impulse)
        if not np.abs(c).max() < _DIVERGED:  # the line search left the stable region: 0, which is DP-SGD, lies inside
            return _FAR + float(free @ free), 2 * free
        value, by_c, by_inverse = minimised(c, np.pad(w, (0, n - p)))
        return value, (by_inverse[:p] + back(by_c)[0])[1:]

    starts = [power_coefficients(p, 0.5, 1 - damping)[1:] for damping in EFFORT.dampings]
    start = min(starts, key=lambda free: objective(free)[0])
    free, _ = minimise_with_kinks(objective, start)
    return BandInvMF((1.0, *free.tolist()))


_DIVERGED = 1e6
_FAR = 1e3  # above any log error


def blt(
    degree: int,
    participation: Participation,
    *,
    error: Objective = "rmse",
    workload: Workload = PREFIX_SUMS,
    quadratic: Quadratic | None = None,
    normalized: bool = False,
) -> BLT:
    """The BLT with `degree` buffers of least error, by L-BFGS, one more buffer at a time.

    Each new buffer is tried with several decays: a start with all buffers at once ends where two of them have the same decay.
    Decays are sigmoids, and the scales are positive with a sum of at most 1, so that C is positive and non-increasing. For long
    runs this search is that of a shorter one, and one descent from what it found follows.
    """

    def find(run: Participation, near: Vector | None = None) -> BLT:
        minimised = private_error(log_sensitivity, run, error, workload, quadratic, normalized)
        return _least_blt(degree, run, minimised, near)

    if participation.rounds <= EFFORT.shortened or workload.learning_rates or quadratic is not None:
        return find(participation)
    short = _shortened(participation)
    longer = math.log1p(participation.min_separation) / math.log1p(short.min_separation)
    return find(participation, near=_stretched(find(short), longer))


def _least_blt(
    degree: int,
    participation: Participation,
    minimised: PrivateError,
    near: Vector | None,
) -> BLT:
    """As `blt`; free numbers `near` the best spare the search."""
    if degree < 1:
        raise ValueError(f"degree must be at least 1, got {degree}; 4 is usual")
    n = participation.rounds

    def objective(x: Vector) -> tuple[float, Vector]:
        p, q, back = _polynomials(x)
        c, back_c = quotient(q, _cut(p, n))
        inverse, back_inverse = quotient(p, _cut(q, n))
        value, by_c, by_inverse = minimised(c, inverse)
        (q_by_c, p_by_c), (p_by_inverse, q_by_inverse) = back_c(by_c), back_inverse(by_inverse)
        return value, back(_cut(p_by_c, len(p)) + p_by_inverse, q_by_c + _cut(q_by_inverse, len(q)))

    if near is not None:
        x, _ = minimise(objective, near, tolerance=1e-6)
        return _blt(x)
    x = np.array([-1.0])
    for _ in range(degree):
        tries = [minimise(objective, _one_more(x, memory), iterations=60, tolerance=1e-6) for memory in _memories(n)]
        x, _ = minimise(objective, min(tries, key=lambda found: found[1])[0], tolerance=1e-11)
    return _blt(x)


def _shortened(participation: Participation) -> Participation:
    """`EFFORT.shortened` rounds: turns as far apart, or where these would be few, as many turns."""
    n, b, k = participation.rounds, participation.min_separation, participation.participations
    separation = min(b, max(EFFORT.shortened // 10, b * EFFORT.shortened // n))
    return Participation(
        rounds=EFFORT.shortened,
        min_separation=separation,
        max_participations=min(k, math.ceil(EFFORT.shortened / separation)),
    )


def _stretched(short: BLT, factor: float) -> Vector:
    """The free numbers of a BLT whose memories are those of `short`, to the power of `factor`, in the proportion of t^(−1/2)."""
    scales, logits = np.array(short.scales), scipy.special.logit(np.array(short.decays) / _LONGEST)
    longer = np.maximum(logits, factor * logits)
    total = min(float(scales.sum()), 1 - 1e-6)
    return np.concatenate([[scipy.special.logit(total)], np.log(scales) - (longer - logits) / 2, longer])


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
    scales: Vector = scipy.special.expit(x[0]) * np.exp(scipy.special.log_softmax(x[1 : degree + 1]))
    return scales, _LONGEST * scipy.special.expit(x[degree + 1 :])


def _one_more(x: Vector, memory: float) -> Vector:
    """`x` with one more buffer, of a tenth of the weight of all others, that remembers about `memory` rounds."""
    weights, decays = x[1 : len(x) // 2 + 1], x[len(x) // 2 + 1 :]
    weight = float(scipy.special.logsumexp(weights)) - math.log(10) if len(weights) else 0.0
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
        share = scipy.special.softmax(x[1 : degree + 1])  # and not of scales, which underflow together where x_0 is low
        by_sum, by_weight = total * scipy.special.expit(-x[0]), scales * by_scale - share * total
        return np.concatenate([[by_sum], by_weight, by_decay * decays * (1 - decays / _LONGEST)])

    return p, q, back


def _check(bandwidth: int, participation: Participation) -> int:
    if not 1 <= bandwidth <= participation.rounds:
        raise ValueError(f"bandwidth must be in 1 … {participation.rounds} (rounds), got {bandwidth}")
    return bandwidth
