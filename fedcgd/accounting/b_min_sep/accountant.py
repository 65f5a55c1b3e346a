"""The accountant of random b-min-separation."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedcgd.accounting.accountant import Bound, Progress
from fedcgd.accounting.b_min_sep import search
from fedcgd.accounting.b_min_sep.columns import columns_of
from fedcgd.accounting.b_min_sep.law import Law
from fedcgd.accounting.b_min_sep.search import Question
from fedcgd.accounting.profile import ProfileAccountant, without_sampling
from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.participation import Participation


@dataclass(frozen=True)
class BMinSepAccountant(ProfileAccountant):
    """Runs in which each user tosses a secret coin in each round in which it may take part, for C without negative entries."""

    def check(self) -> None:
        _question(self.mechanism, self.participation, self.participation.rounds)

    def rough_noise_multiplier(self, *, epsilon: float, delta: float) -> float:
        """σ that a few draws propose, the same random numbers for every mechanism, so that differences between them are seen."""
        question = _question(self.mechanism, self.participation, self.participation.rounds)
        return search.propose(question, epsilon=epsilon, delta=delta)

    def log_ratio(self, sigma: float, seen: Matrix) -> Vector:
        """log S, which tells best whether a user of the worst kind took part, up to a thousandth; shape (draws,).

        Args:
            sigma: the noise multiplier.
            seen: C·x̂/ζ along the user's direction, shape (n, draws): C·1_P plus noise, or noise alone.
        """
        question = _question(self.mechanism, self.participation, self.participation.rounds)
        likelihood = question.at(sigma, 1.0).likelihood
        return np.asarray(np.log(likelihood.bounds(question.columns.adjoint(seen) / sigma**2)[1]))

    def _search_sigma(self, epsilon: float, delta: float, progress: Progress) -> Bound:
        question = _question(self.mechanism, self.participation, self.participation.rounds)
        return search.calibrate(question, epsilon=epsilon, delta=delta, progress=progress)

    def _search_epsilon(self, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        question = _question(self.mechanism, self.participation, released)
        return search.epsilon(question, sigma=sigma, delta=delta, progress=progress)

    def _delta_at(self, sigma: float, epsilon: float, released: int, progress: Progress) -> Bound:
        question = _question(self.mechanism, self.participation, released)
        return search.delta(question, sigma=sigma, epsilon=epsilon, progress=progress)


@lru_cache(maxsize=4)
def _question(mechanism: Mechanism, participation: Participation, released: int) -> Question:
    rate = participation.sampling_rate
    assert rate is not None
    columns = columns_of(mechanism, participation.rounds, participation.min_separation, released)
    law = Law(released, participation.min_separation, rate, participation.warm_start)
    reach = sensitivity(mechanism, without_sampling(participation), released=released).value
    return Question(columns, law, reach)
