"""δ of adding a user, E_Q[(1 − a·S)₊] with a = e^ε, from how often S is small.

log S is a convex function of the noise y: the logarithm of a sum of exponentials that are linear in y. So the sets {log S ≤ u}
are convex, and by the inequality of Ehrhard (1983) h(u) = Φ⁻¹(Q(log S ≤ u)) is a concave function of u. Below u₁ < u₂ it is at
most

    h(u) ≤ h₁ − (u₁ − u)·(h₂ − h₁)/(u₂ − u₁),   h₁ ≥ h(u₁), h₂ ≤ h(u₂),

a line, as if log S were normal there; and both h₁ and h₂ follow from counts. So draws of the noise where it usually is bound
events that are too rare to be drawn: δ_add = ∫ Q(log S ≤ u)·e^(u+ε) du over u ≤ −ε. Where they are frequent enough, the mean of
(1 − a·S)₊ is bounded instead.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import betainccinv, betaincinv, erfcx, ndtri

from fedcgd.accounting.confidence import radius, stake, upper_bound
from fedcgd.accounting.random_participation.draws import Seed, run_in_blocks
from fedcgd.accounting.random_participation.law import Columns, Likelihood
from fedcgd.mechanisms.mechanism import Vector

_LOW, _HIGH = (0.003, 0.01, 0.03, 0.1), (0.1, 0.2, 0.35, 0.5, 0.7)  # probabilities that u₁ and u₂ may have


@dataclass(frozen=True, eq=False)
class LogRatios:
    """Bounds on log S of independent draws under Q; each shape (draws,)."""

    lower: Vector
    upper: Vector


def draw_log_ratios(
    columns: Columns,
    likelihood: Likelihood,
    sigma: float,
    count: int,
    seed: Seed,
    is_enough: Callable[[LogRatios], bool] = lambda _: False,
) -> LogRatios:
    """`count` draws; a quarter of them if these `is_enough` to say what was asked."""

    def block(generator: np.random.Generator, size: int) -> tuple[Vector, Vector]:
        x = columns.noise(generator, size)
        x /= sigma
        lower, upper = likelihood.bounds(likelihood.weights(x))
        return np.log(lower) - columns.rounding, np.log(upper) + columns.rounding

    def together(blocks: list[tuple[Vector, Vector]]) -> LogRatios:
        return LogRatios(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))

    return together(run_in_blocks(block, count, columns.rounds, seed, lambda some: is_enough(together(some))))


@dataclass(frozen=True)
class AddDirection:
    """How δ_add at one (σ, ε) will be bounded by draws that are not yet drawn: by the line through u₁, u₂, or by the mean."""

    epsilon: float
    failure: float
    line: tuple[float, float] | None
    """(u₁, u₂)."""
    variance: float
    mean: float
    """About δ_add."""
    expected: float
    """About the bound that `count` draws will give."""

    @staticmethod
    def from_pilot(pilot: LogRatios, epsilon: float, count: int, failure: float) -> "AddDirection":
        """As few draws suggest."""
        values = _values(pilot.lower, epsilon)
        mean, variance = float(values.mean()), float(values.var())
        variance = max(variance, 1e-3 / len(values))  # few draws may have seen none
        best = AddDirection(epsilon, failure, None, variance, mean, mean + radius(variance, 1.0, count, failure))
        for low in _LOW:
            u1 = max(float(np.quantile(pilot.lower, low)), -epsilon)
            p1 = max(float((pilot.lower <= u1).mean()), low)
            for high in _HIGH:
                u2 = float(np.quantile(pilot.upper, high))
                if high < 1.5 * p1 or u2 <= u1:
                    continue
                found = _extrapolated(epsilon, (u1, u2), (p1 * count, high * count), count, failure)
                if found < best.expected:
                    best = AddDirection(epsilon, failure, (u1, u2), variance, min(mean, found) or found, found)
        return best

    def confirm(self, draws: LogRatios) -> float:
        """An upper bound on δ_add that is wrong with probability at most `failure`, from draws that the pilot did not see."""
        return self.projected(draws, len(draws.lower))

    def projected(self, draws: LogRatios, count: int) -> float:
        """What `confirm` will say, about, once there are `count` draws like these."""
        times = count / len(draws.lower)
        if self.line is None:
            bet = stake(self.variance, 1.0, count, self.failure)
            return upper_bound(_values(draws.lower, self.epsilon), 1.0, bet, self.failure ** (1 / times))
        counts = times * int((draws.lower <= self.line[0]).sum()), times * int((draws.upper <= self.line[1]).sum())
        return _extrapolated(self.epsilon, self.line, counts, count, self.failure)


def _values(log_ratio: Vector, epsilon: float) -> Vector:
    return np.asarray(-np.expm1(np.minimum(log_ratio + epsilon, 0.0)))


def _extrapolated(
    epsilon: float, line: tuple[float, float], counts: tuple[float, float], count: int, failure: float
) -> float:
    """The integral under the line through confidence bounds (Clopper and Pearson, 1934) on Q(log S ≤ u₁) and Q(log S ≤ u₂)."""
    first = float(betainccinv(counts[0] + 1, max(count - counts[0], 1e-9), failure / 2))
    second = float(betaincinv(max(counts[1], 1e-9), count - counts[1] + 1, failure / 2))
    if not 0 < first < second < 1:
        return 1.0
    h1, h2 = float(ndtri(first)), float(ndtri(second))
    slope = (h2 - h1) / (line[1] - line[0])
    # log S as if normal: with standard deviation s = 1/slope, and Q(log S ≤ −ε) = Φ(−d).
    d, s = -(h1 - slope * (line[0] + epsilon)), 1 / slope
    if d < -5:
        return 1.0
    return math.exp(-d * d / 2) / 2 * float(erfcx(d / math.sqrt(2)) - erfcx((d + s) / math.sqrt(2))) * (1 + 1e-9)
