"""What is promised to a user, with all that a reviewer needs to check it."""

from dataclasses import dataclass

ADJACENCY = "add or remove one user"


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(ε, δ)-differential privacy between the data with one user and the data with that user's updates all zero.

    `noise_multiplier` is σ, which holds the sensitivity: the noise has standard deviation ζσ per coordinate of Z, for clip
    norm ζ. `sensitivity` is that of C where the method goes through it, else None. `exact` says that ε is the smallest possible
    (up to rounding, on the safe side), else it is an upper bound. A method that draws random numbers may be wrong with
    `failure_probability`, over the choice of its seed; read δ + `failure_probability` for a promise without that clause.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    sampling: str
    method: str
    adjacency: str = ADJACENCY
    sensitivity: float | None = None
    exact: bool = False
    failure_probability: float = 0.0

    def __str__(self) -> str:
        terms = [self.adjacency, f"sampling: {self.sampling}", self.method]
        if self.failure_probability:
            terms.append(f"holds with probability 1 − {self.failure_probability:.0e}")
        return f"ε ≤ {rounded_up(self.epsilon)} at δ = {rounded_up(self.delta, 6)} ({'; '.join(terms)})"


def rounded_up(value: float, digits: int = 3) -> str:
    """`value` to so many significant digits, never less than `value` by more than rounding."""
    text = f"{value:.{digits}g}"
    if float(text) < value * (1 - 1e-9):
        step = 10.0 ** (_exponent(value) - digits + 1)
        text = f"{float(text) + step:.{digits}g}"
    return f"{float(text):g}"


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])
