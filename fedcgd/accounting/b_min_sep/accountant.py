"""The accountant of random b-min-separation, and of Poisson sampling where C is not the identity."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from fedcgd.accounting.accountant import Accountant, Bound, Progress
from fedcgd.accounting.b_min_sep import search
from fedcgd.accounting.b_min_sep.columns import columns_of
from fedcgd.accounting.b_min_sep.law import Law
from fedcgd.accounting.b_min_sep.search import Question
from fedcgd.accounting.balls_in_bins.profile import pmf_of_profile
from fedcgd.accounting.gaussian import GaussianAccountant
from fedcgd.accounting.guarantee import Guarantee, rounded_up
from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.participation import Participation

_POINTS = 16  # of a profile: the error of linear interpolation falls with the square


@dataclass(frozen=True)
class BMinSepAccountant(Accountant):
    """Runs in which each user tosses a secret coin in each round in which it may take part, for C without negative entries."""

    def check(self) -> None:
        _question(self.mechanism, self.participation, self.participation.rounds)

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

    def rough_noise_multiplier(self, *, epsilon: float, delta: float) -> float:
        """σ that a few draws propose, the same random numbers for every mechanism, so that differences between them are seen."""
        question = _question(self.mechanism, self.participation, self.participation.rounds)
        return search.propose(question, epsilon=epsilon, delta=delta)

    @property
    def _known(self) -> GaussianAccountant:
        return GaussianAccountant(self.mechanism, _without_sampling(self.participation))

    def _sigma_for(self, epsilon: float, delta: float, progress: Progress) -> Bound:
        question = _question(self.mechanism, self.participation, self.participation.rounds)
        found = search.calibrate(question, epsilon=epsilon, delta=delta, progress=progress)
        # Processors differ in the last digits, and a run that goes on elsewhere must find the same σ.
        return replace(found, value=float(rounded_up(found.value * (1 + 2e-9), 6)))

    def _epsilon_at(self, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        return _epsilon_at(self, sigma, delta, released, progress)

    def _delta_at(self, sigma: float, epsilon: float, released: int, progress: Progress) -> Bound:
        question = _question(self.mechanism, self.participation, released)
        return search.delta(question, sigma=sigma, epsilon=epsilon, progress=progress)


def _without_sampling(participation: Participation) -> Participation:
    """The same rounds for an adversary who knows them."""
    return Participation(
        rounds=participation.rounds,
        min_separation=participation.min_separation,
        max_participations=participation.max_participations,
    )


@lru_cache(maxsize=4)
def _question(mechanism: Mechanism, participation: Participation, released: int) -> Question:
    rate = participation.sampling_rate
    assert rate is not None
    columns = columns_of(mechanism, participation.rounds, participation.min_separation, released)
    law = Law(released, participation.min_separation, rate, participation.warm_start)
    reach = sensitivity(mechanism, _without_sampling(participation), released=released).value
    return Question(columns, law, reach)


@lru_cache(maxsize=16)  # every round of a run asks for that of the whole
def _epsilon_at(accountant: BMinSepAccountant, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
    question = _question(accountant.mechanism, accountant.participation, released)
    return search.epsilon(question, sigma=sigma, delta=delta, progress=progress)
