"""Balls-in-Bins by Monte Carlo: each user in one secret, uniform bin j of b, taking part in rounds j, j + b, …

The dominating pair is (1/b)Σ_j N(m_j, σ²I) and N(0, σ²I), in both orders (arXiv:2410.06266; C must not be negative). A search
on few draws, the same for every σ, proposes an answer; fresh draws, many more, confirm it with an upper confidence bound, or
it is raised and tried again with new ones. All tries together are wrong with probability at most `FAILURE`, over the choice
of the seed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from fedcgd.accounting import gaussian
from fedcgd.accounting.balls_in_bins.add import add_bound, sample_add
from fedcgd.accounting.balls_in_bins.draws import Bins, Sample
from fedcgd.accounting.balls_in_bins.gram import bin_gram
from fedcgd.accounting.balls_in_bins.remove import order_and_bound, sample_remove
from fedcgd.accounting.confidence import moment_radius, radius, stake, upper_bound
from fedcgd.mechanisms import Mechanism
from fedcgd.participation import Participation

FAILURE = 1e-6
SEED = 20260
METHOD = f"Monte Carlo over the privacy loss with an upper confidence bound, both directions, seed {SEED}"

Progress = Callable[[str], None]

LEAST_EPSILON = 1e-6  # nobody asks for less
LARGEST_SIGMA = 1e100  # beyond it amplification is left out: squares would overflow

_PILOT = 4096  # draws of one step of the search
_FEWEST, _MOST = 2**15, 2**21  # draws of a confirmation; the last step of the search takes half
_WORK = 3e8  # numbers drawn at most in one confirmation, where the matrix product is cheap
_PRECISION = 0.1  # of δ, that more draws should not be spent on; about 0.5 % of σ
_TRIES = 8
_SHARE = FAILURE / (2 * _TRIES)  # for each direction of each try
_FLATTEST, _STEEPEST = 2.0, 25.0  # −log δ over log σ or log ε, about


@dataclass(frozen=True)
class Direction:
    """What a pilot found about δ of removing or of adding a user at some (σ, ε)."""

    draw: Callable[[int, int], Sample]  # (count, seed)
    mean: float
    variance: float
    range: float
    square: float
    draws: int

    def bound(self, count: int) -> float:
        """About what `confirm` will return."""
        return self.mean + self._radius(count)

    def doubt(self, count: int) -> float:
        """A standard deviation of what `confirm` will return."""
        return math.sqrt(self.variance / self.draws + self.variance / count)

    def confirm(self, count: int, seed: int) -> float:
        """An upper bound on δ of this direction, wrong with probability at most `_SHARE`."""
        sample = self.draw(count, seed)
        if self._by_moment(count):
            return float(sample.values.mean()) + moment_radius(sample.square, count, _SHARE)
        bet = stake(self.variance, sample.range, count, _SHARE)
        return min(1.0, upper_bound(sample.values, sample.range, bet, _SHARE))

    def draws_for(self, delta: float, b: int) -> int:
        """How many draws: enough that the radius is a small part of δ, or of what is left to δ, within `_WORK`."""
        most = min(_MOST, max(_FEWEST, int(_WORK * (1 + b / 1000) / b)))
        room = delta - self.mean - 3 * math.sqrt(self.variance / self.draws)
        count = _FEWEST
        while count < most and self._radius(count) > max(_PRECISION * delta, room / 2):
            count *= 2
        return min(count, most)

    def _radius(self, count: int) -> float:
        betting = radius(self.variance, self.range, count, _SHARE)
        return moment_radius(self.square, count, _SHARE) if self._by_moment(count) else betting

    def _by_moment(self, count: int) -> bool:
        return moment_radius(self.square, count, _SHARE) < radius(self.variance, self.range, count, _SHARE)


@lru_cache(maxsize=2)
def bins_of(mechanism: Mechanism, participation: Participation, released: int) -> Bins:
    """The Gram matrix of the bins and what follows from it, of the first `released` rounds."""
    return Bins(bin_gram(mechanism, participation, released))


def calibrate(bins: Bins, *, epsilon: float, delta: float, progress: Progress) -> float:
    """A noise multiplier σ for which both directions are proven to be (ε, δ)-private, up to `FAILURE`."""
    highest = gaussian.sigma(epsilon=epsilon, delta=delta) * _reach(bins)  # without amplification
    if len(bins.gram) == 1 or highest > LARGEST_SIGMA:
        return highest
    return _least(lambda sigma: (sigma, epsilon), bins, delta, highest, progress, raise_by=1.002)


def epsilon(bins: Bins, *, sigma: float, delta: float, progress: Progress) -> float:
    """An ε for which both directions are proven to be (ε, δ)-private, up to `FAILURE`."""
    highest = gaussian.epsilon(sigma=sigma / _reach(bins), delta=delta)
    if len(bins.gram) == 1 or highest < LEAST_EPSILON:
        return highest
    return _least(
        lambda epsilon: (sigma, epsilon), bins, delta, highest, progress, raise_by=1.003, lowest=LEAST_EPSILON
    )


def delta(bins: Bins, *, sigma: float, epsilon: float) -> float:
    """A δ for which both directions are proven to be (ε, δ)-private, up to `FAILURE`."""
    highest = gaussian.delta(epsilon=epsilon, sigma=sigma / _reach(bins))
    if len(bins.gram) == 1 or highest <= gaussian.LEAST_DELTA or sigma > LARGEST_SIGMA or _is_hopeless(bins, sigma):
        return highest
    found = 0.0
    for i, direction in enumerate(_directions(bins, sigma, epsilon, 0.0, _PILOT)):
        count = direction.draws_for(direction.mean, len(bins.gram))
        found = max(found, direction.confirm(count, SEED + 2 + i))
    return min(highest, found)


def _reach(bins: Bins) -> float:
    """The sensitivity of the worst bin: without amplification, δ is that of a Gaussian with it, and never less with it."""
    return math.sqrt(float(np.diag(bins.gram).max()))


def _is_hopeless(bins: Bins, sigma: float) -> bool:
    """Whether so little noise makes the draws overflow."""
    return order_and_bound(bins.gram / sigma**2, 0.0)[1] == math.inf


def _least(
    at: Callable[[float], tuple[float, float]],
    bins: Bins,
    delta: float,
    highest: float,
    progress: Progress,
    *,
    raise_by: float,
    lowest: float = 0.0,
) -> float:
    """About the least x, or `lowest`, that is confirmed at (σ, ε) = at(x); `highest` if none is found below."""
    x = _search(at, bins, delta, highest, lowest, progress)
    last: tuple[float, float] | None = None  # x, and how far log δ was above
    for attempt in range(_TRIES):
        if x >= highest:
            break
        progress(f"{x:.6g}: to be confirmed")
        excess = -math.inf
        for i, direction in enumerate(_directions(bins, *at(x), delta, _PILOT)):
            found = direction.confirm(direction.draws_for(delta, len(bins.gram)), SEED + 2 + 2 * attempt + i)
            excess = max(excess, math.log(max(found, 1e-320) / delta))
            if excess > 0:
                break
        if excess <= 0:
            return x
        slope = _STEEPEST
        if last is not None and last[1] > excess:
            slope = min(max((last[1] - excess) / math.log(x / last[0]), _FLATTEST), _STEEPEST)
        last = (x, excess)
        x *= max(raise_by, math.exp(excess / slope))
    return highest


def _search(
    at: Callable[[float], tuple[float, float]],
    bins: Bins,
    delta: float,
    highest: float,
    lowest: float,
    progress: Progress,
) -> float:
    """About the least x, or `lowest`, whose confirmation at (σ, ε) = at(x) is likely."""

    def log_excess(x: float, *, fine: bool = False) -> float:
        """How far what `confirm` will return is above δ: about, or, if `fine`, probably no more."""
        if _is_hopeless(bins, at(x)[0]):
            return math.inf
        progress(f"{x:.6g}: tried")
        largest = -math.inf
        for direction in _directions(bins, *at(x), delta, _PILOT):
            count = direction.draws_for(delta, len(bins.gram))
            if fine:
                direction = _pilot(direction.draw, count // 2)
            doubt = direction.doubt(count) if fine else 0.0
            largest = max(largest, math.log((direction.bound(count) + doubt) / delta))
        return largest

    low, high = highest * 0.7, highest
    while log_excess(low) <= 0:
        low, high = low * 0.7, low
        if low < lowest:
            return high
    while high / low > 1.003:
        middle = math.sqrt(low * high)
        if log_excess(middle) <= 0:
            high = middle
        else:
            low = middle
    # One step of Newton's method, with the slope that the same few draws show.
    slope = (log_excess(high * 1.02) - log_excess(high / 1.02)) / (2 * math.log(1.02))
    return min(highest, high * math.exp(min(log_excess(high, fine=True) / max(-slope, 3.0), 0.1)))


def _directions(bins: Bins, sigma: float, epsilon: float, delta: float, draws: int) -> list[Direction]:
    """A pilot of so many draws for each direction that may exceed δ."""
    samplers: list[Callable[[int, int], Sample]] = [partial(sample_remove, bins, sigma, epsilon)]
    if add_bound(bins.gram / sigma**2, epsilon) > delta:
        samplers.append(partial(sample_add, bins, sigma, epsilon))
    return [_pilot(draw, draws) for draw in samplers]


def _pilot(draw: Callable[[int, int], Sample], draws: int) -> Direction:
    sample = draw(draws, SEED)
    mean, variance = float(sample.values.mean()), float(sample.values.var())
    return Direction(draw, mean, variance, sample.range, sample.square, draws)
