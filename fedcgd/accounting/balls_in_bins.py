"""Balls-in-Bins by Monte Carlo: each user in one secret, uniform bin j of b, taking part in rounds j, j + b, …

The dominating pair is (1/b)Σ_j N(m_j, σ²I) and N(0, σ²I), in both orders (arXiv:2410.06266; C must not be negative). A search on
few draws, the same for every σ, proposes an answer; fresh draws, many more, confirm it with an upper confidence bound, or it is
raised and tried again with new ones. All tries together are wrong with probability at most `FAILURE`, over the choice of
the seed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from scipy.special import ndtr

from fedcgd.accounting import gaussian
from fedcgd.accounting.balls_in_bins_gram import bin_gram
from fedcgd.accounting.balls_in_bins_sampling import Bins, Sample, remainder, sample_add, sample_jump, sample_shifted
from fedcgd.accounting.confidence import radius, stake, upper_bound
from fedcgd.mechanisms import Mechanism
from fedcgd.participation import Participation

FAILURE = 1e-6
SEED = 20260
METHOD = f"Monte Carlo over the privacy loss with an upper confidence bound, both directions, seed {SEED}"

_ROUGH = 1024
_PILOT = 8192
_TRIES = 8
_SHARE = FAILURE / (2 * _TRIES)  # for each direction of each try
_WORK = 1.6e9  # numbers drawn at most in one confirmation, where the matrix product is cheap
_NEGLIGIBLE = 2e-3  # of δ, that may go to the remainder
_PRECISION = 3e-3  # of σ, that more draws should not be spent on


@dataclass(frozen=True)
class Estimator:
    """One way to draw for one direction at (σ, ε): `draw(count, seed)`, and a bound on what it leaves out."""

    draw: Callable[[int, int], Sample]
    left_out: float = 0.0


@dataclass(frozen=True)
class Plan:
    """An estimator with what its pilot found."""

    estimator: Estimator
    mean: float
    variance: float
    range: float
    draws: int

    def bound(self, count: int) -> float:
        """About what `confirm` will return."""
        return self.mean + self.estimator.left_out + radius(self.variance, self.range, count, _SHARE)

    def confirm(self, count: int, seed: int) -> float:
        """An upper bound on δ of this direction, wrong with probability at most `_SHARE`."""
        sample = self.estimator.draw(count, seed)
        bet = stake(self.variance, sample.range, count, _SHARE)
        return min(1.0, upper_bound(sample.values, sample.range, bet, _SHARE) + self.estimator.left_out)


@lru_cache(maxsize=8)
def bins_of(mechanism: Mechanism, participation: Participation) -> Bins:
    """The Gram matrix of the bins and what follows from it."""
    return Bins(bin_gram(mechanism, participation))


def calibrate(bins: Bins, *, epsilon: float, delta: float) -> float:
    """A noise multiplier σ for which both directions are proven to be (ε, δ)-private, up to `FAILURE`."""
    highest = gaussian.sigma(epsilon=epsilon, delta=delta) * _reach(bins)  # without amplification
    if len(bins.gram) == 1:
        return highest
    sigma, plans = _search(lambda sigma: (sigma, epsilon), bins, delta, highest)
    for attempt in range(_TRIES):
        if sigma >= highest:
            break
        if _confirmed(plans, bins, delta, attempt):
            return sigma
        sigma *= 1.004
        plans = _plans(bins, sigma, epsilon, delta, _PILOT)
    return highest


def epsilon(bins: Bins, *, sigma: float, delta: float) -> float:
    """An ε for which both directions are proven to be (ε, δ)-private, up to `FAILURE`."""
    highest = gaussian.epsilon(sigma=sigma / _reach(bins), delta=delta)
    if len(bins.gram) == 1 or highest < 1e-6:
        return highest
    found, plans = _search(lambda epsilon: (sigma, epsilon), bins, delta, highest)
    for attempt in range(_TRIES):
        if found >= highest:
            break
        if _confirmed(plans, bins, delta, attempt):
            return found
        found *= 1.006
        plans = _plans(bins, sigma, found, delta, _PILOT)
    return highest


def delta(bins: Bins, *, sigma: float, epsilon: float) -> float:
    """A δ for which both directions are proven to be (ε, δ)-private, up to `FAILURE`."""
    highest = gaussian.delta(epsilon=epsilon, sigma=sigma / _reach(bins))
    if len(bins.gram) == 1 or highest <= gaussian.LEAST_DELTA:
        return highest
    plans = _plans(bins, sigma, epsilon, highest, _PILOT)
    return min(highest, max(plan.confirm(_count(plan, bins, plan.mean), SEED + 2 + i) for i, plan in enumerate(plans)))


def add_bound(bins: Bins, sigma: float, epsilon: float) -> float:
    """E_Q[(1 − e^(ε + ℓ − Ḡ/2))₊] ≥ δ_add, by Jensen's inequality: ℓ = mean y_j ~ N(0, |ū|²)."""
    half, square = float(np.diag(bins.gram).mean()) / 2 / sigma**2, float(bins.gram.mean()) / sigma**2
    low = (half - epsilon) / math.sqrt(square)
    exponent = epsilon - half + square / 2
    second = math.exp(min(exponent + math.log(max(float(ndtr(low - math.sqrt(square))), 1e-320)), 0.0))
    return max(0.0, float(ndtr(low)) - second) * (1 + 1e-9) + 1e-300


def _reach(bins: Bins) -> float:
    """The sensitivity of the worst bin: without amplification, δ is that of a Gaussian with it, and never less with it."""
    return math.sqrt(float(np.diag(bins.gram).max()))


def _search(
    at: Callable[[float], tuple[float, float]], bins: Bins, delta: float, highest: float
) -> tuple[float, list[Plan]]:
    """About the least x whose confirmation at (σ, ε) = at(x) is likely, and the plans for it."""

    def plans_at(x: float, draws: int) -> list[Plan]:
        return _plans(bins, *at(x), delta, draws)

    high, low = highest, highest * 0.7
    while _fits(plans_at(low, _ROUGH), bins, delta):
        high, low = low, low * 0.7
    # The pilot of so few draws may be wrong about the last decisions: the bracket is widened.
    for draws, ratio, widen in ((_ROUGH, 1.05, 1.1), (_PILOT, 1.001, 1.0)):
        while high / low > ratio:
            middle = math.sqrt(low * high)
            if _fits(plans_at(middle, draws), bins, delta):
                high = middle
            else:
                low = middle
        high, low = min(highest, high * widen), low / widen
    return high, plans_at(high, _PILOT)


def _fits(plans: list[Plan], bins: Bins, delta: float) -> bool:
    """Whether `_confirmed` is likely."""
    for plan in plans:
        count = _count(plan, bins, delta)
        doubt = 2 * math.sqrt(plan.variance / plan.draws) + 2 * math.sqrt(plan.variance / count)
        if plan.bound(count) + doubt > delta:
            return False
    return True


def _confirmed(plans: list[Plan], bins: Bins, delta: float, attempt: int) -> bool:
    return all(
        plan.confirm(_count(plan, bins, delta), SEED + 2 + 2 * attempt + i) <= delta for i, plan in enumerate(plans)
    )


def _count(plan: Plan, bins: Bins, delta: float) -> int:
    """How many draws: enough that the radius is a small part of δ, within `_WORK`."""
    b = len(bins.gram)
    count, most = 2**17, int(_WORK / b / (1 + b / 1000))
    while count < most and radius(plan.variance, plan.range, count, _SHARE) > 15 * _PRECISION * delta:
        count *= 2
    return min(count, max(most, 2**17), 2**23)


def _plans(bins: Bins, sigma: float, epsilon: float, delta: float, draws: int) -> list[Plan]:
    """For each direction whose δ matters, the estimator that a pilot of so many draws finds best."""
    gram = bins.gram / sigma**2
    top, square = float(np.diag(gram).max()), float(gram.mean())
    cut = _cut(bins, sigma, epsilon, _NEGLIGIBLE * delta)
    left = remainder(bins, sigma, epsilon, cut)
    center, along = 0.5 + epsilon / top, epsilon / square
    removing = [Estimator(partial(sample_jump, bins, sigma, epsilon, tilt, cut), left) for tilt in (0.0, 1.0, 2.0)]
    removing += [
        Estimator(partial(sample_shifted, bins, sigma, epsilon, max(1.1, center * scale), 0.95 * along))
        for scale in (1.0, 1.3, 1.6)
    ]
    plans = [_best(removing, delta, draws)]
    if add_bound(bins, sigma, epsilon) > 0.99 * delta:
        adding = [Estimator(partial(sample_add, bins, sigma, epsilon, scale * along)) for scale in (0.0, 0.5, 0.8, 1.0)]
        plans.append(_best(adding, delta, draws))
    return plans


def _best(estimators: list[Estimator], delta: float, draws: int) -> Plan:
    ranges = [estimator.draw(1, SEED).range for estimator in estimators]
    plans = []
    for estimator, most in zip(estimators, ranges, strict=True):
        if most <= 30 * min(ranges):  # others would need far more draws
            values = estimator.draw(draws, SEED).values
            plans.append(Plan(estimator, float(values.mean()), float(values.var()), most, draws))
    return min(plans, key=lambda plan: radius(plan.variance, plan.range, 2**20, _SHARE) + plan.estimator.left_out)


def _cut(bins: Bins, sigma: float, epsilon: float, allowed: float) -> float:
    """The largest log K for which `remainder` is at most `allowed`; ε itself always leaves nothing out."""
    low, high = epsilon, epsilon + math.log(len(bins.gram)) + 1
    while high - low > 0.05:
        middle = (low + high) / 2
        if remainder(bins, sigma, epsilon, middle) <= allowed:
            low = middle
        else:
            high = middle
    return low
