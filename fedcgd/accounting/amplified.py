"""Accountants under a secret sampling: the least of bounds without draws, and of what a search with draws confirms."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from fedcgd.accounting import gaussian
from fedcgd.accounting.accountant import Accountant, Progress
from fedcgd.accounting.guarantee import WITHOUT_AMPLIFICATION, Bound, Proof, rounded_down, rounded_up
from fedcgd.accounting.random_participation import monte_carlo
from fedcgd.accounting.random_participation.monte_carlo import Problem
from fedcgd.accounting.sampled import Sampled
from fedcgd.accounting.tolerances import TOLERANCES


class SampledAccountant(Accountant):
    """An accountant of rounds that are drawn: a subclass says which independent releases dominate a run."""

    @abstractmethod
    def laws(self, released: int) -> Sequence[Sampled]:
        """Releases, each of which are at least as telling as the first `released` rounds; σ is the noise multiplier."""

    def problem(self, sigma: float, released: int) -> Problem | None:
        """What draws may tell more about than any independent releases do; None where nothing is drawn."""
        return None

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
        most = self._least_sigma(epsilon, delta)
        problem = self.problem(most.value, self.participation.rounds)
        if problem is not None:
            most = monte_carlo.calibrate(problem, most, epsilon=epsilon, delta=delta, progress=progress)
        # Processors differ in the last digits, and a run that goes on elsewhere must find the same σ.
        return replace(most, value=float(rounded_up(most.value * (1 + 2e-9), 6)))

    def _epsilon_at(self, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        found = self.found_epsilon(sigma, delta, released, progress)
        return self._budget_of(found, sigma, delta, released, progress)

    def found_epsilon(self, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        """ε as it is found, whatever budget σ may have been calibrated for."""
        certain = gaussian.epsilon(sigma=1 / self.gaussian_mu(sigma, released).value, delta=delta)
        most = self._least(released, certain, lambda law, most: law.epsilon(sigma, delta, most))
        problem = self.problem(sigma, released)
        if problem is None:
            return most
        return monte_carlo.epsilon(problem, most, sigma=sigma, delta=delta, progress=progress)

    def _delta_at(self, sigma: float, epsilon: float, released: int, progress: Progress) -> Bound:
        certain = gaussian.delta(epsilon=epsilon, sigma=1 / self.gaussian_mu(sigma, released).value)
        most = self._least(released, certain, lambda law, most: min(most, law.delta(sigma, epsilon)))
        problem = self.problem(sigma, released)
        if problem is None:
            return most
        return monte_carlo.delta(problem, most, sigma=sigma, epsilon=epsilon, progress=progress)

    def _least_sigma(self, epsilon: float, delta: float) -> Bound:
        """σ without any draws."""
        released = self.participation.rounds
        certain = gaussian.sigma(epsilon=epsilon, delta=delta) * self.gaussian_mu(1.0, released).value
        return self._least(released, certain, lambda law, most: law.noise_multiplier(epsilon, delta, most))

    def _least(self, released: int, certain: float, of: Callable[[Sampled, float], float]) -> Bound:
        """`certain`, or the least that `of` makes of a law and of the least before it."""
        best = Bound(certain, Proof(WITHOUT_AMPLIFICATION))
        for law in self.laws(released):
            found = of(law, best.value)
            if found < best.value:
                best = Bound(found, Proof(law.method))
        return best

    def _budget_of(self, found: Bound, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        """The ε that σ was calibrated for, where that is a little below the one that is `found`, and `found` elsewhere.

        It is what was proven of σ: finding ε takes other draws, or another grid, and says a little more.
        """
        target = float(rounded_down(found.value, 2))  # an ε that people calibrate for
        asked = TOLERANCES.answers
        near = 0 < target < found.value < target * asked.near_budget and target <= asked.largest_budget
        if released < self.participation.rounds or not near:
            return found
        budget = self.noise_multiplier(epsilon=target, delta=delta, progress=progress)
        if budget.noise_multiplier != sigma:
            return found
        failure = max(found.proof.failure_probability, budget.proof.failure_probability)  # that of both searches
        return Bound(target, replace(budget.proof, failure_probability=failure))
