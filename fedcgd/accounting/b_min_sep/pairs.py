"""Pairs of users' rounds (P, P′), drawn with weights Pr(P)·Pr(P′)·exp(θ·K̃(P, P′)), K̃ ≥ ⟨C1_P, C1_P′⟩/σ².

What a round of one brings follows from the state of the other: the age of its last round, and how much of the rounds before was
left then. So this is a Markov chain of two states, whose weights follow backwards through the rounds; nothing is random before
one of the two may take part again. Without a tail at most one round of the other overlaps, the age is enough, and K̃ is equal.
With one, ages beyond a limit count as the limit, and what was left is rounded up to one of a few levels; K̃ tells by how much
that is too much.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedcgd.accounting.b_min_sep.coins import Coins
from fedcgd.accounting.b_min_sep.drawing import Tables, compiled, passed
from fedcgd.accounting.b_min_sep.recursion import Indices
from fedcgd.accounting.random_participation.columns import Columns
from fedcgd.accounting.random_participation.law import Turns
from fedcgd.accounting.tolerances import TOLERANCES
from fedcgd.mechanisms.mechanism import Matrix, Vector

_CHAINS = TOLERANCES.chains


@dataclass(frozen=True, eq=False)
class States:
    """States of one user before a round: its age 1 … `limit`, for each level of what was left of earlier rounds."""

    limit: int
    separation: int
    levels: Vector
    """What is left of the rounds before the last, in units of a round, at most; ascending."""
    ratio: float

    @staticmethod
    def from_columns(columns: Columns, law: Coins) -> "States":
        """Those that can be told apart in tables of a size that memory holds. Raises ValueError if not even the ages can."""
        n, b = law.rounds, law.separation
        if n * b > TOLERANCES.memory.table:
            raise ValueError(
                f"{n} rounds, {b} apart, need tables of {n * b:.2g} numbers; the accounting of random participation "
                f"takes at most {TOLERANCES.memory.table:.2g}: use fewer rounds or a smaller min_separation"
            )
        if not columns.amplitude:
            return States(b, b, np.zeros(1), 0.0)
        power = columns.ratio**b
        top = power / (1 - power)
        limit = max(b, math.ceil(math.log(_CHAINS.faded) / math.log(columns.ratio)))
        count = (
            1 + max(0, math.ceil(math.log(_CHAINS.faded / top) / math.log(_CHAINS.level))) if top > _CHAINS.faded else 1
        )
        while n * count**2 * limit * (limit - b + 1) > TOLERANCES.memory.table and (limit > b or count > 1):
            if count > 2 and (limit - b) < 4 * count:
                count -= 1
            elif limit > b:
                limit -= max(1, (limit - b) // 6)
            else:
                count -= 1
        return States(limit, b, np.asarray(top * _CHAINS.level ** np.arange(count - 1, -1, -1.0)), columns.ratio)

    @cached_property
    def ages(self) -> Indices:
        """Of each state."""
        return np.tile(np.arange(1, self.limit + 1), len(self.levels))

    @cached_property
    def level_of(self) -> Indices:
        """Of each state."""
        return np.repeat(np.arange(len(self.levels)), self.limit)

    @cached_property
    def later(self) -> Indices:
        """The state after a round without this user."""
        states = np.arange(self.limit * len(self.levels))
        return np.asarray(states + (self.ages < self.limit))

    @cached_property
    def taken(self) -> Indices:
        """The level after a round with this user."""
        left = self.ratio**self.ages * (1 + self.levels[self.level_of]) if self.ratio else np.zeros(len(self.ages))
        return np.minimum(np.searchsorted(self.levels, left * (1 - 1e-12)), len(self.levels) - 1)

    @cached_property
    def free_index(self) -> Indices:
        """The place of each state in which a user may take part among those, −1 for others."""
        result = np.full(len(self.ages), -1)
        free = np.flatnonzero(self.ages >= self.separation)
        result[free] = np.arange(len(free))
        return result

    def overlaps(self, columns: Columns) -> Matrix:
        """⟨C[:, t], what the other's rounds brought⟩ at most, by t and the other's state; 0 where its last is before round 0."""
        n = columns.rounds
        largest = np.maximum.accumulate(columns.scales)
        result = np.zeros((n, len(self.ages)))
        bands = {age: columns.products(age) for age in range(1, min(self.separation, n))}
        for state, (age, level) in enumerate(zip(self.ages, self.level_of, strict=True)):
            if age >= n:
                continue
            if age < self.separation:
                result[:, state] = bands[int(age)]
                last = np.zeros(n - age)
            else:
                last = largest[: n - age] if age == self.limit else columns.scales[: n - age]
            if columns.amplitude:
                left = last + self.levels[level] * largest[: n - age]
                result[age:, state] += columns.tail_products[age:] * columns.ratio**age * left
        return result


@dataclass(frozen=True, eq=False)
class PairChain:
    """The chain for one θ/σ²."""

    law: Coins
    states: States
    start: Vector
    """The probability of each state before round 0."""
    tables: Tables
    log_total: float
    """log E exp(θ·K̃). Infinite if it overflows."""

    @staticmethod
    def from_columns(columns: Columns, law: Coins, scale: float) -> "PairChain":
        """For θ/σ² = `scale`. Raises ValueError if its tables would be too large."""
        states = States.from_columns(columns, law)
        overlaps, together = states.overlaps(columns) * scale, columns.squares * scale
        start = np.zeros(len(states.ages))
        start[: law.separation][::-1] = (
            law.first_chances()
        )  # as if the last were before round 0: then it has no overlap
        start[states.limit - 1] += start[law.separation - 1] if states.limit > law.separation else 0.0
        if states.limit > law.separation:
            start[law.separation - 1] = 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            gained, gained_together = np.exp(overlaps), np.exp(together)
            waiting, after, both = _backwards(gained, gained_together, law, states)
            used = np.flatnonzero(start)
            total = float(
                start[used] @ _Meeting.from_states(used[:, None], used[None, :], states).value(waiting, 0) @ start[used]
            )
        log_total = math.log(total) if 0 < total < math.inf else math.inf
        own = law.rounds, law.separation, states.limit, law.rate, states.ages, states.free_index, states.taken
        tables = Tables(*own, waiting, after, both, overlaps, gained, together, gained_together)
        return PairChain(law, states, start, tables, log_total)

    def draw(self, generator: np.random.Generator, count: int) -> tuple[Turns, Turns, Vector]:
        """`count` pairs: the rounds of each, twice shape (most, count), and θ·K̃ of each."""
        first, second = self._drawn_start(generator, count)
        turns, drawn = compiled()(generator, self.tables, first, second)
        most = int((turns < self.law.rounds).any(axis=(0, 2)).sum())
        return turns[0, :most], turns[1, :most], drawn

    def _drawn_start(self, generator: np.random.Generator, count: int) -> tuple[Indices, Indices]:
        used = np.flatnonzero(self.start)
        value = _Meeting.from_states(used[:, None], used[None, :], self.states).value(self.tables.waiting, 0)
        cumulative = np.cumsum((value * self.start[used][:, None] * self.start[used]).ravel())
        drawn = np.searchsorted(cumulative, generator.random(count) * cumulative[-1], side="right")
        drawn = np.minimum(drawn, len(cumulative) - 1)
        return used[drawn // len(used)], used[drawn % len(used)]


@dataclass(frozen=True, eq=False)
class _Meeting:
    """Two states of two users, and what they are once the first of them may take part: `wait` rounds later."""

    wait: Indices
    other: Indices
    free: Indices

    @staticmethod
    def from_states(one: Indices, two: Indices, states: States) -> "_Meeting":
        wait = np.maximum(0, states.separation - np.maximum(states.ages[one], states.ages[two]))
        one, two = (passed(state, wait, states.ages, states.limit) for state in (one, two))
        swap = states.free_index[two] < 0
        return _Meeting(wait, np.where(swap, two, one), states.free_index[np.where(swap, one, two)])

    def value(self, waiting: Vector, t: int) -> Matrix:
        """The expected weight of what is left before round t."""
        last = len(waiting) - 1  # what is left there is nothing: all ones
        return np.asarray(waiting[np.minimum(t + self.wait, last), self.other, self.free])


def _backwards(gained: Matrix, together: Vector, law: Coins, states: States) -> tuple[Vector, Vector, Vector]:
    n, p, levels = law.rounds, law.rate, len(states.levels)
    later, taken, every = states.later, states.taken, np.arange(len(states.ages))
    free = np.flatnonzero(states.ages >= states.separation)
    later_free = states.free_index[later[free]]
    fresh = np.arange(levels) * states.limit
    one_took = _Meeting.from_states(fresh[:, None], later[None, :], states)
    both_took = _Meeting.from_states(fresh[:, None], fresh[None, :], states)
    waiting = np.ones((n + 1, len(every), len(free)))
    after, both = np.ones((n, levels, len(every))), np.ones((n, levels, levels))
    is_free = np.zeros(len(every), dtype=bool)
    is_free[free] = True
    for t in range(n - 1, -1, -1):
        after[t] = one_took.value(waiting, t + 1)
        both[t] = both_took.value(waiting, t + 1)
        then = waiting[t + 1][later][:, later_free]
        # The free one alone takes part: it gains by the other's state.
        alone = gained[t][:, None] * after[t][taken[free]].T
        now = np.where(is_free[:, None], (1 - p) ** 2, 1 - p) * then
        now += np.where(is_free[:, None], p * (1 - p), p) * alone
        now[free] += p * (1 - p) * alone[free].T
        pair = both[t][taken[free]][:, taken[free]] * gained[t][free][:, None] * gained[t][free][None, :]
        now[free] += p * p * together[t] * pair
        waiting[t] = now
    return waiting, after, both
