"""The accountant of Balls-in-Bins: by draws or without, for the whole run or its first rounds."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from fedcgd.accounting.accountant import Bound, Progress
from fedcgd.accounting.balls_in_bins import deterministic, monte_carlo
from fedcgd.accounting.balls_in_bins.draws import Bins
from fedcgd.accounting.balls_in_bins.gram import bin_gram
from fedcgd.accounting.profile import ProfileAccountant
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

    def _search_sigma(self, epsilon: float, delta: float, progress: Progress) -> Bound:
        bins = _bins_of(self.mechanism, self.participation, self.participation.rounds)
        if self._draws(bins):
            return monte_carlo.calibrate(bins, epsilon=epsilon, delta=delta, progress=progress)
        sigma = deterministic.calibrate(bins.gram, epsilon=epsilon, delta=delta, progress=progress)
        return Bound(sigma, deterministic.METHOD)

    def _search_epsilon(self, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        bins = _bins_of(self.mechanism, self.participation, released)
        if self._draws(bins):
            return monte_carlo.epsilon(bins, sigma=sigma, delta=delta, progress=progress)
        found = deterministic.epsilon(bins.gram, sigma=sigma, delta=delta, progress=progress)
        return Bound(found, deterministic.METHOD)

    def _delta_at(self, sigma: float, epsilon: float, released: int, progress: Progress) -> Bound:
        bins = _bins_of(self.mechanism, self.participation, released)
        if self._draws(bins):
            return monte_carlo.delta(bins, sigma=sigma, epsilon=epsilon, progress=progress)
        found = deterministic.delta(bins.gram, sigma=sigma, epsilon=epsilon, progress=progress)
        return Bound(found, deterministic.METHOD)

    def _draws(self, bins: Bins) -> bool:
        return self.method == "monte-carlo" or (self.method is None and not bins.are_independent)


@lru_cache(maxsize=2)
def _bins_of(mechanism: Mechanism, participation: Participation, released: int) -> Bins:
    """The Gram matrix of the bins and what follows from it, of the first `released` rounds."""
    return Bins(bin_gram(mechanism, participation, released))
