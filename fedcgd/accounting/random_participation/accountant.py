"""The accountant of secret rounds, whatever their law."""

from abc import abstractmethod
from dataclasses import replace

import numpy as np

from fedcgd.accounting import gaussian
from fedcgd.accounting.amplified import SampledAccountant
from fedcgd.accounting.gaussian import GaussianAccountant
from fedcgd.accounting.guarantee import WITHOUT_AMPLIFICATION, Bound, Guarantee, Proof
from fedcgd.accounting.random_participation import monte_carlo
from fedcgd.accounting.random_participation.monte_carlo import Problem
from fedcgd.accounting.sampled import LARGEST_MULTIPLIER, Profile, Sampled
from fedcgd.accounting.tolerances import TOLERANCES


class SecretRoundsAccountant(SampledAccountant):
    """Runs in which each user's rounds are drawn in secret, for C without negative entries. A subclass says how they are."""

    @abstractmethod
    def drawn(self, released: int) -> Problem:
        """What is asked about the first `released` rounds. Raises ValueError for C that is not accounted for."""

    def problem(self, sigma: float, released: int) -> Problem | None:
        """None where so much noise makes rounding outweigh the loss, or draws would take minutes."""
        found = self.drawn(released)
        most = LARGEST_MULTIPLIER * self.gaussian_mu(1.0, released).value
        return None if sigma > most or found.law.rounds > TOLERANCES.chains.rounds else found

    def check(self) -> None:
        self.drawn(self.participation.rounds)

    def rough_noise_multiplier(self, *, epsilon: float, delta: float) -> float:
        """σ that a few draws propose, the same random numbers for every mechanism, so that differences between them are seen."""
        rounds = self.participation.rounds
        known = gaussian.sigma(epsilon=epsilon, delta=delta) * self.gaussian_mu(1.0, rounds).value
        problem = self.problem(known, rounds)
        found = known if problem is None else monte_carlo.propose(problem, known, epsilon=epsilon, delta=delta)
        return found if found < known else self._least_sigma(epsilon, delta).value

    def quick_epsilon(self, whole: Guarantee, released: int) -> Guarantee:
        """The smaller of the ε of the `whole` run and that of the first `released` rounds without amplification."""
        known = GaussianAccountant(self.mechanism, self.participation).epsilon(
            noise_multiplier=whole.noise_multiplier, delta=whole.delta, released=released
        )
        if whole.epsilon <= known.epsilon:
            return whole
        return replace(known, proof=Proof(f"{known.proof.method}, without amplification", known.proof.sensitivity))

    def gaussian_mu(self, noise_multiplier: float, released: int) -> Bound:
        return GaussianAccountant(self.mechanism, self.participation).gaussian_mu(noise_multiplier, released)

    def releases(self, noise_multiplier: float, released: int, delta: float) -> tuple[Sampled, float]:
        without, _ = super().releases(noise_multiplier, released, delta)
        found = self.epsilon(noise_multiplier=noise_multiplier, delta=delta, released=released).proof
        if not found.failure_probability and found.method in (without.method, WITHOUT_AMPLIFICATION):
            return without, 0.0
        asked = self.epsilon(
            noise_multiplier=noise_multiplier, delta=delta / TOLERANCES.answers.beyond_profile, released=released
        )
        epsilons = np.linspace(0.0, asked.epsilon, TOLERANCES.answers.profile_points).tolist()
        points = [self.delta(noise_multiplier=noise_multiplier, epsilon=e, released=released) for e in epsilons]
        profile = Profile(tuple((point.epsilon, point.delta) for point in points))
        risk = sum(point.proof.failure_probability for point in points)
        return Sampled(((profile, 1),), found.method), risk
