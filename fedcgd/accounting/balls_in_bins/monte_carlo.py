"""Balls-in-Bins by Monte Carlo: each user in one secret, uniform bin j of b, taking part in rounds j, j + b, …

The dominating pair is (1/b)Σ_j N(m_j, σ²I) and N(0, σ²I), in both orders, for C without negative entries (Choquette-Choo,
Ganesh, Haque, Steinke and Thakurta, "Near Exact Privacy Amplification for Matrix Mechanisms", 2024, arXiv:2410.06266). A search
on few draws, the same for every σ, proposes an answer; fresh draws, many more, confirm it with an upper confidence bound, or it
is raised and tried again with new ones. All tries together are wrong with probability at most β = `failure_probability(δ)`, and
β is part of δ: what is confirmed is δ − β.

The probability is over the seed, and the seed is a hash of the question (the Gram matrix, ε or σ, δ): nobody chooses it, the same
question has the same answer everywhere, and different questions have independent draws. So if SHA-256 is as good as random, N
questions that were ever asked have a wrong answer among them with probability at most N·β, and to search for one that errs takes
about 1/β = 10¹² calibrations. Whoever wants no such clause takes the method without draws.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fedcgd.accounting import gaussian
from fedcgd.accounting.balls_in_bins.add import add_bound, sample_add
from fedcgd.accounting.balls_in_bins.draws import Bins, Sample, Seed
from fedcgd.accounting.balls_in_bins.remove import order_and_bound, sample_remove
from fedcgd.accounting.base import Bound, Progress
from fedcgd.accounting.confidence import moment_radius, radius, stake, upper_bound
from fedcgd.accounting.guarantee import LEAST_DELTA

METHOD = (
    "Monte Carlo over the privacy loss with an upper confidence bound, both directions, seed derived from the question"
)

LEAST_EPSILON = 1e-6  # nobody asks for less
LARGEST_SIGMA = 1e100  # beyond it amplification is left out: squares would overflow

_PILOT = 4096  # draws of one step of the search
_FEWEST, _MOST = 2**15, 2**21  # draws of a confirmation; the last step of the search takes half
_WORK = 3e8  # numbers drawn at most in one confirmation, where the matrix product is cheap
_PRECISION = 0.1  # of δ, that more draws should not be spent on; about 0.5 % of σ
_TRIES = 8
_FLATTEST, _STEEPEST = 2.0, 25.0  # −log δ over log σ or log ε, about


def failure_probability(delta: float) -> float:
    """β for this δ: small beside it, and beside all the questions that anybody asks."""
    return min(1e-12, delta / 100)


@dataclass(frozen=True)
class Direction:
    """What a pilot found about δ of removing or of adding a user at some (σ, ε)."""

    draw: Callable[[int, Seed], Sample]  # (count, seed)
    mean: float
    variance: float
    range: float
    square: float
    draws: int
    failure: float  # of a confirmation

    def bound(self, count: int) -> float:
        """About what `confirm` will return."""
        return self.mean + self._radius(count)

    def doubt(self, count: int) -> float:
        """A standard deviation of what `confirm` will return."""
        return math.sqrt(self.variance / self.draws + self.variance / count)

    def confirm(self, count: int, seed: Seed) -> float:
        """An upper bound on δ of this direction, wrong with probability at most `failure`."""
        sample = self.draw(count, seed)
        if self._by_moment(count):
            return float(sample.values.mean()) + moment_radius(sample.square, count, self.failure)
        bet = stake(self.variance, sample.range, count, self.failure)
        return min(1.0, upper_bound(sample.values, sample.range, bet, self.failure))

    def draws_for(self, delta: float, b: int) -> int:
        """How many draws: enough that the radius is a small part of δ, or of what is left to δ, within `_WORK`."""
        most = min(_MOST, max(_FEWEST, int(_WORK * (1 + b / 1000) / b)))
        room = delta - self.mean - 3 * math.sqrt(self.variance / self.draws)
        count = _FEWEST
        while count < most and self._radius(count) > max(_PRECISION * delta, room / 2):
            count *= 2
        return min(count, most)

    def _radius(self, count: int) -> float:
        betting = radius(self.variance, self.range, count, self.failure)
        return moment_radius(self.square, count, self.failure) if self._by_moment(count) else betting

    def _by_moment(self, count: int) -> bool:
        return moment_radius(self.square, count, self.failure) < radius(self.variance, self.range, count, self.failure)


def calibrate(bins: Bins, *, epsilon: float, delta: float, progress: Progress) -> Bound:
    """A noise multiplier σ for which both directions are proven to be (ε, δ)-private."""
    highest = gaussian.sigma(epsilon=epsilon, delta=delta) * _reach(bins)  # without amplification
    if len(bins.gram) == 1 or highest > LARGEST_SIGMA:
        return Bound(highest, METHOD)
    search = _Search(bins, delta, highest, _seed("sigma", bins, epsilon, delta), progress)
    return search.least(lambda sigma: (sigma, epsilon), raise_by=1.002)


def epsilon(bins: Bins, *, sigma: float, delta: float, progress: Progress) -> Bound:
    """An ε for which both directions are proven to be (ε, δ)-private."""
    highest = gaussian.epsilon(sigma=sigma / _reach(bins), delta=delta)
    if len(bins.gram) == 1 or highest < LEAST_EPSILON:
        return Bound(highest, METHOD)
    search = _Search(bins, delta, highest, _seed("epsilon", bins, sigma, delta), progress)
    return search.least(lambda epsilon: (sigma, epsilon), raise_by=1.003, lowest=LEAST_EPSILON)


def delta(bins: Bins, *, sigma: float, epsilon: float) -> Bound:
    """A δ for which both directions are proven to be (ε, δ)-private."""
    highest = gaussian.delta(epsilon=epsilon, sigma=sigma / _reach(bins))
    if len(bins.gram) == 1 or highest <= LEAST_DELTA or sigma > LARGEST_SIGMA or _is_hopeless(bins, sigma):
        return Bound(highest, METHOD)
    seed = _seed("delta", bins, sigma, epsilon)
    pilots = _directions(bins, sigma, epsilon, 0.0, 1.0, seed)
    # As small as the answer is expected to be asks; the draws that confirm it know nothing of the pilot's.
    failure = failure_probability(max(max(pilot.mean for pilot in pilots), LEAST_DELTA))
    found = 0.0
    for i, pilot in enumerate(pilots):
        direction = replace(pilot, failure=failure / len(pilots))
        count = direction.draws_for(0.8 * direction.mean, len(bins.gram))  # no search follows: be closer
        found = max(found, direction.confirm(count, (seed, 1 + i)))
    found += failure
    return Bound(found, METHOD, failure_probability=failure) if found < highest else Bound(highest, METHOD)


def _seed(asked: str, bins: Bins, *numbers: float) -> int:
    """256 bits that follow from the question.

    Of the Gram matrix its diagonal and first row count, to six digits: what processors may differ in is far below.
    """
    scale = float(bins.gram.max())
    digest = hashlib.sha256(
        " ".join([asked, str(len(bins.gram)), f"{scale:.6e}", *(float(x).hex() for x in numbers)]).encode()
    )
    for part in (np.diag(bins.gram), bins.gram[0]):
        digest.update(np.round(part / scale * 1e6).astype("<i8").tobytes())
    return int.from_bytes(digest.digest(), "big")


def _reach(bins: Bins) -> float:
    """The sensitivity of the worst bin: without amplification, δ is that of a Gaussian with it, and never less with it."""
    return math.sqrt(float(np.diag(bins.gram).max()))


def _is_hopeless(bins: Bins, sigma: float) -> bool:
    """Whether so little noise makes the draws overflow."""
    return order_and_bound(bins.gram / sigma**2, 0.0)[1] == math.inf


@dataclass(frozen=True)
class _Search:
    """The least x (σ or ε) for which both directions are confirmed to be private at δ, less what a confirmation may fail."""

    bins: Bins
    delta: float
    highest: float
    seed: int
    progress: Progress

    def least(self, at: Callable[[float], tuple[float, float]], *, raise_by: float, lowest: float = 0.0) -> Bound:
        """About the least x, or `lowest`, that is confirmed at (σ, ε) = at(x); `highest` if none is found below."""
        x = self._proposed(at, lowest)
        last: tuple[float, float] | None = None  # x, and how far log δ was above
        for attempt in range(_TRIES):
            if x >= self.highest:
                break
            self.progress(f"{x:.6g}: to be confirmed")
            excess = -math.inf
            for i, direction in enumerate(self._directions(at(x))):
                count = direction.draws_for(self._goal, len(self.bins.gram))
                found = direction.confirm(count, (self.seed, 1 + 2 * attempt + i))
                excess = max(excess, math.log(max(found, 1e-320) / self._goal))
                if excess > 0:
                    break
            if excess <= 0:
                return Bound(x, METHOD, failure_probability=failure_probability(self.delta))
            slope = _STEEPEST
            if last is not None and last[1] > excess:
                slope = min(max((last[1] - excess) / math.log(x / last[0]), _FLATTEST), _STEEPEST)
            last = (x, excess)
            x *= max(raise_by, math.exp(excess / slope))
        return Bound(self.highest, METHOD)

    @property
    def _goal(self) -> float:
        return self.delta - failure_probability(self.delta)

    def _proposed(self, at: Callable[[float], tuple[float, float]], lowest: float) -> float:
        """About the least x, or `lowest`, whose confirmation at (σ, ε) = at(x) is likely."""

        def log_excess(x: float, *, fine: bool = False) -> float:
            """How far what `confirm` will return is above δ: about, or, if `fine`, probably no more."""
            if _is_hopeless(self.bins, at(x)[0]):
                return math.inf
            self.progress(f"{x:.6g}: tried")
            largest = -math.inf
            for direction in self._directions(at(x)):
                count = direction.draws_for(self._goal, len(self.bins.gram))
                if fine:
                    direction = _pilot(direction.draw, count // 2, self.seed, direction.failure)
                doubt = direction.doubt(count) if fine else 0.0
                largest = max(largest, math.log((direction.bound(count) + doubt) / self._goal))
            return largest

        low, high = self.highest * 0.7, self.highest
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
        return min(self.highest, high * math.exp(min(log_excess(high, fine=True) / max(-slope, 3.0), 0.1)))

    def _directions(self, at: tuple[float, float]) -> list[Direction]:
        failure = failure_probability(self.delta) / (2 * _TRIES)  # of each direction of each try
        return _directions(self.bins, *at, self._goal, failure, self.seed)


def _directions(bins: Bins, sigma: float, epsilon: float, delta: float, failure: float, seed: int) -> list[Direction]:
    """A pilot for each direction that may exceed δ."""
    samplers: list[Callable[[int, Seed], Sample]] = [partial(sample_remove, bins, sigma, epsilon)]
    if add_bound(bins.gram / sigma**2, epsilon) > delta:
        samplers.append(partial(sample_add, bins, sigma, epsilon))
    return [_pilot(draw, _PILOT, seed, failure) for draw in samplers]


def _pilot(draw: Callable[[int, Seed], Sample], draws: int, seed: int, failure: float) -> Direction:
    sample = draw(draws, (seed, 0))
    mean, variance = float(sample.values.mean()), float(sample.values.var())
    return Direction(draw, mean, variance, sample.range, sample.square, draws, failure)
