"""Which accountant a run has, and what it answers: σ from a budget, ε from σ, δ from both."""

from typing import Literal, get_args

from fedcgd.accounting.accountant import Accountant, Progress, silent
from fedcgd.accounting.b_min_sep import BMinSepAccountant
from fedcgd.accounting.balls_in_bins import BallsInBinsAccountant
from fedcgd.accounting.gaussian import GaussianAccountant
from fedcgd.accounting.guarantee import Guarantee
from fedcgd.accounting.poisson import PoissonAccountant
from fedcgd.mechanisms import Mechanism
from fedcgd.participation import Participation

Method = Literal["monte-carlo", "deterministic"]
"""How Balls-in-Bins is bounded: by draws, in seconds, with a failure probability; or without any, in minutes, a little higher.
The other samplings draw nothing either way. If none is asked for, it is the second where C = I, since there it is about as
tight and as fast, and the first elsewhere."""


def accountant(mechanism: Mechanism, participation: Participation, method: Method | None = None) -> Accountant:
    """The accountant for runs of `mechanism` in which users take part as `participation` says.

    It costs nothing to make. `method` is for Balls-in-Bins. Raises ValueError for an unknown method, TypeError for what is no
    mechanism, such as its λ alone, its class or its name, or no participation, such as a number of rounds.
    """
    if isinstance(mechanism, type) or not hasattr(mechanism, "inverse_row"):
        raise TypeError(f"mechanism must be a value such as LambdaCGD(0.9) or DPSGD(), got {mechanism!r}")
    if not isinstance(participation, Participation):
        raise TypeError(
            f"participation must be a Participation, such as Participation(rounds=100), got {participation!r}"
        )
    if method is not None and method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    match participation.sampling:
        case "none":
            return GaussianAccountant(mechanism, participation)
        case "poisson" | "cyclic-poisson":
            return PoissonAccountant(mechanism, participation)
        case "balls-in-bins":
            return BallsInBinsAccountant(mechanism, participation, method)
        case "b-min-sep":
            return BMinSepAccountant(mechanism, participation)


def calibrate(
    mechanism: Mechanism,
    participation: Participation,
    *,
    epsilon: float,
    delta: float,
    method: Method | None = None,
    progress: Progress = silent,
) -> Guarantee:
    """The smallest noise multiplier σ that is proven to keep the whole run within (ε, δ).

    Adjacency: zero out one user. `progress` is told the steps of a search under Balls-in-Bins. Raises ValueError for
    impossible targets, and for mechanisms that the sampling is not accounted for.
    """
    return accountant(mechanism, participation, method).noise_multiplier(
        epsilon=epsilon, delta=delta, progress=progress
    )


def compute_epsilon(
    mechanism: Mechanism,
    participation: Participation,
    *,
    noise_multiplier: float,
    delta: float,
    released: int | None = None,
    method: Method | None = None,
    progress: Progress = silent,
) -> Guarantee:
    """An upper bound on ε for the whole run, or when only the first `released` rounds have been published.

    The number of rounds must not depend on what they released (`Guarantee.condition`). Under Balls-in-Bins a part of a run is a
    calculation of its own, in seconds. Raises ValueError for δ or σ out of range, and for mechanisms that the sampling is not
    accounted for.
    """
    return accountant(mechanism, participation, method).epsilon(
        noise_multiplier=noise_multiplier, delta=delta, released=released, progress=progress
    )


def compute_delta(
    mechanism: Mechanism,
    participation: Participation,
    *,
    noise_multiplier: float,
    epsilon: float,
    released: int | None = None,
    method: Method | None = None,
    progress: Progress = silent,
) -> Guarantee:
    """An upper bound on δ at `epsilon` ≥ 0, for the whole run, or when only the first `released` rounds have been published.

    The number of rounds must not depend on what they released (`Guarantee.condition`). Never 0 once a round is released: no
    noise with tails gives that. Raises ValueError for ε or σ out of range, and for mechanisms that the sampling is not accounted
    for.
    """
    return accountant(mechanism, participation, method).delta(
        noise_multiplier=noise_multiplier, epsilon=epsilon, released=released, progress=progress
    )
