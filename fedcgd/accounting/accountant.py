"""What every accountant answers: σ from a budget, ε from σ and δ, δ from σ and ε, for one mechanism and participation."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from fedcgd.accounting.guarantee import (
    LEAST_DELTA,
    Guarantee,
    check_delta,
    check_epsilon,
    check_noise_multiplier,
)
from fedcgd.mechanisms import Mechanism
from fedcgd.numeric import as_float
from fedcgd.participation import Participation

Progress = Callable[[str], None]


def silent(_: str) -> None:
    """Progress that nobody listens to."""


@dataclass(frozen=True)
class Bound:
    """A number that was found, and how; the fields are those of `Guarantee`."""

    value: float
    method: str
    sensitivity: float | None = None
    exact: bool = False
    failure_probability: float = 0.0


@dataclass(frozen=True)
class Accountant(ABC):
    """Upper bounds on the privacy loss of a run, adjacency zero out one user. All answers are on the safe side.

    A subclass finds one number (`_sigma_for`, `_epsilon_at`, `_delta_at`) for inputs that are checked and at least one released
    round; it raises ValueError for mechanisms that its sampling is not accounted for.
    """

    mechanism: Mechanism
    participation: Participation

    @abstractmethod
    def check(self) -> None:
        """Raise ValueError if the sampling is not accounted for with this mechanism: then there is no plan of it."""

    def noise_multiplier(self, *, epsilon: float, delta: float, progress: Progress = silent) -> Guarantee:
        """The smallest σ that is proven to keep the whole run within (ε, δ).

        Raises ValueError for impossible targets, and for mechanisms that the sampling is not accounted for.
        """
        epsilon, delta = check_epsilon(epsilon), check_delta(delta)
        found = self._sigma_for(epsilon, delta, progress)
        return self._guarantee(found, epsilon, delta, found.value, self.participation.rounds)

    def rough_noise_multiplier(self, *, epsilon: float, delta: float) -> float:
        """About σ, to compare mechanisms by, in less time where `noise_multiplier` draws: never what a run is planned with."""
        return self.noise_multiplier(epsilon=epsilon, delta=delta).noise_multiplier

    def epsilon(
        self, *, noise_multiplier: float, delta: float, released: int | None = None, progress: Progress = silent
    ) -> Guarantee:
        """An upper bound on ε for the whole run, or when only the first `released` rounds have been published.

        Of a part it holds if the number of rounds did not depend on what they released. Raises ValueError for δ or σ out of
        range, and for mechanisms that the sampling is not accounted for.
        """
        delta, noise_multiplier = check_delta(delta), check_noise_multiplier(noise_multiplier)
        rounds = self.participation.rounds_released(released)
        found = self._epsilon_at(noise_multiplier, delta, rounds, progress) if rounds else _NOTHING
        return self._guarantee(found, found.value, delta, noise_multiplier, rounds)

    def delta(
        self, *, noise_multiplier: float, epsilon: float, released: int | None = None, progress: Progress = silent
    ) -> Guarantee:
        """An upper bound on δ at `epsilon` ≥ 0, for the whole run, or when only the first `released` rounds have been published.

        Of a part it holds if the number of rounds did not depend on what they released. Never 0 once a round is released: no
        noise with tails gives that. Raises ValueError for ε or σ out of range, and for mechanisms that the sampling is not
        accounted for.
        """
        epsilon = as_float("epsilon", epsilon)
        if not 0 <= epsilon < float("inf"):
            raise ValueError(f"epsilon must be at least 0 and finite, got {epsilon}")
        noise_multiplier = check_noise_multiplier(noise_multiplier)
        rounds = self.participation.rounds_released(released)
        found = self._delta_at(noise_multiplier, epsilon, rounds, progress) if rounds else _NOTHING
        value = max(found.value, LEAST_DELTA) if rounds else 0.0
        return self._guarantee(found, epsilon, value, noise_multiplier, rounds)

    def quick_epsilon(self, *, noise_multiplier: float, delta: float, released: int) -> Guarantee:
        """As `epsilon`, perhaps less tight, in no time once that of the whole run is known: for what is said in every round."""
        return self.epsilon(noise_multiplier=noise_multiplier, delta=delta, released=released)

    @abstractmethod
    def gaussian_mu(self, noise_multiplier: float, released: int) -> Bound:
        """μ of the Gaussian mechanism that the first `released` rounds are at most, for an adversary who knows all rounds."""

    @abstractmethod
    def loss_distribution(
        self, noise_multiplier: float, released: int, step: float, least_delta: float
    ) -> tuple[PrivacyLossDistribution, float]:
        """A privacy loss distribution that dominates the first `released` rounds, and the probability that draws mislead it.

        Its losses are multiples of `step`; it need not be tight at δ below `least_delta`.
        """

    @abstractmethod
    def _sigma_for(self, epsilon: float, delta: float, progress: Progress) -> Bound: ...

    @abstractmethod
    def _epsilon_at(self, sigma: float, delta: float, released: int, progress: Progress) -> Bound: ...

    @abstractmethod
    def _delta_at(self, sigma: float, epsilon: float, released: int, progress: Progress) -> Bound: ...

    def _guarantee(self, found: Bound, epsilon: float, delta: float, sigma: float, released: int) -> Guarantee:
        return Guarantee(
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=sigma,
            sampling=self.participation.sampling,
            method=found.method,
            rounds=self.participation.rounds,
            released=released,
            sensitivity=found.sensitivity,
            exact=found.exact,
            failure_probability=found.failure_probability,
        )


_NOTHING = Bound(0.0, "nothing is released", sensitivity=0.0, exact=True)
