"""What several runs over the same people cost together.

Runs without a sampling are Gaussian mechanisms, and their μ = sensitivity/σ add in squares: exact, also when a run starts from
the models of those before it (Corollary 3.3 of Dong, Roth and Su, "Gaussian Differential Privacy", 2019, arXiv:1905.02383).
Sampled runs are composed by privacy loss distributions that dominate each of them, on a grid that errs upwards; the answer is
never above that for an adversary who knows all rounds.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedcgd.accounting import gaussian
from fedcgd.accounting.accountant import Accountant, Progress, silent
from fedcgd.accounting.by_sampling import accountant
from fedcgd.accounting.guarantee import (
    ADJACENCY,
    LEAST_DELTA,
    Bound,
    Proof,
    check_delta,
    check_noise_multiplier,
    rounded_up,
)
from fedcgd.accounting.sampled import Sampled
from fedcgd.mechanisms import Mechanism
from fedcgd.participation import Participation
from fedcgd.support.numbers import as_float, plural

JOINT_CONDITION = "true only if which runs there were, and how long they were, did not depend on a released model"


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run, or its first rounds, for `compose`.

    Args:
        mechanism: the matrix C.
        participation: who takes part when, over how many rounds.
        noise_multiplier: σ, noise per unit of clip norm.
        released: how many rounds are out; None for all.

    Raises:
        ValueError: for numbers out of range.
    """

    mechanism: Mechanism
    participation: Participation
    noise_multiplier: float
    released: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", as_float("noise_multiplier", self.noise_multiplier))
        self.participation.rounds_released(self.released)

    @property
    def rounds_released(self) -> int:
        """How many rounds are out."""
        return self.participation.rounds_released(self.released)

    @property
    def accountant(self) -> Accountant:
        """What answers for this run alone."""
        return accountant(self.mechanism, self.participation)

    def gaussian_mu(self) -> Bound:
        """μ of the Gaussian mechanism that it is at most, for an adversary who knows the rounds of each user."""
        return self.accountant.gaussian_mu(self.noise_multiplier, self.rounds_released)


@dataclass(frozen=True, kw_only=True)
class JointGuarantee:
    """(ε, δ)-differential privacy of all releases of several runs together, for a user who may be in all of them.

    Attributes:
        epsilon: ε.
        delta: δ, all of it: `proof.failure_probability` is a part of it.
        runs: how many.
        released: the rounds of all of them that are out.
        proof: how ε was found.
        adjacency: which data sets are neighbours.
        condition: what it rests on.
    """

    epsilon: float
    delta: float
    runs: int
    released: int
    proof: Proof
    adjacency = ADJACENCY  # of every joint guarantee, as is what it rests on
    condition = JOINT_CONDITION

    def __str__(self) -> str:
        covered = f"{plural(self.released, 'round', 'rounds')} of {plural(self.runs, 'run', 'runs')}"
        return (
            f"ε ≤ {rounded_up(self.epsilon)} at δ = {rounded_up(self.delta, 6)} for {covered} "
            f"together, {self.condition} ({self.adjacency}; {self.proof})"
        )

    def to_description(self) -> dict[str, Any]:
        """All of it as JSON-able values."""
        fields = asdict(self)
        proof: dict[str, Any] = fields.pop("proof")
        return fields | proof | {"adjacency": self.adjacency, "condition": self.condition}


def compose(runs: Sequence[PastRun], *, delta: float, progress: Progress = silent) -> JointGuarantee:
    """An upper bound on the joint ε of `runs` at `delta`, for one user who may have been in every one of them.

    Adjacency: that user's updates become zero in all runs. Exact if no run has a sampling and all sensitivities are exact. The
    secret bins and coins of a run must be independent of those of the others. A run may start from the models of earlier ones;
    which runs there are, their plans and lengths must not depend on released models. With Balls-in-Bins it takes about as long
    as sixteen single δ.

    Args:
        runs: all runs that the user may have been in, each a `PastRun`.
        delta: δ of all of them together, in [1e-300, 1).
        progress: is called with a line of text for each sampled run.

    Returns:
        The joint guarantee. Where the amplification of samplings is left out its `method` says so.

    Raises:
        ValueError: for δ or σ out of range, and for runs that are not accounted for.

    >>> from fedcgd.accounting import calibrate
    >>> from fedcgd.mechanisms import LambdaCGD
    >>> participation = Participation(rounds=210, min_separation=21)
    >>> sigma = calibrate(LambdaCGD(0.9), participation, epsilon=8, delta=1e-5).noise_multiplier
    >>> run = PastRun(mechanism=LambdaCGD(0.9), participation=participation, noise_multiplier=sigma)
    >>> f"{compose([run, run], delta=1e-5).epsilon:.3f}"
    '12.256'
    """
    delta = check_delta(delta)
    for run in runs:
        check_noise_multiplier(run.noise_multiplier)
    out = [run for run in runs if run.rounds_released]
    known = [run.gaussian_mu() for run in out]
    epsilon = _gaussian(known, delta)
    risk, sampled = 0.0, any(run.participation.is_secret for run in out)
    exact = all(loss.proof.exact for loss in known) and not sampled
    method = "exact composition of Gaussian mechanisms" + ("" if exact else ", of upper bounds on their losses")
    if sampled:
        method += ", without the amplification of any sampling"
        found, failure = _amplified(out, known, delta, epsilon, progress)
        if found < epsilon:
            epsilon, risk = found, failure
            method = "dominating privacy loss distributions on a grid that errs upwards, composed"
    return JointGuarantee(
        epsilon=epsilon,
        delta=delta,
        runs=len(runs),
        released=sum(run.rounds_released for run in out),
        proof=Proof(method, exact=exact, failure_probability=risk),
    )


def _gaussian(known: Sequence[Bound], delta: float) -> float:
    """ε of Gaussian mechanisms with these μ."""
    mu = math.hypot(*(loss.value for loss in known))
    return gaussian.epsilon(sigma=1 / mu, delta=delta) if mu else 0.0


def _amplified(
    runs: Sequence[PastRun], known: Sequence[Bound], delta: float, most: float, progress: Progress
) -> tuple[float, float]:
    """ε, at most `most`, and the probability that draws mislead."""
    plain = math.hypot(*(loss.value for run, loss in zip(runs, known, strict=True) if not run.participation.is_secret))
    releases = list(Sampled.certain(plain, "").releases) if plain else []
    sampled, risk = Counter(run for run in runs if run.participation.is_secret), 0.0
    for number, (run, times) in enumerate(sampled.items(), 1):
        progress(f"sampled run {number} of {len(sampled)}")
        found, failure = run.accountant.releases(run.noise_multiplier, run.rounds_released, delta / len(runs))
        releases += [(release, times * often) for release, often in found.releases]
        risk += failure
    left = delta - risk
    return (Sampled(tuple(releases), "").epsilon(1.0, left, most), risk) if left >= LEAST_DELTA else (most, 0.0)
