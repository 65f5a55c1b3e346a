"""The accountant of Balls-in-Bins: by draws or without, for the whole run or its first rounds."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from fedcgd.accounting.accountant import Bound, Progress
from fedcgd.accounting.amplified import ProfileAccountant
from fedcgd.accounting.balls_in_bins import deterministic, monte_carlo
from fedcgd.accounting.balls_in_bins.draws import Bins
from fedcgd.accounting.balls_in_bins.gram import bin_gram
from fedcgd.accounting.bounds import by_norm, largest_singular_value
from fedcgd.accounting.sampled import OneOf, Sampled
from fedcgd.accounting.secret_rounds.columns import columns_of
from fedcgd.mechanisms import Mechanism
from fedcgd.participation import Participation


@dataclass(frozen=True)
class BallsInBinsAccountant(ProfileAccountant):
    """Runs in which each user is in one secret bin of b, for C without negative entries.

    `method` says how δ is bounded; if it is None, without draws where C = I, since that is about as tight and as fast there, and
    by draws elsewhere.
    """

    method: Literal["monte-carlo", "deterministic"] | None = None

    def check(self) -> None:
        _bins_of(self.mechanism, self.participation, self.participation.rounds)

    def laws(self, released: int) -> tuple[Sampled, ...]:
        return _laws(self.mechanism, self.participation, released)

    def _search_sigma(self, most: Bound, epsilon: float, delta: float, progress: Progress) -> Bound:
        return self._search(
            "calibrate", most, self.participation.rounds, epsilon=epsilon, delta=delta, progress=progress
        )

    def _search_epsilon(self, most: Bound, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        return self._search("epsilon", most, released, sigma=sigma, delta=delta, progress=progress)

    def _search_delta(self, most: Bound, sigma: float, epsilon: float, released: int, progress: Progress) -> Bound:
        return self._search("delta", most, released, sigma=sigma, epsilon=epsilon, progress=progress)

    def _search(self, asked: str, most: Bound, released: int, **given: Any) -> Bound:
        bins = _bins_of(self.mechanism, self.participation, released)
        if bins.are_independent:
            return most  # the law itself
        found = getattr(deterministic if self.method == "deterministic" else monte_carlo, asked)(bins, **given)
        return found if found.value < most.value else most


@lru_cache(maxsize=2)
def _bins_of(mechanism: Mechanism, participation: Participation, released: int) -> Bins:
    """The Gram matrix of the bins and what follows from it, of the first `released` rounds."""
    return Bins(bin_gram(mechanism, participation, released))


@lru_cache(maxsize=8)
def _laws(mechanism: Mechanism, participation: Participation, released: int) -> tuple[Sampled, ...]:
    bins = participation.min_separation
    norm = largest_singular_value(mechanism, columns_of(mechanism, participation.rounds, bins, released))
    whole, rest = divmod(released, bins)
    kinds = ((math.sqrt(whole + 1) * norm, rest), (math.sqrt(whole) * norm, bins - rest))
    return (by_norm(((OneOf(tuple(kind for kind in kinds if kind[1])), 1),)),)
