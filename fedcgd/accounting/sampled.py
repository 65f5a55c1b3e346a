"""Runs that are, at worst, independent releases in which a user takes part by chance: σ, ε and δ without any draws.

A release is the pair of (1 − Σ w_i)·N(0, I) + Σ w_i·N(e_i·norm_i/σ, I) and N(0, I), in both orders: a *coin* has one w, the
chance to take part, and *one of several* rounds has w = 1/b for each. Poisson sampling and random allocation are of this kind
where C = I, and dominate others (`bounds`). Losses are put on a grid that errs upwards, and composed (`losses`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr, ndtri

from fedcgd.accounting.guarantee import LEAST_DELTA
from fedcgd.accounting.log_normal_means import log_normal_mean
from fedcgd.accounting.losses import Composition, GridLoss
from fedcgd.accounting.tolerances import TOLERANCES
from fedcgd.mechanisms.mechanism import Vector

_GRID = TOLERANCES.losses

LARGEST_MULTIPLIER = 1e6
"""σ over the norm beyond which amplification is left out: δ of one release is a difference that loses so many digits."""

_LARGEST_EPSILON = 1e7  # no privacy at all: a grid of its losses has too few points


@dataclass(frozen=True)
class Coin:
    """A user takes part with probability `rate`, and then moves the release by `norm`."""

    rate: float
    norm: float = 1.0

    def scaled(self, factor: float) -> "Coin":
        """With norms `factor` times as large."""
        return Coin(self.rate, self.norm * factor)

    def covers(self, sigma: float) -> bool:
        """Whether a grid holds the losses: noise is neither too much nor too little."""
        return 1e-3 <= sigma / self.norm <= LARGEST_MULTIPLIER

    def spread(self, sigma: float) -> float:
        """About the standard deviation of a small loss."""
        return self.rate * math.sqrt(math.expm1(min((self.norm / sigma) ** 2, 50.0)))

    def span(self, sigma: float, times: int, least: float) -> float:
        """About how far losses of so many reach that are not negligible."""
        mu, far = self.norm / sigma, -float(ndtri(least))
        largest = max(_log_mean(self.rate, mu * far + mu * mu / 2), -_log_mean(self.rate, -mu * far - mu * mu / 2))
        return largest + _bulk(self.spread(sigma), mu, self.rate, times)

    def losses(self, sigma: float, step: float, least: float) -> tuple[GridLoss, GridLoss]:
        """Those of removing and of adding a user; losses of probability about `least` may count as infinite."""
        mu, far = self.norm / sigma, -float(ndtri(least))
        found = []
        for adding in (False, True):
            # The ratio is 1 − q + q·exp(μy − μ²/2): y is at most `far` beyond 0 where nobody takes part, and beyond μ else.
            ends = [-mu * far - mu * mu / 2, mu * far + mu * mu / 2 * (-1 if adding else 1)]
            low, high = sorted((-1 if adding else 1) * _log_mean(self.rate, end) for end in ends)
            multiples = np.arange(math.floor(low / step), math.ceil(high / step) + 1)
            epsilons = np.asarray(multiples * step, dtype=np.float64)
            found.append(GridLoss.from_deltas(multiples, coin_delta(epsilons, mu, self.rate, adding), step))
        return found[0], found[1]


@dataclass(frozen=True)
class OneOf:
    """A user takes part in one of several rounds, each as likely: `kinds` has (norm, number of rounds), 0 for rounds to come."""

    kinds: tuple[tuple[float, int], ...]

    def scaled(self, factor: float) -> "OneOf":
        """As `Coin.scaled`."""
        return OneOf(tuple((norm * factor, count) for norm, count in self.kinds))

    def covers(self, sigma: float) -> bool:
        """As `Coin.covers`."""
        return 0.2 <= sigma / self._largest <= 1e4

    def spread(self, sigma: float) -> float:
        """As `Coin.spread`."""
        variance = sum(count * math.expm1(min((norm / sigma) ** 2, 50.0)) for norm, count in self.kinds)
        return math.sqrt(variance) / sum(count for _, count in self.kinds)

    def span(self, sigma: float, times: int, least: float) -> float:
        """As `Coin.span`."""
        mu = self._largest / sigma
        return mu * -float(ndtri(least)) + mu * mu / 2 + _bulk(self.spread(sigma), mu, 1.0, times)

    def losses(self, sigma: float, step: float, least: float) -> tuple[GridLoss, GridLoss]:
        """As `Coin.losses`."""
        return _ratio(tuple((norm / sigma, count) for norm, count in self.kinds), least).losses(step)

    @property
    def _largest(self) -> float:
        return max(norm for norm, _ in self.kinds)


@dataclass(frozen=True)
class Profile:
    """Whatever is (ε, δ)-private, adding and removing, for each ε ≥ 0 and δ of `points`, with ascending ε."""

    points: tuple[tuple[float, float], ...]

    def scaled(self, factor: float) -> "Profile":
        """As `Coin.scaled`."""
        return self

    def covers(self, sigma: float) -> bool:
        """As `Coin.covers`."""
        return True

    def spread(self, sigma: float) -> float:
        """As `Coin.spread`."""
        return math.inf

    def span(self, sigma: float, times: int, least: float) -> float:
        """As `Coin.span`."""
        return times * self.points[-1][0]

    def losses(self, sigma: float, step: float, least: float) -> tuple[GridLoss, GridLoss]:
        """H(γ) = sup P(S) − γ·Q(S) is convex in γ; δ at ε bounds it at γ = e^ε, and at e^(−ε), where it is 1 − γ + γ·δ of the
        other direction. So it lies below the lower convex hull of these points.
        """
        epsilons, values = np.array(self.points).T
        multiples = np.ceil(epsilons / step).astype(int)  # at a larger ε, δ is no larger
        last = np.append(np.diff(multiples) > 0, True)
        multiples, values = multiples[last], values[last]
        up = multiples > 0
        below = (-np.expm1(-multiples * step) + np.exp(-multiples * step) * values)[up][::-1]
        multiples = np.concatenate([-multiples[up][::-1], multiples])
        values = np.minimum(np.concatenate([below, values]), 1.0)
        gammas, corners = np.exp(multiples * step), [0]
        for i in range(1, len(values)):
            while len(corners) > 1 and _is_above(corners[-2], corners[-1], i, gammas, values):
                corners.pop()
            corners.append(i)
        loss = GridLoss.from_deltas(multiples[corners], values[corners], step)
        return loss, loss


Release = Coin | OneOf | Profile
"""One release, for noise of standard deviation σ in units of its norms."""


def _is_above(a: int, b: int, c: int, gammas: Vector, values: Vector) -> bool:
    """Whether point b is on or above the line from a to c."""
    part = (gammas[b] - gammas[a]) / (gammas[c] - gammas[a])
    return bool(values[b] >= values[a] + part * (values[c] - values[a]))


def _bulk(spread: float, mu: float, rate: float, times: int) -> float:
    """About how far losses of so many releases reach, as a normal variable or as those of the rounds that a user may have."""
    square, drawn = times * spread * spread, rate * times
    drawn = min(float(times), drawn + 10 * math.sqrt(drawn) + 10)
    return min(square / 2 + 10 * math.sqrt(square), drawn / 2 * mu * mu + 10 * math.sqrt(drawn) * mu)


_ratio = lru_cache(maxsize=16)(log_normal_mean)


def _log_mean(rate: float, log: float) -> float:
    """log(1 − q + q·e^log)."""
    if rate == 1.0:
        return log
    return (
        math.log1p(rate * math.expm1(log)) if log < 1 else float(np.logaddexp(math.log1p(-rate), math.log(rate) + log))
    )


@dataclass(frozen=True)
class Sampled:
    """Independent releases, how often each, and what a number that follows from them is said to come from."""

    releases: tuple[tuple[Release, int], ...]
    method: str

    @staticmethod
    def certain(mu: float, method: str) -> "Sampled":
        """A Gaussian mechanism, for noise 1."""
        return Sampled(((Coin(1.0, max(mu, 1 / LARGEST_MULTIPLIER)), 1),), method)

    def for_noise_one(self, sigma: float) -> "Sampled":
        """The same releases with noise `sigma`, as releases with noise 1."""
        return Sampled(tuple((release.scaled(1 / sigma), times) for release, times in self.releases), self.method)

    def delta(self, sigma: float, epsilon: float, coarser: float = 1.0) -> float:
        """An upper bound on δ at `epsilon`, at most 1; the larger of the two directions."""
        epsilon, least = min(epsilon, _LARGEST_EPSILON), _GRID.unknown
        while True:
            found = max(
                (each.delta(epsilon) for each in self._compositions(sigma, epsilon, least, coarser)), default=1.0
            )
            beyond = self._number * least
            if beyond <= 1e-3 * found or least <= LEAST_DELTA:
                return found
            # Far losses rule Chernoff's bound: no more of them than are needed.
            least = max(found * _GRID.negligible / self._number if beyond < 0.1 * found else least**2, LEAST_DELTA)

    def epsilon(self, sigma: float, delta: float, most: float) -> float:
        """An upper bound on ε at `delta`, at most `most`; the larger of the two directions."""
        if self.chance <= delta:
            return 0.0
        found, step = most, math.inf
        while (finer := _step(min(found, _LARGEST_EPSILON))) < step / 2:  # finer steps only lower ε
            step, least = finer, max(delta * _GRID.negligible / self._number, LEAST_DELTA)
            both = self._compositions(sigma, min(found, _LARGEST_EPSILON), least, 1.0)
            found = min(found, max((each.epsilon(delta) for each in both), default=most))
        return found

    def noise_multiplier(self, epsilon: float, delta: float, most: float) -> float:
        """The least σ found at which δ is at most `delta`, at most `most`; about 1e-5 above the least there is.

        Raises ValueError if δ is at least the probability that a user takes part at all: then it asks for no noise.
        """
        if self.chance <= delta:
            raise ValueError(
                f"delta = {delta:g} is at least the probability that a user takes part at all, {self.chance:.3g}: publishing "
                "those who do would keep it. Take a delta far below that probability"
            )
        if epsilon > _LARGEST_EPSILON:
            return most

        def excess(coarser: float) -> Callable[[float], float]:
            return lambda sigma: math.log(max(self.delta(sigma, epsilon, coarser), LEAST_DELTA) / delta)

        if excess(_GRID.rough[0])(most) > math.log(2):
            return most  # far from enough there
        # Larger steps only raise δ, so that what is enough by them is enough.
        rough = _least(excess(_GRID.rough[0]), most, 2.0, _GRID.rough[1])
        return _least(excess(1.0), rough, 1.005, _GRID.accuracy / 2)

    def _step(self, sigma: float, epsilon: float, least: float, coarser: float) -> float:
        """The step of a grid for this ε."""
        span = sum(release.span(sigma, times, least) for release, times in self.releases)
        # The loss of a release must be told from none: that of many, each far below the step, would count several times.
        finest = min(release.spread(sigma) for release, _ in self.releases) / _GRID.per_spread
        return max(min(coarser * _step(epsilon), finest), span / TOLERANCES.memory.cells)

    @property
    def chance(self) -> float:
        """The probability that a user takes part at all: δ at ε = 0, the total variation distance, is never larger."""
        rates = [(release.rate if isinstance(release, Coin) else 1.0, times) for release, times in self.releases]
        return (
            -math.expm1(sum(times * math.log1p(-rate) for rate, times in rates))
            if all(rate < 1 for rate, _ in rates)
            else 1.0
        )

    @property
    def _number(self) -> int:
        return sum(times for _, times in self.releases)

    def _compositions(self, sigma: float, epsilon: float, least: float, coarser: float) -> tuple[Composition, ...]:
        """All releases together, in each direction; none where noise is too much or too little for a grid."""
        if not all(release.covers(sigma) for release, _ in self.releases):
            return ()
        step = self._step(sigma, epsilon, least, coarser)
        parts = [(_losses(release, sigma, step, least), times) for release, times in self.releases]
        return tuple(Composition([(both[direction], times) for both, times in parts]) for direction in (0, 1))


@lru_cache(maxsize=16)
def _losses(release: Release, sigma: float, step: float, least: float) -> tuple[GridLoss, GridLoss]:
    return release.losses(sigma, step, least)


def _step(epsilon: float) -> float:
    return min(max(_GRID.fine * epsilon, _GRID.steps[0]), max(_GRID.steps[1], _GRID.coarse * epsilon))


def _least(excess: Callable[[float], float], enough: float, ratio: float, accuracy: float) -> float:
    """About the least σ where `excess`, which falls with σ, is at most 0; `enough` if that is about the least.

    By Brent's method on log σ, from a bracket that is widened by squares of `ratio`.
    """
    high, low = enough, enough / ratio
    while (above := excess(low)) <= 0:
        ratio *= ratio
        high, low = low, low / ratio
        if not low > 1e-300:
            return high

    def at(log_sigma: float) -> float:
        # Where the search began σ is enough, whatever the grid makes of it.
        return min(excess(math.exp(log_sigma)), -1e-9) if log_sigma >= math.log(high) else excess(math.exp(log_sigma))

    root = math.exp(brentq(at, math.log(low), math.log(high), xtol=accuracy)) if above < math.inf else high
    while root < high and excess(root) > 0:
        root *= 1 + accuracy
    return min(root, high)


def coin_delta(epsilons: Vector, mu: float, rate: float, adding: bool) -> Vector:
    """δ of one release with a coin at each ε, which may be negative: H(γ) = sup P(S) − γ·Q(S) at γ = e^ε, for μ = norm/σ.

    With δ of the Gaussian mechanism at ε' = log(1 + (e^ε − 1)/q) it is q·δ(ε') for removing, and 1 − γ where γ ≤ 1 − q; for
    adding, at ε' = −log(1 + (e^(−ε) − 1)/q), it is (1 − γ·(1 − q))·δ(ε'), and 0 where γ ≥ 1/(1 − q).
    """
    signed = -epsilons if adding else epsilons
    least = math.log1p(-rate) if rate < 1 else -math.inf
    inside = signed > least
    e = signed[inside]
    shifted = e
    if rate < 1:
        near = np.log1p(np.expm1(np.minimum(e, 1.0)) / rate)
        far = e - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-np.maximum(e, 1.0)))
        shifted = np.where(e > 1.0, far, near)
    shifted = -shifted if adding else shifted
    gauss = ndtr(mu / 2 - shifted / mu) - np.exp(shifted + log_ndtr(-mu / 2 - shifted / mu))
    deltas = np.zeros_like(epsilons) if adding else -np.expm1(np.minimum(epsilons, 0.0))
    deltas[inside] = gauss * (-np.expm1(epsilons[inside] + least) if adding else rate)
    return np.asarray(np.clip(deltas, 0.0, 1.0))
