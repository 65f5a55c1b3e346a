"""What is promised to a user, with all that a reviewer needs to check it."""

import math
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any

from fedcgd.support.html import table
from fedcgd.support.numbers import as_float

ADJACENCY = "zero out one user"
"""Two data sets are neighbours if one is the other with all updates of one user replaced by zeros; both directions count."""
NO_NOISE = "NO NOISE (σ = 0, for debugging): nothing here is private"
CONDITION = "true only if the decision to stop there did not depend on a released model"

LEAST_DELTA = 1e-300
WITHOUT_AMPLIFICATION = "exact Gaussian mechanism for an adversary who knows the user's rounds, without amplification"


@dataclass(frozen=True)
class Proof:
    """How a number was found, and what it rests on.

    Attributes:
        method: in words.
        sensitivity: that of C where the method goes through it, else None.
        exact: whether the number is the smallest possible (up to rounding, on the safe side); else it is an upper bound.
        failure_probability: the chance that the random draws of the method mislead it; 0 where it draws none.
    """

    method: str
    sensitivity: float | None = None
    exact: bool = False
    failure_probability: float = 0.0

    def __str__(self) -> str:
        if not self.failure_probability:
            return self.method
        return f"{self.method}; δ includes {rounded_up(self.failure_probability)} for Monte Carlo samples that mislead"


@dataclass(frozen=True)
class Bound:
    """A number that was found, and how."""

    value: float
    proof: Proof


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(ε, δ)-differential privacy between the data with one user and the data with that user's updates all zero.

    Of a part of a run it holds under `condition` only; an adversary for whom that may be false is promised that of the whole run.

    Attributes:
        epsilon: ε; infinite without noise.
        delta: δ, all of it: `proof.failure_probability` is a part of it.
        noise_multiplier: σ (no unit), which includes the sensitivity: the noise has standard deviation ζσ per coordinate of Z,
            for clip norm ζ.
        sampling: how users' rounds are chosen, as in `Participation`.
        rounds: n, the releases of the whole run.
        released: how many of them have been published.
        proof: how the number was found.

    >>> from fedcgd import DPSGD, Participation, compute_epsilon
    >>> print(compute_epsilon(DPSGD(), Participation(rounds=1), noise_multiplier=4.0, delta=1e-5))
    ε ≤ 0.927 at δ = 1e-05 (zero out one user; sampling: none; exact Gaussian mechanism)
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    sampling: str
    rounds: int
    released: int
    proof: Proof
    adjacency = ADJACENCY  # of every guarantee

    @property
    def condition(self) -> str | None:
        """What a guarantee for a part of a run rests on; None for a whole run."""
        return None if self.released == self.rounds else CONDITION

    def __str__(self) -> str:
        if not self.noise_multiplier:
            return (
                f"{NO_NOISE}: ε = ∞ at δ = {rounded_up(self.delta, 6)} ({self.adjacency}; sampling: {self.sampling}; "
                f"{self.proof.method})"
            )
        part = f" after {self.released} of {self.rounds} rounds, {self.condition}" if self.condition else ""
        terms = [self.adjacency, f"sampling: {self.sampling}", str(self.proof)]
        return f"ε ≤ {rounded_up(self.epsilon)} at δ = {rounded_up(self.delta, 6)}{part} ({'; '.join(terms)})"

    def _repr_html_(self) -> str:
        """What `str` says, as a table, for notebooks."""
        rows = {
            "ε": f"≤ {rounded_up(self.epsilon)}" if self.noise_multiplier else "∞",
            "δ": rounded_up(self.delta, 6),
            "adjacency": self.adjacency,
            "sampling": self.sampling,
            "method": self.proof.method if self.noise_multiplier else f"{NO_NOISE}; {self.proof.method}",
            "rounds": f"{self.released} of {self.rounds}",
        }
        return table(rows | ({"condition": self.condition} if self.condition else {}))

    def to_description(self) -> dict[str, Any]:
        """All fields, those of `proof` among them, `adjacency` and `condition`, as JSON-able values."""
        fields = asdict(self)
        proof: dict[str, Any] = fields.pop("proof")
        return fields | proof | {"adjacency": self.adjacency, "condition": self.condition}


def check_epsilon(epsilon: float) -> float:
    """ε as a float. Raises ValueError unless 1e-300 ≤ ε ≤ 1e15; TypeError for what is no number."""
    epsilon = as_float("epsilon", epsilon)
    if not 1e-300 <= epsilon <= 1e15:
        raise ValueError(f"epsilon must be in [1e-300, 1e15], got {epsilon}; 0.1 to 10 is usual")
    return epsilon


def check_delta(delta: float) -> float:
    """δ as a float. Raises ValueError unless `LEAST_DELTA` ≤ δ < 1; TypeError for what is no number."""
    delta = as_float("delta", delta)
    if not LEAST_DELTA <= delta < 1:
        raise ValueError(f"delta must be in [{LEAST_DELTA:g}, 1), got {delta}; well below 1 / number of users is usual")
    return delta


EXPOSED = 0.1
"""Of a user, whose data a δ allows to publish, on average: from here on a reviewer is told. A run itself warns from one on: with
the few users of a trial everything below is common, and is no reason to stop."""


def large_delta(delta: float, number: int, who: str = "users", *, exposed: float = EXPOSED) -> str | None:
    """What to say of a `delta` that allows to publish the data of `exposed` of so many `who`, or more; None if it does not."""
    if delta * number < exposed:
        return None
    return (
        f"δ times the number of {who} is {rounded_up(delta * number)} ({rounded_up(delta, 6)} · {number}): a mechanism that "
        f"keeps this ε and δ may publish the data of so many of them, on average, as they are; plan with a δ far below 1 / {who}"
    )


def check_noise_multiplier(noise_multiplier: float) -> float:
    """σ as a float. Raises ValueError unless σ is positive and finite; TypeError for what is no number."""
    noise_multiplier = as_float("noise_multiplier", noise_multiplier)
    if not 0 < noise_multiplier < float("inf"):
        raise ValueError(
            f"noise_multiplier must be positive and finite, got {noise_multiplier}; without noise there is no privacy"
        )
    return noise_multiplier


def rounded_up(value: float, digits: int = 3) -> str:
    """`value` to so many significant digits, never less than `value` by more than rounding."""
    if math.isinf(value):
        return "∞"
    upwards = Context(prec=digits, rounding=ROUND_CEILING)
    return f"{float(upwards.create_decimal(value * (1 - 1e-9))):g}"


def rounded_down(value: float, digits: int = 3) -> str:
    """`value` to so many significant digits, never more than `value`."""
    return f"{float(Context(prec=digits, rounding=ROUND_FLOOR).create_decimal(value)):g}"
