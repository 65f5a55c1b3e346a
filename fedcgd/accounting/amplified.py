"""Accountants under a secret sampling: the least of bounds without draws, and of what a search with draws confirms."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from fedcgd.accounting import gaussian
from fedcgd.accounting.accountant import Accountant, Bound, Progress
from fedcgd.accounting.effort import EFFORT
from fedcgd.accounting.gaussian import GaussianAccountant
from fedcgd.accounting.guarantee import WITHOUT_AMPLIFICATION, Guarantee, rounded_down, rounded_up
from fedcgd.accounting.sampled import Profile, Sampled
from fedcgd.participation import Participation


def without_sampling(participation: Participation) -> Participation:
    """The same limits on a user's rounds, for an adversary who knows the rounds."""
    return Participation(
        rounds=participation.rounds,
        min_separation=participation.min_separation,
        max_participations=participation.max_participations,
    )


class SampledAccountant(Accountant):
    """An accountant whose answers need no draws: a subclass says which independent releases dominate a run."""

    @abstractmethod
    def laws(self, released: int) -> Sequence[Sampled]:
        """Releases, each of which are at least as telling as the first `released` rounds; σ is the noise multiplier."""

    def releases(self, noise_multiplier: float, released: int, delta: float) -> tuple[Sampled, float]:
        mu = self.gaussian_mu(noise_multiplier, released).value
        most = gaussian.epsilon(sigma=1 / mu, delta=delta)
        found = Sampled.certain(mu, WITHOUT_AMPLIFICATION)
        for law in self.laws(released):
            epsilon = law.epsilon(noise_multiplier, delta, most)
            if epsilon < most:
                most, found = epsilon, law.for_noise_one(noise_multiplier)
        return found, 0.0

    def _sigma_for(self, epsilon: float, delta: float, progress: Progress) -> Bound:
        found = self._search_sigma(self._least_sigma(epsilon, delta), epsilon, delta, progress)
        # Processors differ in the last digits, and a run that goes on elsewhere must find the same σ.
        return replace(found, value=float(rounded_up(found.value * (1 + 2e-9), 6)))

    def _epsilon_at(self, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        return _found_epsilon(self, sigma, delta, released, progress)

    def found_epsilon(self, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        """ε as it is found, whatever budget σ may have been calibrated for."""
        certain = gaussian.epsilon(sigma=1 / self.gaussian_mu(sigma, released).value, delta=delta)
        most = self._least(released, certain, lambda law, most: law.epsilon(sigma, delta, most))
        return self._search_epsilon(most, sigma, delta, released, progress)

    def _delta_at(self, sigma: float, epsilon: float, released: int, progress: Progress) -> Bound:
        certain = gaussian.delta(epsilon=epsilon, sigma=1 / self.gaussian_mu(sigma, released).value)
        most = self._least(released, certain, lambda law, most: min(most, law.delta(sigma, epsilon)))
        return self._search_delta(most, sigma, epsilon, released, progress)

    def _least_sigma(self, epsilon: float, delta: float) -> Bound:
        """σ without any draws."""
        released = self.participation.rounds
        certain = gaussian.sigma(epsilon=epsilon, delta=delta) * self.gaussian_mu(1.0, released).value
        return self._least(released, certain, lambda law, most: law.noise_multiplier(epsilon, delta, most))

    def _search_sigma(self, most: Bound, epsilon: float, delta: float, progress: Progress) -> Bound:
        """What draws confirm below `most`, which is proven without; else `most`."""
        return most

    def _search_epsilon(self, most: Bound, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        """The same of ε."""
        return most

    def _search_delta(self, most: Bound, sigma: float, epsilon: float, released: int, progress: Progress) -> Bound:
        """The same of δ."""
        return most

    def _least(self, released: int, certain: float, of: Callable[[Sampled, float], float]) -> Bound:
        """`certain`, or the least that `of` makes of a law and of the least before it."""
        best = Bound(certain, WITHOUT_AMPLIFICATION, sensitivity=self._sensitivity)
        for law in self.laws(released):
            found = of(law, best.value)
            if found < best.value:
                best = replace(best, value=found, method=law.method)
        return best

    @property
    def _sensitivity(self) -> float | None:
        """That of C, where all answers go through it."""
        return None


class ProfileAccountant(SampledAccountant):
    """An accountant of which draws may tell more than any independent releases do: a subclass searches."""

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

    def releases(self, noise_multiplier: float, released: int, delta: float) -> tuple[Sampled, float]:
        without, _ = super().releases(noise_multiplier, released, delta)
        found = self.epsilon(noise_multiplier=noise_multiplier, delta=delta, released=released)
        if not found.failure_probability and found.method in (without.method, WITHOUT_AMPLIFICATION):
            return without, 0.0
        asked = self.epsilon(
            noise_multiplier=noise_multiplier, delta=delta / EFFORT.answers.beyond_profile, released=released
        )
        epsilons = np.linspace(0.0, asked.epsilon, EFFORT.answers.profile_points).tolist()
        points = [self.delta(noise_multiplier=noise_multiplier, epsilon=e, released=released) for e in epsilons]
        profile = Profile(tuple((point.epsilon, point.delta) for point in points))
        return Sampled(((profile, 1),), found.method), sum(point.failure_probability for point in points)

    @property
    def _known(self) -> GaussianAccountant:
        return GaussianAccountant(self.mechanism, without_sampling(self.participation))


@lru_cache(maxsize=16)  # every round of a run asks for that of the whole
def _found_epsilon(
    accountant: SampledAccountant, sigma: float, delta: float, released: int, progress: Progress
) -> Bound:
    found = accountant.found_epsilon(sigma, delta, released, progress)
    return budget_of(accountant, found, sigma, delta, released, progress)


def budget_of(
    accountant: Accountant, found: Bound, sigma: float, delta: float, released: int, progress: Progress
) -> Bound:
    """The ε that σ was calibrated for, where that is a little below the one that is `found`, and `found` elsewhere.

    It is what was proven of σ: finding ε takes other draws, or another grid, and says a little more.
    """
    target = float(rounded_down(found.value, 2))  # an ε that people calibrate for
    asked = EFFORT.answers
    near = 0 < target < found.value < target * asked.near_budget and target <= asked.largest_budget
    if released < accountant.participation.rounds or not near:
        return found
    budget = accountant.noise_multiplier(epsilon=target, delta=delta, progress=progress)
    if budget.noise_multiplier != sigma:
        return found
    failure = max(found.failure_probability, budget.failure_probability)  # that of both searches
    return replace(found, value=target, method=budget.method, failure_probability=failure)
