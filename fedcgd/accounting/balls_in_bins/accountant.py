"""The accountant of Balls-in-Bins: by draws or without, for the whole run or its first rounds."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

from fedcgd.accounting.accountant import Bound, Progress
from fedcgd.accounting.balls_in_bins import deterministic
from fedcgd.accounting.balls_in_bins.gram import bin_gram
from fedcgd.accounting.balls_in_bins.law import BinLaw, Bins
from fedcgd.accounting.bounds import by_norm, largest_singular_value
from fedcgd.accounting.random_participation import SecretRoundsAccountant
from fedcgd.accounting.random_participation.columns import columns_of
from fedcgd.accounting.random_participation.search import Problem
from fedcgd.accounting.sampled import OneOf, Sampled
from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.mechanism import Matrix
from fedcgd.participation import Participation


@dataclass(frozen=True)
class BallsInBinsAccountant(SecretRoundsAccountant):
    """Runs in which each user is in one secret bin of b, for C without negative entries.

    `method` says how δ is bounded; if it is None, without draws where C = I, since that is about as tight and as fast there, and
    by draws elsewhere.
    """

    method: Literal["monte-carlo", "deterministic"] | None = None

    def laws(self, released: int) -> tuple[Sampled, ...]:
        return _laws(self.mechanism, self.participation, released)

    def rough_noise_multiplier(self, *, epsilon: float, delta: float) -> float:
        if self._draws(self.participation.rounds):
            return super().rough_noise_multiplier(epsilon=epsilon, delta=delta)
        return self.noise_multiplier(epsilon=epsilon, delta=delta).noise_multiplier

    def _search_sigma(self, most: Bound, epsilon: float, delta: float, progress: Progress) -> Bound:
        if self._draws(self.participation.rounds):
            return super()._search_sigma(most, epsilon, delta, progress)
        find = partial(deterministic.calibrate, epsilon=epsilon, delta=delta, progress=progress)
        return self._without_draws(most, self.participation.rounds, find)

    def _search_epsilon(self, most: Bound, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        if self._draws(released):
            return super()._search_epsilon(most, sigma, delta, released, progress)
        find = partial(deterministic.epsilon, sigma=sigma, delta=delta, progress=progress)
        return self._without_draws(most, released, find)

    def _search_delta(self, most: Bound, sigma: float, epsilon: float, released: int, progress: Progress) -> Bound:
        if self._draws(released):
            return super()._search_delta(most, sigma, epsilon, released, progress)
        find = partial(deterministic.delta, sigma=sigma, epsilon=epsilon, progress=progress)
        return self._without_draws(most, released, find)

    def _draws(self, released: int) -> bool:
        return self.method != "deterministic" and not self._bins(released).are_independent

    def _without_draws(self, most: Bound, released: int, find: Callable[[Matrix], Bound]) -> Bound:
        bins = self._bins(released)
        if bins.are_independent:  # then `most` is of the law itself
            return most
        found = find(bins.gram)
        return found if found.value < most.value else most

    def _bins(self, released: int) -> Bins:
        return _bins_of(self.mechanism, self.participation, released)

    def _problem(self, released: int) -> Problem:
        bins = self._bins(released)
        return Problem(bins, BinLaw(bins.rounds))


@lru_cache(maxsize=2)
def _bins_of(mechanism: Mechanism, participation: Participation, released: int) -> Bins:
    """The Gram matrix of the bins, of the first `released` rounds."""
    return Bins(bin_gram(mechanism, participation, released))


@lru_cache(maxsize=8)
def _laws(mechanism: Mechanism, participation: Participation, released: int) -> tuple[Sampled, ...]:
    bins = participation.min_separation
    norm = largest_singular_value(mechanism, columns_of(mechanism, participation.rounds, bins, released))
    whole, rest = divmod(released, bins)
    kinds = ((math.sqrt(whole + 1) * norm, rest), (math.sqrt(whole) * norm, bins - rest))
    return (by_norm(((OneOf(tuple(kind for kind in kinds if kind[1])), 1),)),)
