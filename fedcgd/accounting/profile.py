"""What follows for a run of which only some pairs (ε, δ) are known, its privacy profile: all that a search for δ gives."""

from abc import abstractmethod
from dataclasses import replace
from functools import lru_cache

import numpy as np
from dp_accounting.pld.pld_pmf import PLDPmf, create_pmf_pessimistic_connect_dots
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray

from fedcgd.accounting.accountant import Accountant, Bound, Progress
from fedcgd.accounting.gaussian import GaussianAccountant
from fedcgd.accounting.guarantee import Guarantee, rounded_down, rounded_up
from fedcgd.mechanisms.mechanism import Vector
from fedcgd.participation import Participation

_NEAR = 1.01  # times the target: where ε is found of a σ that was calibrated for it; beyond, a second search would be in vain
_LARGEST_TARGET = 100.0  # that anybody calibrates for
_POINTS = 16  # of a profile: the error of linear interpolation falls with the square


def without_sampling(participation: Participation) -> Participation:
    """The same limits on a user's rounds, for an adversary who knows the rounds."""
    return Participation(
        rounds=participation.rounds,
        min_separation=participation.min_separation,
        max_participations=participation.max_participations,
    )


class ProfileAccountant(Accountant):
    """An accountant under a secret sampling whose σ, ε and δ are each found by a search: a subclass searches."""

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
        return GaussianAccountant(self.mechanism, without_sampling(self.participation))

    def _sigma_for(self, epsilon: float, delta: float, progress: Progress) -> Bound:
        found = self._search_sigma(epsilon, delta, progress)
        # Processors differ in the last digits, and a run that goes on elsewhere must find the same σ.
        return replace(found, value=float(rounded_up(found.value * (1 + 2e-9), 6)))

    def _epsilon_at(self, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        return _found_epsilon(self, sigma, delta, released, progress)

    @abstractmethod
    def _search_sigma(self, epsilon: float, delta: float, progress: Progress) -> Bound: ...

    @abstractmethod
    def _search_epsilon(self, sigma: float, delta: float, released: int, progress: Progress) -> Bound: ...


@lru_cache(maxsize=16)  # every round of a run asks for that of the whole
def _found_epsilon(
    accountant: ProfileAccountant, sigma: float, delta: float, released: int, progress: Progress
) -> Bound:
    found = accountant._search_epsilon(sigma, delta, released, progress)
    return budget_of(accountant, found, sigma, delta, released, progress)


def budget_of(
    accountant: Accountant, found: Bound, sigma: float, delta: float, released: int, progress: Progress
) -> Bound:
    """The ε that σ was calibrated for, where that is a little below the one that is `found`, and `found` elsewhere.

    It is what was proven of σ: finding ε takes other draws, or another grid, and says a little more.
    """
    target = float(rounded_down(found.value, 2))  # an ε that people calibrate for
    near = 0 < target < found.value < target * _NEAR and target <= _LARGEST_TARGET
    if released < accountant.participation.rounds or not near:
        return found
    budget = accountant.noise_multiplier(epsilon=target, delta=delta, progress=progress)
    if budget.noise_multiplier != sigma:
        return found
    failure = found.failure_probability + budget.failure_probability
    return replace(found, value=target, method=budget.method, failure_probability=failure)


def pmf_of_profile(multiples: NDArray[np.int_], deltas: Vector, step: float) -> PLDPmf:
    """The distribution for a run that is (ε, δ)-private, adding and removing, for ε = `multiples`·`step` ≥ 0 in ascending order.

    H(γ) = sup P(S) − γ·Q(S) is convex in γ; δ at ε bounds it at γ = e^ε, and at γ = e^(−ε), where it is 1 − γ + γ·δ of the other
    direction. So it lies below the lower convex hull of these points, and that is the H of a distribution whose losses are the
    ε of the corners (Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, "Connect the Dots: Tighter Discrete Approximations of
    Privacy Loss Distributions", 2022, arXiv:2207.04380).
    """
    positive = multiples > 0
    all_multiples = np.concatenate([-multiples[positive][::-1], multiples])
    below = (-np.expm1(-multiples * step) + np.exp(-multiples * step) * deltas)[positive][::-1]
    values = np.minimum(np.concatenate([below, deltas]), 1.0)
    corners: list[int] = []
    gammas = np.exp(all_multiples * step)
    for i in range(len(values)):
        while len(corners) > 1 and _is_above(corners[-2], corners[-1], i, gammas, values):
            corners.pop()
        corners.append(i)
    return create_pmf_pessimistic_connect_dots(step, all_multiples[corners], values[corners])


def _is_above(a: int, b: int, c: int, gammas: Vector, values: Vector) -> bool:
    """Whether point b is on or above the line from a to c."""
    part = (gammas[b] - gammas[a]) / (gammas[c] - gammas[a])
    return bool(values[b] >= values[a] + part * (values[c] - values[a]))
