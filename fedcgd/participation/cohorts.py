"""Which users take part in a round: keeps the promise that the accounting relies on, while users come and go."""

from collections.abc import Iterable, Sequence

from fedcgd.participation import Participation
from fedcgd.participation.history import History
from fedcgd.participation.samplings import DrawnInAdvance
from fedcgd.participation.user_ids import check_not_one_text


def eligible(participation: Participation, round: int, users: Iterable[str], history: History) -> list[str]:
    """The `users` that may take part in `round`: fewer than k participations, the last at least b rounds ago.

    A user who is already counted in this very round may take part when it is tried again.
    """
    check_not_one_text(users)
    return participation.scheme.eligible(participation, round, users, history)


def cohort(
    participation: Participation,
    round: int,
    available: Iterable[str],
    history: History,
    *,
    cohort_size: int,
    key: bytes,
) -> list[str] | None:
    """The users of `round`, sorted; None if the sampling fills cohorts and fewer than `cohort_size` may take part.

    A pure function of its arguments, not of their order; `key` (a secret of at most 64 bytes) stands for all coin flips.
    Without a secret `cohort_size` users are taken of those eligible, in an order that the sampling says. With one its draws
    alone decide, and users who were drawn but are away are not replaced: replacements would tell who was drawn. A retry of
    a round draws the same users. Guarantee: no sequence of calls, whatever is available, lets a user exceed `participation`,
    if each result is in the `history` of the next call.
    """
    check_not_one_text(available)
    check_round(participation, round)
    return participation.scheme.cohort(participation, round, set(available), history, cohort_size=cohort_size, key=key)


def rounds_of(user: str, participation: Participation, key: bytes) -> Sequence[int]:
    """The rounds that `user` draws for the whole run, ascending.

    They follow from `key` and `user` alone, so that they are fixed before the first round, are the same when they are asked
    for again, and do not depend on releases, on who is available, or on other users. Raises ValueError for a sampling that
    draws, or fills, each round by itself.
    """
    scheme = participation.scheme
    if not isinstance(scheme, DrawnInAdvance):
        raise ValueError(  # noqa: TRY004  (it is the name that is wrong)
            f"{participation.sampling} draws no rounds in advance; ask for the cohort of each round"
        )
    return scheme.rounds_of(user, participation, key)


def check_round(participation: Participation, round: int) -> None:
    """Raise ValueError for a round outside the plan."""
    if not 0 <= round < participation.rounds:
        raise ValueError(
            f"round must be in 0 … {participation.rounds - 1}, got {round}; what comes after is not accounted for"
        )
