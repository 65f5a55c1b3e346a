"""How often the best attacker is right about one user: ε and δ as one number that anybody can judge."""

from dataclasses import dataclass

from fedcgd.accounting.accountant import Accountant, Progress, silent
from fedcgd.accounting.guarantee import rounded_up


@dataclass(frozen=True, kw_only=True)
class AttackerAccuracy:
    """In at most this part of all cases anybody is right about whether one user's updates were used or replaced by zeros.

    For a fair coin that decides which, and an attacker who knows everything else. ½ is a guess; 1 is certainty.
    """

    value: float
    gaussian_mu: float | None
    """μ of the Gaussian mechanism that the run is at most, for which it is Φ(μ/2); None with a sampling."""

    @property
    def percent(self) -> str:
        """In percent, rounded up."""
        return rounded_up(100 * self.value, 4)


def attacker_accuracy(
    accountant: Accountant, *, noise_multiplier: float, progress: Progress = silent
) -> AttackerAccuracy:
    """(1 + δ(0))/2, where δ(0) is δ at ε = 0: the total variation distance between what is released with and without the user.

    Without a sampling that is Φ(μ/2) (Dong, Roth and Su, "Gaussian Differential Privacy", 2019, arXiv:1905.02383), with one it
    follows from the privacy loss distribution; from one pair (ε, δ) only (e^ε + δ)/(e^ε + 1) follows, which is nearly always
    far more.

    Args:
        accountant: of the run.
        noise_multiplier: σ, positive.
        progress: is told what is calculated.

    Raises:
        ValueError: for σ out of range, and mechanisms that the sampling is not accounted for.
    """
    progress("the best attacker")
    at_zero = accountant.delta(noise_multiplier=noise_multiplier, epsilon=0.0)
    mu = None
    if not accountant.participation.is_secret and at_zero.proof.sensitivity is not None:
        mu = at_zero.proof.sensitivity / noise_multiplier
    return AttackerAccuracy(value=min(1.0, (1 + at_zero.delta) / 2), gaussian_mu=mu)
