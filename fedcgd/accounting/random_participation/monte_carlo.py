"""σ, ε and δ under secret rounds: a few draws propose an answer, and fresh ones confirm it, or it is raised.

All tries for one answer together are wrong with probability at most β = `failure_probability(δ)` over the seed, and β is part
of δ: what is confirmed is δ − β. The seed is a hash of the problem: columns, law, and two of ε, σ and δ.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedcgd.accounting.accountant import Progress, silent
from fedcgd.accounting.confidence import radius, stake, upper_bound
from fedcgd.accounting.guarantee import LEAST_DELTA, Bound, Proof
from fedcgd.accounting.random_participation.add import AddDirection, LogRatios, draw_log_ratios
from fedcgd.accounting.random_participation.law import Columns, Law, Likelihood
from fedcgd.accounting.random_participation.remove import RemoveSampler
from fedcgd.accounting.tolerances import TOLERANCES
from fedcgd.mechanisms.mechanism import Vector

_DRAWS, _SEARCH = TOLERANCES.drawing, TOLERANCES.search

LEAST_EPSILON = 1e-6


def failure_probability(delta: float) -> float:
    """β for this δ: small compared with it, and with all the questions that anybody asks."""
    return min(1e-12, delta / 100)


@dataclass(frozen=True, eq=False)
class Problem:
    """What is released, and who takes part."""

    columns: Columns
    law: Law

    def at(self, sigma: float, epsilon: float) -> "Candidate":
        """The two directions there."""
        return Candidate(self, sigma, epsilon)

    def seed(self, asked: str, *numbers: float) -> int:
        """256 bits that follow from the question; of the columns six digits count, since processors may differ below."""
        digest = hashlib.sha256(" ".join([asked, *self.law.words, *(float(x).hex() for x in numbers)]).encode())
        digest.update(np.round(self.columns.entries * 1e6).astype("<i8").tobytes())
        return int.from_bytes(digest.digest(), "big")


@dataclass(frozen=True, eq=False)
class Candidate:
    """One (σ, ε)."""

    problem: Problem
    sigma: float
    epsilon: float

    @cached_property
    def likelihood(self) -> Likelihood:
        """S for this σ."""
        return self.problem.law.likelihood(self.problem.columns, self.sigma)

    @property
    def cost(self) -> float:
        """About the time of a draw, in that of a number."""
        return (self.problem.law.rounds + _DRAWS.overhead) * self.likelihood.cost

    def pilot(
        self, seed: int, failure: float, last: "PilotEstimate | None" = None, *, times: float = 1
    ) -> "PilotEstimate | None":
        """What few draws, or `times` as many, say; None if numbers overflow (too little noise) or bounds on S say nothing.

        `last`: of a point near this one.
        """
        if self.likelihood.gap > TOLERANCES.chains.gap[1]:
            return None
        columns, law = self.problem.columns, self.problem.law
        order, keep = law.orders[0], False
        if last is not None:
            other, apart = last.candidate, _SEARCH.slope[2]
            order = last.sampler.tuples.order
            keep = times <= 1 and abs(math.log(other.sigma / self.sigma * other.epsilon / self.epsilon)) < apart
        sampler = RemoveSampler.from_law(columns, law, self.likelihood, self.sigma, self.epsilon, order, keep)
        if sampler is None:
            return None
        values, shares = sampler.draw(int(times * _DRAWS.pilot[0]), (seed, 0))
        adding = int(_DRAWS.pilot[1] * min(max(times, 0.25), 1))
        ratios = draw_log_ratios(columns, self.likelihood, self.sigma, adding, (seed, 1))
        return PilotEstimate(self, sampler, values, shares, ratios, failure)


@dataclass(frozen=True, eq=False)
class PilotEstimate:
    """Few draws at one (σ, ε), and how many more a confirmation will take. `failure`: of a confirmation of both directions."""

    candidate: Candidate
    sampler: RemoveSampler
    values: Vector
    shares: Vector
    ratios: LogRatios
    failure: float

    @cached_property
    def count(self) -> int:
        """Draws of removing that are enough."""
        cost = self.candidate.cost * self.sampler.cost
        fewest, most = _DRAWS.removing
        most = int(min(most, max(fewest, _DRAWS.numbers[0] / cost)))
        count = fewest
        usual, cheap, numbers = _DRAWS.precision
        while count < most:
            precision = cheap if count * cost < numbers else usual
            if self._remove(count) <= (1 + precision) * self._remove_mean:
                break
            count += count // 3
        return min(count, most)

    @cached_property
    def adding(self) -> tuple[AddDirection, int]:
        """How adding will be confirmed, with so many draws that it does not rule, if that many can be had."""
        candidate = self.candidate
        most = _DRAWS.numbers[1] / candidate.cost
        for count in _DRAWS.adding:
            found = AddDirection.from_pilot(self.ratios, candidate.epsilon, count, self.failure / 2)
            if found.expected < _SEARCH.negligible * self._remove_mean or 2 * count > most:
                break
        return found, count

    @property
    def mean(self) -> float:
        """About δ."""
        return max(self._remove_mean, self.adding[0].mean)

    @property
    def scatter(self) -> float:
        """The standard deviation of what the few draws say of removing, relatively."""
        parts = (self.values, self.shares)
        return math.sqrt(sum(float(x.var()) / max(float(x.mean()), 1e-300) ** 2 / len(x) for x in parts))

    @property
    def likely(self) -> float:
        """A δ that a confirmation will probably not exceed: what is expected, and a standard deviation of the
        pilot's few draws.
        """
        removing = self.scatter * math.sqrt(1 + len(self.values) / self.count)
        return max(self._remove(self.count) * math.exp(removing), self.adding[0].expected)

    def confirm(self, goal: float, seed: int, attempt: int) -> float:
        """An upper bound on δ, wrong with probability at most `failure`, or something above `goal`.

        Where it will hardly be below `goal` the rest is not drawn: a confirmation that fails proves nothing, whatever made it so.
        """
        count, failure, beyond = self.count, self.failure / 4, math.nextafter(goal, math.inf)
        margin = self._remove(count) / max(self._remove_mean, 1e-300)
        values, shares = self.sampler.draw(count, (seed, 2 + 2 * attempt), goal / margin)
        if (mean := self.sampler.mean(values, shares)) > goal / margin:
            return max(beyond, mean * margin)
        bounds = _bound(values, self.values, failure) * _bound(shares, self.shares, failure)
        removing = min(1.0, math.exp(min(self.sampler.log_scale, 700.0)) * bounds)
        if removing > goal:
            return removing
        (direction, count), of = self.adding, self.candidate
        ratios = draw_log_ratios(of.problem.columns, of.likelihood, of.sigma, count, (seed, 3 + 2 * attempt))
        return max(removing, direction.confirm(ratios))

    @property
    def _remove_mean(self) -> float:
        return self.sampler.mean(self.values, self.shares)

    def _remove(self, count: int) -> float:
        failure = self.failure / 4
        tuples = max(1, int(count * len(self.shares) / len(self.values)))
        mean = float(self.values.mean()) + radius(float(self.values.var()) + 1e-12, 1.0, count, failure)
        share = float(self.shares.mean()) + radius(float(self.shares.var()) + 1e-12, 1.0, tuples, failure)
        return min(1.0, math.exp(min(self.sampler.log_scale, 700.0)) * min(mean, 1.0) * min(share, 1.0))


def _bound(draws: Vector, pilot: Vector, failure: float) -> float:
    """An upper confidence bound on the mean of `draws`, with the stake that other draws advise."""
    return upper_bound(draws, 1.0, stake(float(pilot.var()) + 1e-12, 1.0, len(draws), failure), failure)


def calibrate(problem: Problem, most: Bound, *, epsilon: float, delta: float, progress: Progress) -> Bound:
    """A noise multiplier σ for which both directions are proven to be (ε, δ)-private; `most` is one, without draws."""
    seed = problem.seed("sigma", epsilon, delta)
    return _least(lambda sigma: problem.at(sigma, epsilon), most, delta, seed, problem.law.method, progress)


def epsilon(problem: Problem, most: Bound, *, sigma: float, delta: float, progress: Progress) -> Bound:
    """An ε for which both directions are proven to be (ε, δ)-private; `most` is one, without draws."""
    if most.value <= LEAST_EPSILON:
        return most
    seed = problem.seed("epsilon", sigma, delta)
    return _least(lambda value: problem.at(sigma, value), most, delta, seed, problem.law.method, progress)


def _least(
    at: Callable[[float], Candidate], most: Bound, delta: float, seed: int, method: str, progress: Progress
) -> Bound:
    """The least x found for which `at`(x) is proven to have at most this δ; else `most`."""
    highest, risk = most.value, failure_probability(delta)
    # Half of it: an ε may be the answer of two searches, its own and that for the σ of a budget.
    goal, failure = delta - risk, risk / 2 / _SEARCH.tries[0]
    x, pilot, slope = _proposed(at, highest, goal, seed, failure, progress)
    if pilot is not None and x < highest:
        # The search ends up to 10 % of δ below its goal, and what so few draws may err by. More draws take most of that off.
        times = min(_SEARCH.finer[0], pilot.count / _DRAWS.pilot[0], (pilot.scatter / _SEARCH.finer[1]) ** 2)
        finer = at(x).pilot(seed, failure, pilot, times=times) if times > 1 else pilot
        if finer is not None and finer.likely > 0:
            excess = math.log(finer.likely / goal) + _SEARCH.care[1]
            # A confirmation that fails takes longer than all before: down with care.
            x = min(x * math.exp(excess / (slope if excess > 0 else _SEARCH.care[0] * slope)), highest)
            pilot = at(x).pilot(seed, failure, finer)
    for attempt in range(_SEARCH.tries[0]):
        if x >= highest or pilot is None:
            break
        # A confirmation takes a third of the time, about.
        progress(f"{x:.6g}, to be confirmed, {_SEARCH.steps[1] - 3} of about {_SEARCH.steps[1]}")
        found = pilot.confirm(goal, seed, attempt)
        if found <= goal:
            return Bound(x, Proof(method, failure_probability=risk))
        x *= max(_SEARCH.tries[1], math.exp(math.log(found / goal) / slope) * 1.0005)
        pilot = at(x).pilot(seed, failure, pilot)
    return most


def propose(problem: Problem, highest: float, *, epsilon: float, delta: float) -> float:
    """About the σ that `calibrate` returns, unconfirmed; by the same random numbers for every question."""
    failure = failure_probability(delta)
    each = failure / 2 / _SEARCH.tries[0]
    return _proposed(lambda sigma: problem.at(sigma, epsilon), highest, delta - failure, 0, each, silent)[0]


def delta(problem: Problem, most: Bound, *, sigma: float, epsilon: float, progress: Progress) -> Bound:
    """A δ for which both directions are proven to be (ε, δ)-private; `most` is one, without draws."""
    if most.value <= LEAST_DELTA:
        return most
    seed = problem.seed("delta", sigma, epsilon)
    first = problem.at(sigma, epsilon).pilot(seed, 1e-12)
    if first is None:
        return most
    failure = failure_probability(max(first.mean, LEAST_DELTA))
    progress(f"δ about {first.mean:.3g}: to be confirmed")
    found = replace(first, failure=failure).confirm(math.inf, seed, 0) + failure
    return Bound(found, Proof(problem.law.method, failure_probability=failure)) if found < most.value else most


def _proposed(
    at: Callable[[float], Candidate], highest: float, goal: float, seed: int, failure: float, progress: Progress
) -> tuple[float, "PilotEstimate | None", float]:
    """About the least x whose confirmation is likely, its pilot, and −log δ over log x there.

    Where δ as it is likely to be confirmed jumps, as it does where another r is chosen, what is just enough for the goal may
    not be near it.
    """
    low, high = -math.inf, math.log(highest)  # log x that is too small, and enough
    enough: tuple[float, PilotEstimate | None] = highest, None
    position, slope, far = high - 0.25, 12.0, True
    seen: list[tuple[float, float]] = []
    (close, distant), (down, up, bracket), (flattest, steepest, apart) = _SEARCH.near, _SEARCH.move, _SEARCH.slope
    pilot: PilotEstimate | None = None
    for number in range(1, _SEARCH.steps[0] + 1):
        x = math.exp(position)
        if x < LEAST_EPSILON:
            return LEAST_EPSILON, at(LEAST_EPSILON).pilot(seed, failure), slope
        progress(f"{x:.6g}, {number} of about {max(_SEARCH.steps[1], number + 4)}")
        pilot = at(x).pilot(seed, failure, pilot, times=1 / 8 if far else 1)
        likely = 1.0 if pilot is None else max(pilot.likely, 1e-320)
        excess = math.inf if pilot is None else math.log(likely / goal)
        coarse, far = far, not abs(excess) < distant
        if far or not coarse:  # few draws do not tell on which side they are
            if excess > 0:
                low = max(low, position)
            elif position <= high:
                high, enough = position, (x, pilot)
        if pilot is not None and not coarse and -close < excess <= pilot.scatter / 4:  # nearer cannot be told
            enough = x, pilot
            break
        # −log δ is about a power of x, so that its logarithm over log x has about the same slope far away as near.
        depth = math.log(max(-math.log(likely), 0.05) / -math.log(goal))
        if pilot is not None:
            others = [other for other in seen if abs(position - other[0]) > apart]
            if others:
                other = min(others, key=lambda other: abs(position - other[0]))
                slope = (depth - other[1]) / (position - other[0]) * -math.log(goal)
                slope = min(max(slope, flattest), steepest)
            seen.append((position, depth))
        aim = math.log1p(close / 2 / -math.log(goal))
        move = 0.3 if pilot is None else (aim - depth) / slope * -math.log(goal)
        target = position + min(max(move, -down), up)
        if not low < target < high:  # where the scatter of draws misleads, halve
            target = min(target, high - 0.05) if low == -math.inf else (low + high) / 2
        if high - low < bracket:
            break
        position = target
    return *enough, slope
