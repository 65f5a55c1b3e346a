"""What every accountant answers: σ from a budget, ε from σ and δ, δ from σ and ε, for one mechanism and participation."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from fedcgd.accounting.answers import answer
from fedcgd.accounting.guarantee import (
    LEAST_DELTA,
    Bound,
    Guarantee,
    Proof,
    check_delta,
    check_epsilon,
    check_noise_multiplier,
)
from fedcgd.accounting.sampled import Sampled
from fedcgd.mechanisms import Mechanism
from fedcgd.participation import Participation
from fedcgd.support.numbers import as_float

Progress = Callable[[str], None]


def silent(_: str) -> None:
    """Progress that nobody listens to."""


@dataclass(frozen=True)
class Accountant(ABC):
    """Upper bounds on the privacy loss of a run; adjacency: zero out one user. All answers are on the safe side.

    `fedcgd.accountant(mechanism, participation)` makes the right one.

    A subclass finds one number (`_sigma_for`, `_epsilon_at`, `_delta_at`) for inputs that are checked and at least one released
    round; it raises ValueError for mechanisms that its sampling is not accounted for.

    Args:
        mechanism: the matrix C.
        participation: who takes part when, over how many rounds.
    """

    mechanism: Mechanism
    participation: Participation

    @abstractmethod
    def check(self) -> None:
        """Raise ValueError if the sampling is not accounted for with this mechanism: then there is no plan of it."""

    def noise_multiplier(self, *, epsilon: float, delta: float, progress: Progress = silent) -> Guarantee:
        """The smallest σ that is proven to keep the whole run within (ε, δ).

        Args:
            epsilon: the budget ε, in [1e-300, 1e15].
            delta: the budget δ, in [1e-300, 1).
            progress: is called with a line of text for each step of a long search.

        Returns:
            The guarantee, with σ in its `noise_multiplier`.

        Raises:
            ValueError: for targets that no σ reaches, and mechanisms that the sampling is not accounted for.
        """
        epsilon, delta = check_epsilon(epsilon), check_delta(delta)
        found = self._kept(("σ", epsilon, delta), lambda: self._sigma_for(epsilon, delta, progress))
        return self._guarantee(found, epsilon, delta, found.value, self.participation.rounds)

    def rough_noise_multiplier(self, *, epsilon: float, delta: float) -> float:
        """About σ, to compare mechanisms by, in less time where `noise_multiplier` draws: never what a run is planned with.

        Args:
            epsilon: the budget ε.
            delta: the budget δ.

        Raises:
            ValueError: as `noise_multiplier` does.
        """
        return self.noise_multiplier(epsilon=epsilon, delta=delta).noise_multiplier

    def epsilon(
        self, *, noise_multiplier: float, delta: float, released: int | None = None, progress: Progress = silent
    ) -> Guarantee:
        """An upper bound on ε for the whole run, or when only the first `released` rounds have been published.

        Args:
            noise_multiplier: σ, positive: noise per unit of clip norm.
            delta: δ, in [1e-300, 1).
            released: how many rounds have been published; None for all.
            progress: is called with a line of text for each step of a long search.

        Returns:
            The guarantee, with the bound in its `epsilon`. That of a part of a run holds if the number of rounds did not depend
            on what they released.

        Raises:
            ValueError: for δ, σ or `released` out of range, and mechanisms that the sampling is not accounted for.
        """
        delta, noise_multiplier = check_delta(delta), check_noise_multiplier(noise_multiplier)
        rounds = self.participation.rounds_released(released)
        found = _NOTHING
        if rounds:
            asked = (noise_multiplier, delta, rounds)
            found = self._kept(("ε", *asked), lambda: self._epsilon_at(*asked, progress))
        return self._guarantee(found, found.value, delta, noise_multiplier, rounds)

    def delta(
        self, *, noise_multiplier: float, epsilon: float, released: int | None = None, progress: Progress = silent
    ) -> Guarantee:
        """An upper bound on δ at `epsilon` for the whole run, or when only the first `released` rounds have been published.

        Args:
            noise_multiplier: σ, positive: noise per unit of clip norm.
            epsilon: ε, at least 0.
            released: how many rounds have been published; None for all.
            progress: is called with a line of text for each step of a long search.

        Returns:
            The guarantee, with the bound in its `delta`: never 0 once a round is released, since no noise with tails gives that.
            That of a part of a run holds if the number of rounds did not depend on what they released.

        Raises:
            ValueError: for ε, σ or `released` out of range, and mechanisms that the sampling is not accounted for.
        """
        epsilon = as_float("epsilon", epsilon)
        if not 0 <= epsilon < float("inf"):
            raise ValueError(f"epsilon must be at least 0 and finite, got {epsilon}")
        noise_multiplier = check_noise_multiplier(noise_multiplier)
        rounds = self.participation.rounds_released(released)
        found = _NOTHING
        if rounds:
            asked = (noise_multiplier, epsilon, rounds)
            found = self._kept(("δ", *asked), lambda: self._delta_at(*asked, progress))
        value = max(found.value, LEAST_DELTA) if rounds else 0.0
        return self._guarantee(found, epsilon, value, noise_multiplier, rounds)

    def quick_epsilon(self, whole: Guarantee, released: int) -> Guarantee:
        """As `epsilon`, perhaps less tight, in no time once that of the `whole` run is known: for what is said in every round.

        Args:
            whole: of which σ and δ are those that are asked for.
            released: how many rounds have been published.

        Raises:
            ValueError: as `epsilon` does.
        """
        return self.epsilon(noise_multiplier=whole.noise_multiplier, delta=whole.delta, released=released)

    @abstractmethod
    def gaussian_mu(self, noise_multiplier: float, released: int) -> Bound:
        """μ of the Gaussian mechanism that the first `released` rounds are at most, for an adversary who knows all rounds.

        Args:
            noise_multiplier: σ, positive.
            released: how many rounds have been published.

        Returns:
            μ in `value`: the sensitivity of what is published over σ.
        """

    @abstractmethod
    def releases(self, noise_multiplier: float, released: int, delta: float) -> tuple[Sampled, float]:
        """Independent releases, for noise 1, that dominate the first `released` rounds, and the chance that draws mislead them.

        Args:
            noise_multiplier: σ, positive.
            released: how many rounds have been published.
            delta: they are tight where δ is about as large.
        """

    @abstractmethod
    def _sigma_for(self, epsilon: float, delta: float, progress: Progress) -> Bound: ...

    @abstractmethod
    def _epsilon_at(self, sigma: float, delta: float, released: int, progress: Progress) -> Bound: ...

    @abstractmethod
    def _delta_at(self, sigma: float, epsilon: float, released: int, progress: Progress) -> Bound: ...

    def _kept(self, asked: tuple[str | float, ...], find: Callable[[], Bound]) -> Bound:
        return answer(self.mechanism, self.participation, (type(self).__name__, *asked), find)

    def _guarantee(self, found: Bound, epsilon: float, delta: float, sigma: float, released: int) -> Guarantee:
        return Guarantee(
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=sigma,
            sampling=self.participation.sampling,
            rounds=self.participation.rounds,
            released=released,
            proof=found.proof,
        )


_NOTHING = Bound(0.0, Proof("nothing is released", sensitivity=0.0, exact=True))
