"""One participation of each sampling, as the command line asks for it: what tests of all samplings take."""

from collections.abc import Callable

from fedcgd.participation import Participation
from fedcgd.participation.cohorts import cohort
from fedcgd.participation.history import History

ROUNDS = 12
"""Of each."""

SAMPLINGS: dict[str, tuple[Participation, list[str]]] = {
    "none": (Participation(rounds=12, min_separation=3), ["--separation", "3"]),
    "balls-in-bins": (Participation(rounds=12, min_separation=3, sampling="balls-in-bins"), ["--separation", "3"]),
    "poisson": (Participation(rounds=12, sampling="poisson", sampling_rate=1 / 3), ["--participations", "4"]),
    "cyclic-poisson": (
        Participation(rounds=12, min_separation=2, sampling="cyclic-poisson", sampling_rate=2 / 3),
        ["--separation", "2", "--participations", "4"],
    ),
    "b-min-sep": (
        Participation(rounds=12, min_separation=2, sampling="b-min-sep", sampling_rate=1 / 2),
        ["--separation", "2", "--participations", "4"],
    ),
    "random-allocation": (
        Participation(rounds=12, max_participations=4, sampling="random-allocation"),
        ["--participations", "4"],
    ),
    "shuffle": (
        Participation(rounds=12, max_participations=4, sampling="shuffle"),
        ["--participations", "4"],
    ),
}


def played(
    participation: Participation,
    users: list[str],
    cohort_size: int = 1,
    *,
    key: bytes = bytes(range(32)),
    away: Callable[[int, int], bool] = lambda i, t: False,
) -> list[list[str]]:
    """The cohorts of all rounds, [] where there was none; `away` says of the i-th user whether it is absent in round t.

    Each round is tried twice, with the users in another order and its cohort counted, which must not change it.
    """
    history, found = History(), []
    for t in range(participation.rounds):
        there = [user for i, user in enumerate(users) if not away(i, t)]
        chosen = cohort(participation, t, there, history, cohort_size=cohort_size, key=key)
        history = history.with_round(t, chosen or [])
        assert chosen == cohort(participation, t, there[::-1], history, cohort_size=cohort_size, key=key)
        found.append(chosen or [])
    return found
