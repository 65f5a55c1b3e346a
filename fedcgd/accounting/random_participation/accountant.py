"""The accountant of secret rounds, whatever their law."""

from abc import abstractmethod
from typing import Any

import numpy as np

from fedcgd.accounting.accountant import Bound, Progress
from fedcgd.accounting.amplified import ProfileAccountant
from fedcgd.accounting.effort import EFFORT
from fedcgd.accounting.random_participation import search
from fedcgd.accounting.random_participation.search import Problem
from fedcgd.accounting.sampled import LARGEST_MULTIPLIER
from fedcgd.mechanisms.mechanism import Matrix, Vector


class SecretRoundsAccountant(ProfileAccountant):
    """Runs in which each user's rounds are drawn in secret, for C without negative entries. A subclass says how they are."""

    def check(self) -> None:
        self._problem(self.participation.rounds)

    def rough_noise_multiplier(self, *, epsilon: float, delta: float) -> float:
        """σ that a few draws propose, the same random numbers for every mechanism, so that differences between them are seen."""
        most, rounds = self._least_sigma(epsilon, delta).value, self.participation.rounds
        if self._is_beyond_draws(most, rounds):
            return most
        return search.propose(self._problem(rounds), most, epsilon=epsilon, delta=delta)

    def log_ratio(self, sigma: float, seen: Matrix) -> Vector:
        """log S, which tells best whether a user of the worst kind took part, up to a thousandth; shape (draws,).

        Args:
            sigma: the noise multiplier.
            seen: C·x̂/ζ along the user's direction, shape (n, draws): C·1_P plus noise, or noise alone.
        """
        problem = self._problem(self.participation.rounds)
        likelihood = problem.at(sigma, 1.0).likelihood
        columns: Any = problem.columns  # of C itself, which bins are not followed by
        x = columns.adjoint(seen) / sigma**2
        return np.asarray(np.log(likelihood.bounds(likelihood.weights(x))[1]))

    def _search_sigma(self, most: Bound, epsilon: float, delta: float, progress: Progress) -> Bound:
        if self._is_beyond_draws(most.value, self.participation.rounds):
            return most
        problem = self._problem(self.participation.rounds)
        return search.calibrate(problem, most, epsilon=epsilon, delta=delta, progress=progress)

    def _search_epsilon(self, most: Bound, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        if self._is_beyond_draws(sigma, released):
            return most
        return search.epsilon(self._problem(released), most, sigma=sigma, delta=delta, progress=progress)

    def _search_delta(self, most: Bound, sigma: float, epsilon: float, released: int, progress: Progress) -> Bound:
        if self._is_beyond_draws(sigma, released):
            return most
        return search.delta(self._problem(released), most, sigma=sigma, epsilon=epsilon, progress=progress)

    def _is_beyond_draws(self, sigma: float, released: int) -> bool:
        """Whether there is so much noise that rounding outweighs the loss, or draws would take minutes."""
        most = LARGEST_MULTIPLIER * self.gaussian_mu(1.0, released).value
        return sigma > most or self._problem(released).law.rounds > EFFORT.chains.rounds

    @abstractmethod
    def _problem(self, released: int) -> Problem:
        """What is asked about the first `released` rounds. Raises ValueError for C that is not accounted for."""
