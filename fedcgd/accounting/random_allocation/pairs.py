"""Pairs of users' rounds (P, P′), one of each epoch, drawn with weights Pr(P)·Pr(P′)·exp(θ·⟨C1_P, C1_P′⟩/σ²).

What an epoch brings follows from the states that the two users' rounds of the epoch before are in (`epochs`). So this is a Markov
chain of two states, p² of them, whose weights follow backwards through the epochs. In an epoch two rounds meet only if they are
less than p apart: the weight of all pairs of rounds is one of products, and what near ones add.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedcgd.accounting.effort import EFFORT
from fedcgd.accounting.random_allocation.epochs import Epochs, Indices, Overlaps
from fedcgd.accounting.random_participation.columns import Columns
from fedcgd.accounting.random_participation.law import Turns
from fedcgd.mechanisms.mechanism import Matrix, Vector


@dataclass(frozen=True, eq=False)
class EpochPairs:
    """The chain for one θ/σ² = `scale`."""

    epochs: Epochs
    overlaps: Overlaps
    scale: float
    tables: list["_Epoch"]
    log_total: float
    """log E exp(θ·K). Infinite if it overflows."""

    @staticmethod
    def from_columns(columns: Columns, epochs: Epochs, scale: float) -> "EpochPairs":
        """For θ/σ² = `scale`. Raises ValueError if its tables would be too large."""
        overlaps = Overlaps.from_columns(columns, epochs)
        entries = epochs.number * epochs.length * overlaps.bands**2
        if entries > EFFORT.memory.table:
            raise ValueError(
                f"{epochs.rounds} rounds and {overlaps.bands} bands need tables of {entries:.2g} numbers; the accounting of "
                f"random allocation takes at most {EFFORT.memory.table:.2g}: use fewer rounds or bands"
            )
        later = np.ones((overlaps.bands, overlaps.bands))  # the weight of what is left, by the two states
        tables = []
        with np.errstate(over="ignore", invalid="ignore"):
            for epoch in range(epochs.number - 1, -1, -1):
                tables.append(_Epoch.from_overlaps(overlaps, epoch, scale, later))
                later = tables[-1].total
        total = float(later[0, 0])
        log_total = math.log(total) if 0 < total < math.inf else math.inf
        return EpochPairs(epochs, overlaps, scale, tables[::-1], log_total)

    def draw(self, generator: np.random.Generator, count: int) -> tuple[Turns, Turns, Vector]:
        """`count` pairs: the rounds of each user, twice shape (epochs, count), and θ·K of each."""
        b, n = self.epochs.length, self.epochs.rounds
        turns, drawn = np.empty((2, self.epochs.number, count), dtype=np.int32), np.zeros(count)
        one = two = np.zeros(count, dtype=np.intp)
        for epoch, table in enumerate(self.tables):
            first, second = table.draw(generator, one, two)
            turns[:, epoch] = np.minimum(epoch * b + np.stack([first, second]), n)  # n: not released
            drawn += table.gained(one, two, first, second)
            one, two = self.overlaps.states[first], self.overlaps.states[second]
        return turns[0], turns[1], drawn


@dataclass(frozen=True, eq=False)
class _Epoch:
    """Weights of the two users' rounds of one epoch."""

    states: Indices
    """That each round leaves."""
    earlier: Matrix
    """θ·K that round j of one brings, by the other's state before; shape (p, b)."""
    near: Matrix
    """θ·K of round j of the first and round j + d of the second, |d| < p, as `near[j, d + p − 1]`; 0 beyond the epoch."""
    later: Matrix
    """The weight of what is left after this epoch, by the two states."""
    apart: Matrix
    """The weight of all rounds of the second, as if none were near; by the first's states before and after."""
    total: Matrix
    """The weight of this epoch and what is left, by the states before."""
    of_first: Vector
    """Cumulative, by both states before and the first's round."""
    of_second: Vector
    """Cumulative, as if none were near; by the first's states before and after, and the second's round."""

    @staticmethod
    def from_overlaps(overlaps: Overlaps, epoch: int, scale: float, later: Matrix) -> "_Epoch":
        p, b, states = overlaps.bands, overlaps.epochs.length, overlaps.states
        earlier = np.zeros((p, b))
        earlier[:, : p - 1] = scale * overlaps.before[epoch]
        near = np.zeros((b, 2 * p - 1))
        for lag, products in enumerate(overlaps.within):
            near[: b - lag, p - 1 + lag] = near[lag:, p - 1 - lag] = scale * products[epoch]
        gain, left = np.exp(earlier), later[:, states]
        base = gain[:, None, :] * left[None, :, :]  # by the first's states before and after, and the second's round
        apart = base.sum(axis=2)
        of_first = apart[:, states]
        for d in range(1 - p, p):
            j = np.arange(max(0, -d), min(b, b - d))
            of_first[:, j] += np.expm1(near[j, d + p - 1]) * gain[:, j + d] * later[states[j], states[j + d]]
        weights = gain[None, :, :] * of_first[:, None, :]  # by the states before of the first and the second
        total = weights.sum(axis=2) / b**2
        return _Epoch(states, earlier, near, later, apart, total, _cumulative(weights), _cumulative(base))

    def draw(self, generator: np.random.Generator, one: Indices, two: Indices) -> tuple[Indices, Indices]:
        """A round of each user, by their states before."""
        p, b = len(self.later), len(self.states)
        first = _drawn(self.of_first, one * p + two, generator.random(len(one)), b)
        after = self.states[first]
        others = first[:, None] + np.arange(1 - p, p)
        inside = np.clip(others, 0, b - 1)
        near = np.expm1(self.near[first]) * np.exp(self.earlier[one[:, None], inside])
        near *= self.later[after[:, None], self.states[inside]]
        near = np.cumsum(near, axis=1)
        u = generator.random(len(one)) * (near[:, -1] + self.apart[one, after])
        is_near = u < near[:, -1]
        place = np.minimum((near <= u[:, None]).sum(axis=1), 2 * p - 2)
        beyond = (u - near[:, -1]) / self.apart[one, after]
        far = _drawn(self.of_second, one * p + after, beyond, b)
        second = np.where(is_near, inside[np.arange(len(one)), place], far)
        return first, np.asarray(second)

    def gained(self, one: Indices, two: Indices, first: Indices, second: Indices) -> Vector:
        """θ·K of these rounds, by the states before."""
        p = len(self.later)
        lag = second - first
        near = np.where(np.abs(lag) < p, self.near[first, np.clip(lag, 1 - p, p - 1) + p - 1], 0.0)
        return np.asarray(near + self.earlier[two, first] + self.earlier[one, second])


def _cumulative(weights: Vector) -> Vector:
    """Rows of weights, one after another, each from its number to the next."""
    rows = np.cumsum(weights.reshape(-1, weights.shape[-1]), axis=1)
    rows /= rows[:, -1:]
    return np.asarray((rows + np.arange(len(rows))[:, None]).ravel())


def _drawn(cumulative: Vector, rows: Indices, u: Vector, length: int) -> Indices:
    """The places in these rows where u in [0, 1) falls."""
    place = np.searchsorted(cumulative, rows + u, side="right") - rows * length
    return np.asarray(np.clip(place, 0, length - 1))
