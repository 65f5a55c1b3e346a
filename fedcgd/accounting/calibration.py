"""What the accountant of a run answers: σ from a budget, ε from σ, δ from both."""

from fedcgd.accounting.accountant import Accountant, Progress, silent
from fedcgd.accounting.by_sampling import accountant
from fedcgd.accounting.guarantee import Guarantee
from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.own import check_own
from fedcgd.participation import Participation


def _tried(mechanism: Mechanism, participation: Participation) -> Accountant:
    """`accountant`; ValueError for a mechanism of the caller's own whose noise is not that of its C: ε would be another's."""
    found = accountant(mechanism, participation)
    check_own(mechanism, participation.rounds)
    return found


def calibrate(
    mechanism: Mechanism, participation: Participation, *, epsilon: float, delta: float, progress: Progress = silent
) -> Guarantee:
    """The smallest noise multiplier σ that is proven to keep the whole run within (ε, δ); adjacency: zero out one user.

    Args:
        mechanism: the matrix C, such as `LambdaCGD(0.9)`.
        participation: who takes part when, over how many rounds.
        epsilon: the budget ε, in [1e-300, 1e15].
        delta: the budget δ, in [1e-300, 1); well below 1 / number of users.
        progress: is called with a line of text for each step of a long search.

    Returns:
        The guarantee, with σ in `noise_multiplier`: noise per unit of clip norm, the sensitivity of C included.

    Raises:
        ValueError: for targets that no σ reaches, and mechanisms that the sampling is not accounted for.

    >>> from fedcgd.mechanisms import LambdaCGD
    >>> participation = Participation(rounds=210, min_separation=21)
    >>> f"{calibrate(LambdaCGD(0.9), participation, epsilon=8, delta=1e-5).noise_multiplier:.3f}"
    '4.803'
    """
    return _tried(mechanism, participation).noise_multiplier(epsilon=epsilon, delta=delta, progress=progress)


def compute_epsilon(
    mechanism: Mechanism,
    participation: Participation,
    *,
    noise_multiplier: float,
    delta: float,
    released: int | None = None,
    progress: Progress = silent,
) -> Guarantee:
    """An upper bound on ε for the whole run, or for its first `released` rounds; adjacency: zero out one user.

    The number of rounds must not depend on what they released (`Guarantee.condition`). Under Balls-in-Bins a part of a run is a
    calculation of its own, in seconds.

    Args:
        mechanism: the matrix C, such as `LambdaCGD(0.9)`.
        participation: who takes part when, over how many rounds.
        noise_multiplier: σ, positive: noise per unit of clip norm.
        delta: δ, in [1e-300, 1).
        released: how many rounds have been published; None for all.
        progress: is called with a line of text for each step of a long search.

    Returns:
        The guarantee, with the bound in `epsilon`.

    Raises:
        ValueError: for δ or σ out of range, and mechanisms that the sampling is not accounted for.

    >>> from fedcgd.mechanisms import DPSGD
    >>> print(compute_epsilon(DPSGD(), Participation(rounds=1), noise_multiplier=4.0, delta=1e-5))
    ε ≤ 0.927 at δ = 1e-05 (zero out one user; sampling: none; exact Gaussian mechanism)
    """
    return _tried(mechanism, participation).epsilon(
        noise_multiplier=noise_multiplier, delta=delta, released=released, progress=progress
    )


def compute_delta(
    mechanism: Mechanism,
    participation: Participation,
    *,
    noise_multiplier: float,
    epsilon: float,
    released: int | None = None,
    progress: Progress = silent,
) -> Guarantee:
    """An upper bound on δ at `epsilon`, for the whole run or for its first `released` rounds; adjacency: zero out one user.

    The number of rounds must not depend on what they released (`Guarantee.condition`).

    Args:
        mechanism: the matrix C, such as `LambdaCGD(0.9)`.
        participation: who takes part when, over how many rounds.
        noise_multiplier: σ, positive: noise per unit of clip norm.
        epsilon: ε, at least 0.
        released: how many rounds have been published; None for all.
        progress: is called with a line of text for each step of a long search.

    Returns:
        The guarantee, with the bound in `delta`. It is never 0 once a round is released: no noise with tails gives that.

    Raises:
        ValueError: for ε or σ out of range, and mechanisms that the sampling is not accounted for.

    >>> from fedcgd.mechanisms import DPSGD
    >>> f"{compute_delta(DPSGD(), Participation(rounds=1), noise_multiplier=4.0, epsilon=1.0).delta:.2g}"
    '2.9e-06'
    """
    return _tried(mechanism, participation).delta(
        noise_multiplier=noise_multiplier, epsilon=epsilon, released=released, progress=progress
    )
