"""δ of adding a user, E_Q[(1 − a·S)₊] with a = e^ε, from how often S is small.

log S is a convex function of the noise y: the logarithm of a sum of exponentials that are linear in y. So the sets {log S ≤ u}
are convex, and by the inequality of Ehrhard (1983) h(u) = Φ⁻¹(Q(log S ≤ u)) is a concave function of u. Below u₁ < u₂ it is at
most

    h(u) ≤ h₁ − (u₁ − u)·(h₂ − h₁)/(u₂ − u₁),   h₁ ≥ h(u₁), h₂ ≤ h(u₂),

a line, as if log S were normal there; and both h₁ and h₂ follow from confidence bounds on two means. So draws of the noise where
it usually is bound events that are too rare to be drawn: δ_add = ∫ Q(log S ≤ u)·e^(u+ε) du over u ≤ −ε. Where they are frequent
enough, the mean of (1 − a·S)₊ is bounded instead.

Most of what log S varies by is what the noise is along v = C·1. So that part of a draw is not drawn but integrated, as removing
does: over t, standard normal, by the trapezoid rule with a random start, whose mean is right. log S grows with t, so that what is
left out above the highest t is at most what it is there; |t| > 6 is added as a bound. So each draw gives a number in [0, 1]
whose mean is Q(log S ≤ u), with a small part of the variance of one that is 0 or 1.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, ndtri

from fedcgd.accounting.confidence import radius, stake, upper_bound
from fedcgd.accounting.random_participation.draws import Seed, run_in_blocks
from fedcgd.accounting.random_participation.law import Columns, Likelihood
from fedcgd.mechanisms.mechanism import Matrix, Vector

_LOW, _HIGH = (0.003, 0.01, 0.03, 0.1), (0.1, 0.2, 0.35, 0.5, 0.7)  # probabilities that u₁ and u₂ may have
_HIGHEST, _POINTS = 3, 9  # of the integral: the first point is up to 1 below the highest, and they are 1 apart
_LEFT_OUT = 2e-8  # at least the sum of the rule below the last point, 7e-9, and what all of it differs from 1 by, 6e-9

_Part = tuple[float, float, float]
"""u, and the mean and variance of what lines have at or below it."""


@dataclass(frozen=True, eq=False)
class LogRatios:
    """Bounds on log S at the points of lines along C·1, one line for each of some independent draws under Q; each shape
    (points, draws).
    """

    chances: Matrix
    """What each point stands for; the first one for all that the others leave of 1."""
    lower: Matrix
    upper: Matrix
    """Infinite at the first point, where it would not hold for all that this stands for."""

    def share(self, counted: Matrix | NDArray[np.bool_]) -> Vector:
        """What each line has of something that does not grow along it."""
        return np.asarray((self.chances * counted).sum(axis=0))

    @cached_property
    def lines(self) -> list[tuple[_Part, _Part]]:
        """What may be chosen for u₁ and u₂."""
        lows = [_part(u, self.share(self.lower <= u)) for u in self._quantiles(self.lower, _LOW)]
        highs = [_part(u, self.share(self.upper <= u)) for u in self._quantiles(self.upper, _HIGH)]
        return [(one, two) for one in lows for two in highs if one[0] < two[0] < np.inf]

    def _quantiles(self, bounds: Matrix, chances: tuple[float, ...]) -> list[float]:
        order = np.argsort(bounds, axis=None)
        sums = np.cumsum(self.chances.ravel()[order]) / bounds.shape[1]
        return [float(u) for u in bounds.ravel()[order[np.searchsorted(sums, chances)]]]


def _part(u: float, values: Vector) -> _Part:
    return u, float(values.mean()), float(values.var())


def draw_log_ratios(columns: Columns, likelihood: Likelihood, sigma: float, count: int, seed: Seed) -> LogRatios:
    """`count` draws."""
    n = columns.rounds
    slope, _, square = columns.lifted(np.arange(n, dtype=np.int32)[None, :, None], np.zeros((n, 1)))
    length = float(np.sqrt(square[0]))
    slope /= length * sigma
    fall = np.exp(-slope)  # of the weights from one point to the next

    def block(generator: np.random.Generator, size: int) -> tuple[Matrix, Matrix, Matrix]:
        x = columns.noise(generator, size)
        highest = _HIGHEST - generator.random(size)
        along = x.sum(axis=0) / length
        x /= sigma
        x += slope * (highest - along)
        # Exponents beyond 700 would be capped. Under Q each exponential has mean 1 at most; the first points have 226 times that.
        weights = likelihood.weights(x)
        chances, lower, upper = np.empty((3, _POINTS, size))
        for point in range(_POINTS):
            lower[point], upper[point] = (np.log(bound) for bound in likelihood.bounds(weights))
            chances[point] = np.exp(-((highest - point) ** 2) / 2) / math.sqrt(2 * math.pi)
            weights *= fall
        chances[0], upper[0] = 1 - chances[1:].sum(axis=0), np.inf
        return chances, lower - columns.rounding, upper + columns.rounding

    blocks = run_in_blocks(block, count, n, seed)
    return LogRatios(*(np.concatenate(parts, axis=1) for parts in zip(*blocks, strict=True)))


@dataclass(frozen=True)
class AddDirection:
    """How δ_add at one (σ, ε) will be bounded by draws that are not yet drawn: by the line through u₁, u₂, or by the mean."""

    epsilon: float
    failure: float
    line: tuple[float, float] | None
    """(u₁, u₂)."""
    variances: tuple[float, float]
    """About, of what draws say of u₁ and of u₂; or of δ_add, twice."""
    mean: float
    """About δ_add."""
    expected: float
    """About the bound that `count` draws will give, with a standard error of the pilot's."""

    @staticmethod
    def from_pilot(pilot: LogRatios, epsilon: float, count: int, failure: float) -> "AddDirection":
        """As few draws suggest."""
        few = pilot.lower.shape[1]

        def margin(variance: float, failure: float) -> float:
            return radius(variance, 1.0, count, failure) + math.sqrt(variance / few)

        _, mean, variance = _part(-epsilon, pilot.share(_losses(pilot.lower, epsilon)))
        variance = max(variance, 1e-3 / few)  # few draws may have seen none
        best = AddDirection(epsilon, failure, None, (variance, variance), mean, mean + margin(variance, failure))
        for (u1, low, one), (u2, high, two) in pilot.lines:
            if u1 >= -epsilon:
                first, second = low + margin(one, failure / 2), high - margin(two, failure / 2)
                found = _extrapolated(epsilon, (u1, u2), first, second)
                if found < best.expected:
                    best = AddDirection(epsilon, failure, (u1, u2), (one, two), mean, found)
        return best

    def confirm(self, draws: LogRatios) -> float:
        """An upper bound on δ_add that is wrong with probability at most `failure`, from draws that the pilot did not see."""

        def bound(values: Vector, variance: float, failure: float) -> float:
            return upper_bound(values, 1.0, stake(variance, 1.0, len(values), failure), failure)

        if self.line is None:
            losses = draws.share(_losses(draws.lower, self.epsilon))
            return min(1.0, bound(losses, self.variances[0], self.failure) + _LEFT_OUT)
        below, above = draws.share(draws.lower <= self.line[0]), 1 - draws.share(draws.upper <= self.line[1])
        first, second = (bound(*each, self.failure / 2) for each in zip((below, above), self.variances, strict=True))
        return _extrapolated(self.epsilon, self.line, first + _LEFT_OUT, 1 - second)


def _losses(log_ratio: Matrix, epsilon: float) -> Matrix:
    return np.asarray(-np.expm1(np.minimum(log_ratio + epsilon, 0.0)))


def _extrapolated(epsilon: float, line: tuple[float, float], first: float, second: float) -> float:
    """The integral under the line through `first` ≥ Q(log S ≤ u₁) and `second` ≤ Q(log S ≤ u₂)."""
    if not 0 < first < second < 1:
        return 1.0
    h1, h2 = float(ndtri(first)), float(ndtri(second))
    slope = (h2 - h1) / (line[1] - line[0])
    # log S as if normal: with standard deviation s = 1/slope, and Q(log S ≤ −ε) = Φ(−d).
    d, s = -(h1 - slope * (line[0] + epsilon)), 1 / slope
    if d < -5:
        return 1.0
    return math.exp(-d * d / 2) / 2 * float(erfcx(d / math.sqrt(2)) - erfcx((d + s) / math.sqrt(2))) * (1 + 1e-9)
