"""Lower bounds on ε from scores of canaries that took part and of canaries that were held out.

Each function takes the two arrays, δ and a confidence, and returns a number that exceeds the true ε with probability at most
1 − confidence. A higher score speaks for having taken part. They differ in what they assume.
"""

import numpy as np
from scipy.optimize import brentq
from scipy.stats import beta, binom, chi2, norm

from fedcgd.accounting import compute_epsilon
from fedcgd.mechanisms import DPSGD
from fedcgd.mechanisms.mechanism import Vector
from fedcgd.participation import Participation

_LARGEST = 500.0  # ε beyond which e^ε overflows or nothing is left to measure
_LARGEST_MU = 1e4
_GUESSED = (1.0, 0.5, 0.1, 0.02)  # shares of the canaries that are guessed, from both ends
_CANDIDATES = 200  # thresholds that are tried on the first half


def one_run_bound(included: Vector, held_out: Vector, delta: float, confidence: float) -> float:
    """ε from how many memberships are guessed right (Theorem 5.2 of arXiv:2305.08846).

    Assumes only that an independent fair coin decided for each canary. They may share one run and influence
    each other.
    """
    count = len(included) + len(held_out)
    took_part = np.repeat([True, False], [len(included), len(held_out)])
    # Equal scores must not be ordered by membership.
    mixed = np.random.default_rng(0).permutation(count)
    ranks = mixed[np.argsort(np.concatenate([included, held_out])[mixed], kind="stable")]
    risk = (1 - confidence) / len(_GUESSED)
    best = 0.0
    for share in _GUESSED:
        half = int(count * share / 2)
        if half == 0:
            continue
        right = int(np.sum(took_part[ranks[count - half :]]) + np.sum(~took_part[ranks[:half]]))
        best = max(best, _refuted_by_guesses(count, 2 * half, right, delta, risk))
    return best


def threshold_bound(included: Vector, held_out: Vector, delta: float, confidence: float) -> float:
    """ε ≥ log((1 − δ − β)/α) with Clopper–Pearson upper bounds on the errors α, β of a threshold, and with α, β exchanged.

    One half of the scores chooses the threshold, the other is counted. Assumes that canaries of a kind are independent and alike.
    """
    rng = np.random.default_rng(0)
    first_in, second_in = np.array_split(rng.permutation(included), 2)
    first_out, second_out = np.array_split(rng.permutation(held_out), 2)
    if not len(second_in) or not len(second_out):
        return 0.0
    risk = (1 - confidence) / 2

    def bounds(scores_in: Vector, scores_out: Vector, thresholds: Vector) -> Vector:
        alpha = _proportion_at_most(_count_above(scores_out, thresholds), len(scores_out), risk)
        miss = _proportion_at_most(len(scores_in) - _count_above(scores_in, thresholds), len(scores_in), risk)
        return np.array([_log_ratio(1 - delta - miss, alpha), _log_ratio(1 - delta - alpha, miss)])

    candidates = np.quantile(np.concatenate([first_in, first_out]), np.linspace(0, 1, _CANDIDATES))
    way, index = np.unravel_index(np.argmax(bounds(first_in, first_out, candidates)), (2, _CANDIDATES))
    return max(0.0, float(bounds(second_in, second_out, candidates[index : index + 1])[way, 0]))


def gaussian_bound(included: Vector, held_out: Vector, delta: float, confidence: float, *, users: int = 1) -> float:
    """ε of the Gaussian mechanism with μ = difference of the means / (`users`·standard deviation), when least plausible.

    `users` take part together in each included trial, in the same way: a run that is μ-GDP for one user is
    users·μ-GDP for them (group privacy, Theorem 2.14 of arXiv:1905.02383), and a larger gap is measured better.
    Assumes independent scores, normal ones for those held out.
    """
    if len(included) < 2 or len(held_out) < 2:
        return 0.0
    risk = (1 - confidence) / 3
    spread, spread_in = (
        float(np.std(x, ddof=1)) * float(np.sqrt((len(x) - 1) / chi2.ppf(risk, len(x) - 1)))
        for x in (held_out, included)
    )
    error = np.hypot(max(spread, spread_in) / np.sqrt(len(included)), spread / np.sqrt(len(held_out)))
    gap = float(np.mean(included) - np.mean(held_out) - norm.isf(risk) * error)
    # Where the noise vanishes, μ is as large as one likes; the limit still is a lower bound.
    mu = min(gap / max(spread, 1e-300) / users, _LARGEST_MU)
    if mu <= 1 / _LARGEST_MU:
        return 0.0
    return compute_epsilon(DPSGD(), Participation(rounds=1), noise_multiplier=1 / mu, delta=delta).epsilon


def _refuted_by_guesses(count: int, guesses: int, right: int, delta: float, risk: float) -> float:
    """The largest ε for which so many right guesses have probability at most `risk`."""

    def excess(epsilon: float) -> float:
        probability = 1 / (1 + np.exp(-epsilon))
        tail = binom.sf(right - 1, guesses, probability)
        fewer = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, probability))
        slope = float(np.max(fewer / np.arange(1, right + 1), initial=0.0))
        return float(tail + 2 * count * delta * slope - risk)

    if excess(0.0) >= 0:
        return 0.0
    return float(brentq(excess, 0.0, _LARGEST, xtol=1e-6)) if excess(_LARGEST) > 0 else _LARGEST


def _count_above(scores: Vector, thresholds: Vector) -> Vector:
    return np.asarray(len(scores) - np.searchsorted(np.sort(scores), thresholds, side="right"), dtype=np.float64)


def _proportion_at_most(successes: Vector, trials: int, risk: float) -> Vector:
    """Clopper and Pearson's upper bounds on probabilities."""
    some_missed = np.minimum(successes, trials - 1)
    return np.where(successes == trials, 1.0, beta.isf(risk, some_missed + 1, trials - some_missed))


def _log_ratio(numerator: Vector, denominator: Vector) -> Vector:
    positive = np.maximum(numerator, np.exp(-_LARGEST))
    return np.asarray(np.log(positive / denominator))
