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
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import numpy as np

from fedcgd.accounting import gaussian
from fedcgd.accounting.accountant import Bound, Progress
from fedcgd.accounting.balls_in_bins.add import add_bound, sample_add
from fedcgd.accounting.balls_in_bins.draws import Bins, Sample, Seed
from fedcgd.accounting.balls_in_bins.remove import SHARES, remove_bound, sample_remove, seconds_of_draw
from fedcgd.accounting.confidence import cost_of_cut, cut, radius, stake, upper_bound
from fedcgd.accounting.guarantee import LEAST_DELTA
from fedcgd.mechanisms.mechanism import Vector

METHOD = (
    "Monte Carlo over the privacy loss with an upper confidence bound, both directions, seed derived from the question"
)

LEAST_EPSILON = 1e-6  # nobody asks for less
LARGEST_SIGMA = 1e6  # over the sensitivity; beyond it amplification is left out, and rounding soon outweighs the loss

Draw = Callable[[int, Seed], Sample]  # (count, seed)

_PILOT = 4096  # draws of one step of the search
_FEWEST, _MOST = 2**16, 2**21  # draws of a confirmation; the last step of the search takes half
_WORK = 5e8  # numbers drawn at most in one confirmation, where the matrix product is cheap
_PRECISION = 0.09  # of δ, that more draws should not be spent on; about 0.5 % of σ
_LONGEST = 60.0  # processor seconds, about, for one direction of a δ
_NEGLIGIBLE = 1e-20  # a δ that need not be found closely
_TRIES = 8
_STEPS = 12  # of a search and its confirmation, about
_NEAR = 0.6  # part of δ below which a direction needs no closer look
_DOUBTS = 1.5  # standard deviations: a confirmation that fails costs more than they do in σ
_CLOSE = 0.1  # of log δ: near enough for Newton's method
_FLATTEST, _STEEPEST = 2.0, 25.0  # −log δ over log σ or log ε, about


def failure_probability(delta: float) -> float:
    """β for this δ: small beside it, and beside all the questions that anybody asks."""
    return min(1e-12, delta / 100)


@dataclass(frozen=True)
class Moments:
    """Of some draws."""

    mean: float
    variance: float
    count: int

    @staticmethod
    def of(draws: Vector) -> "Moments":
        """Of these."""
        return Moments(float(draws.mean()), float(draws.var()), len(draws))


@dataclass(frozen=True)
class Direction:
    """What a pilot found about δ of removing or of adding a user at some (σ, ε)."""

    draw: Draw
    values: Moments
    shares: Moments | None
    range: float
    square: float
    failure: float  # of a confirmation

    @property
    def mean(self) -> float:
        """About δ."""
        return self.values.mean * self._share

    def bound(self, count: int) -> float:
        """About what `confirm` will return."""
        return (self.values.mean + self._radius(count)) * (self._share + self._radius_of_share(count))

    def doubt(self, count: int) -> float:
        """A standard deviation of what `confirm` will return."""
        return math.sqrt(self.values.variance * (1 / self.values.count + 1 / count)) * self._share

    def confirm(self, count: int, seed: Seed) -> float:
        """An upper bound on δ of this direction, wrong with probability at most `failure`."""
        sample = self.draw(count, seed)
        drawn, failure = len(sample.values), self._failure_of_one
        at = cut(sample.range, sample.square, drawn, failure)
        bet = stake(self.values.variance, at, drawn, failure)
        mean = upper_bound(np.minimum(sample.values, at), at, bet, failure)
        mean += cost_of_cut(at, sample.range, sample.square)
        if self.shares is not None and sample.shares is not None:
            bet = stake(self.shares.variance, 1.0, len(sample.shares), failure)
            mean *= upper_bound(sample.shares, 1.0, bet, failure)
        return min(1.0, mean)

    def draws_for(self, delta: float, b: int) -> int:
        """How many draws: enough that the radius is a small part of δ, or leaves some of much room below it, within `_WORK`."""
        most = min(_MOST, max(_FEWEST, int(_WORK * (1 + b / 1000) / b)))
        room = delta - self.mean - 3 * self._share * math.sqrt(self.values.variance / self.values.count)
        count = _FEWEST
        enough = max(
            _PRECISION * delta, 0.8 * room if room > 0.4 * delta else 0.0
        )  # far from δ precision is for nothing
        while count < most and self.bound(count) - self.mean > enough:
            count += count // 4
        return min(count, most)

    @property
    def _share(self) -> float:
        return 1.0 if self.shares is None else self.shares.mean

    @property
    def _failure_of_one(self) -> float:
        """Of the bound on one of the two means."""
        return self.failure if self.shares is None else self.failure / 2

    def _radius(self, count: int) -> float:
        failure = self._failure_of_one
        at = cut(self.range, self.square, count, failure)
        return radius(self.values.variance, at, count, failure) + cost_of_cut(at, self.range, self.square)

    def _radius_of_share(self, count: int) -> float:
        if self.shares is None:
            return 0.0
        drawn = max(1, min(SHARES, int(count * self.shares.count / self.values.count)))
        return min(1 - self._share, radius(self.shares.variance, 1.0, drawn, self._failure_of_one))


def calibrate(bins: Bins, *, epsilon: float, delta: float, progress: Progress) -> Bound:
    """A noise multiplier σ for which both directions are proven to be (ε, δ)-private."""
    highest = gaussian.sigma(epsilon=epsilon, delta=delta) * _reach(bins)  # without amplification
    if len(bins.gram) == 1 or highest > LARGEST_SIGMA * _reach(bins):
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


def delta(bins: Bins, *, sigma: float, epsilon: float, progress: Progress) -> Bound:
    """A δ for which both directions are proven to be (ε, δ)-private."""
    highest = gaussian.delta(epsilon=epsilon, sigma=sigma / _reach(bins))
    needless = len(bins.gram) == 1 or highest <= LEAST_DELTA or sigma > LARGEST_SIGMA * _reach(bins)
    if needless or _is_hopeless(bins, sigma):
        return Bound(highest, METHOD)
    seed, gram, start = _seed("delta", bins, sigma, epsilon), bins.gram / sigma**2, time.perf_counter()
    proven = {"remove": math.exp(min(remove_bound(gram, epsilon), 0.0)), "add": add_bound(gram, epsilon)}
    pilots = {name: _pilot(draw, _PILOT, seed, 1.0) for name, draw in _samplers(bins, sigma, epsilon, 0.0).items()}
    seconds = (time.perf_counter() - start) / len(pilots) / _PILOT  # a draw
    # As small as the answer is expected to be asks; the draws that confirm it know nothing of the pilot's.
    failure = failure_probability(max(max(pilot.mean for pilot in pilots.values()), LEAST_DELTA))
    directions = {name: replace(pilot, failure=failure / len(pilots)) for name, pilot in pilots.items()}
    counts = {}
    for name, found in directions.items():  # no search follows: be closer than for one, but not where nobody looks
        count = found.draws_for(0.8 * found.mean, len(gram)) if found.bound(_FEWEST) > _NEGLIGIBLE else _FEWEST
        cost = seconds_of_draw(bins, sigma, epsilon) if name == "remove" else 0.0
        counts[name] = max(_FEWEST, min(count, int(_LONGEST / max(cost, 1e-9))))
    likely = max(min(proven[name], found.bound(counts[name])) for name, found in directions.items())
    if likely >= highest:
        return Bound(highest, METHOD)
    result, risk = 0.0, 0.0
    for i, (name, direction) in enumerate(directions.items()):
        if proven[name] <= likely:  # then draws bring nothing, or nothing that shows beside the other direction
            result = max(result, proven[name])
            continue
        progress(f"δ about {likely:.2g}: {counts[name]:,} draws to confirm it, about {seconds * counts[name]:.0f} s")
        result, risk = max(result, min(proven[name], direction.confirm(counts[name], (seed, 1 + i)))), failure
    result += risk
    return Bound(result, METHOD, failure_probability=risk) if result < highest else Bound(highest, METHOD)


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
    return remove_bound(bins.gram / sigma**2, 0.0) == math.inf


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
        x, pilots = self._proposed(at, lowest)
        last: tuple[float, float] | None = None  # x, and how far log δ was above
        for attempt in range(_TRIES):
            if x >= self.highest:
                break
            self.progress(f"{x:.6g}, to be confirmed, {_STEPS - 1} of about {_STEPS}")
            excess = -math.inf
            for i, (name, draw) in enumerate(_samplers(self.bins, *at(x), self._goal).items()):
                direction = replace(pilots[name], draw=draw) if name in pilots else self._pilot(draw, _PILOT)
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

    def _proposed(
        self, at: Callable[[float], tuple[float, float]], lowest: float
    ) -> tuple[float, dict[str, Direction]]:
        """About the least x, or `lowest`, whose confirmation at (σ, ε) = at(x) is likely; and pilots for it."""
        pilots: dict[str, Direction] = {}
        tries = count(1)

        def log_excess(x: float, *, fine: bool = False) -> float:
            """How far what `confirm` will return is above δ: about, or, if `fine`, probably no more."""
            if _is_hopeless(self.bins, at(x)[0]):
                return math.inf
            number = next(tries)
            self.progress(f"{x:.6g}, {number} of about {max(_STEPS, number + 1)}")
            largest = -math.inf
            for name, draw in _samplers(self.bins, *at(x), self._goal).items():
                direction = self._pilot(draw, _PILOT)
                count = direction.draws_for(self._goal, len(self.bins.gram))
                doubt = 0.0
                if fine:
                    if direction.bound(count) > _NEAR * self._goal:
                        direction = self._pilot(draw, count // 4)
                        count = direction.draws_for(self._goal, len(self.bins.gram))
                    pilots[name] = direction
                    doubt = _DOUBTS * direction.doubt(count)
                largest = max(largest, math.log((direction.bound(count) + doubt) / self._goal))
            return largest

        low, high = self.highest * 0.7, self.highest
        below = -math.inf  # at `high`, and above at `low`
        while (above := log_excess(low)) <= 0:
            low, high, below = low * 0.7, low, above
            if low < lowest:
                return high, pilots
        while high / low > 1.01 and below < -_CLOSE:
            width = math.log(high / low)
            # The secant, but well inside, so that both ends come nearer.
            part = above / (above - below) if math.isfinite(above - below) else 0.5
            middle = low * math.exp(width * min(max(part + 0.02, 0.1), 0.9))
            found = log_excess(middle)
            if found <= 0:
                high, below = middle, found
            else:
                low, above = middle, found
        # One step of Newton's method, with a slope over more than the scatter of few draws.
        slope = (below - log_excess(high * 1.06)) / math.log(1.06) if math.isfinite(below) else math.inf
        step = min(log_excess(high, fine=True) / min(max(slope, 3.0), _STEEPEST), 0.1)
        return min(self.highest, high * math.exp(step)), pilots

    def _pilot(self, draw: Draw, count: int) -> Direction:
        return _pilot(draw, count, self.seed, failure_probability(self.delta) / (2 * _TRIES))


def _samplers(bins: Bins, sigma: float, epsilon: float, delta: float) -> dict[str, Draw]:
    """What draws for each direction that may exceed δ."""
    gram = bins.gram / sigma**2
    samplers: dict[str, Draw] = {}
    if not delta or remove_bound(gram, epsilon) > math.log(delta):
        samplers["remove"] = partial(sample_remove, bins, sigma, epsilon)
    if add_bound(gram, epsilon) > delta:
        samplers["add"] = partial(sample_add, bins, sigma, epsilon)
    return samplers


def _pilot(draw: Draw, draws: int, seed: int, failure: float) -> Direction:
    sample = draw(draws, (seed, 0))
    shares = None if sample.shares is None else Moments.of(sample.shares)
    return Direction(draw, Moments.of(sample.values), shares, sample.range, sample.square, failure)
