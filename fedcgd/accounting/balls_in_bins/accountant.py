"""The accountant of Balls-in-Bins: by draws or without, for the whole run or its first rounds."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from fedcgd.accounting.accountant import Accountant, Bound, Progress
from fedcgd.accounting.balls_in_bins import deterministic, monte_carlo
from fedcgd.accounting.balls_in_bins.draws import Bins
from fedcgd.accounting.balls_in_bins.gram import bin_gram
from fedcgd.accounting.balls_in_bins.profile import pmf_of_profile
from fedcgd.accounting.gaussian import GaussianAccountant
from fedcgd.accounting.guarantee import Guarantee, rounded_up
from fedcgd.mechanisms import Mechanism
from fedcgd.participation import Participation

_POINTS = 16  # of a profile: the error of linear interpolation falls with the square


@dataclass(frozen=True)
class BallsInBinsAccountant(Accountant):
    """Runs in which each user is in one secret bin of b, for C without negative entries.

    `method` says how δ is bounded; if it is None, without draws where C = I, since that is about as tight and as fast there, and
    by draws elsewhere.
    """

    method: Literal["monte-carlo", "deterministic"] | None = None

    def check(self) -> None:
        _bins_of(self.mechanism, self.participation, self.participation.rounds)

    def quick_epsilon(self, *, noise_multiplier: float, delta: float, released: int) -> Guarantee:
        """The smaller of the ε of the whole run and that of the first `released` rounds without amplification."""
        known = self._known.epsilon(noise_multiplier=noise_multiplier, delta=delta, released=released)
        whole = self.epsilon(noise_multiplier=noise_multiplier, delta=delta)
        if whole.epsilon <= known.epsilon:
            return whole
        method = f"{known.method}, without amplification"
        return replace(known, sampling=self.participation.sampling, method=method, exact=False)

    def gaussian_mu(self, noise_multiplier: float, released: int) -> Bound:
        return self._known.gaussian_mu(noise_multiplier, released)

    def loss_distribution(
        self, noise_multiplier: float, released: int, step: float, least_delta: float
    ) -> tuple[PrivacyLossDistribution, float]:
        def at(epsilon: float) -> Guarantee:
            return self.delta(noise_multiplier=noise_multiplier, epsilon=epsilon, released=released)

        widest = self.epsilon(noise_multiplier=noise_multiplier, delta=least_delta, released=released).epsilon
        multiples = np.unique(np.ceil(np.linspace(0.0, widest, _POINTS) / step).astype(int))
        points = [at(float(multiple * step)) for multiple in multiples]
        pmf = pmf_of_profile(multiples, np.array([point.delta for point in points]), step)
        return PrivacyLossDistribution(pmf), sum(point.failure_probability for point in points)

    @property
    def _known(self) -> GaussianAccountant:
        return GaussianAccountant(self.mechanism, replace(self.participation, sampling="none"))

    def _sigma_for(self, epsilon: float, delta: float, progress: Progress) -> Bound:
        bins = _bins_of(self.mechanism, self.participation, self.participation.rounds)
        if self._draws(bins):
            found = monte_carlo.calibrate(bins, epsilon=epsilon, delta=delta, progress=progress)
        else:
            sigma = deterministic.calibrate(bins.gram, epsilon=epsilon, delta=delta, progress=progress)
            found = Bound(sigma, deterministic.METHOD)
        # Processors differ in the last digits, and a run that goes on elsewhere must find the same σ.
        return replace(found, value=float(rounded_up(found.value * (1 + 2e-9), 6)))

    def _epsilon_at(self, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        return _epsilon_at(self, sigma, delta, released, progress)

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


@lru_cache(maxsize=16)  # every round of a run asks for that of the whole
def _epsilon_at(
    accountant: BallsInBinsAccountant, sigma: float, delta: float, released: int, progress: Progress
) -> Bound:
    bins = _bins_of(accountant.mechanism, accountant.participation, released)
    if accountant._draws(bins):
        return monte_carlo.epsilon(bins, sigma=sigma, delta=delta, progress=progress)
    found = deterministic.epsilon(bins.gram, sigma=sigma, delta=delta, progress=progress)
    return Bound(found, deterministic.METHOD)
