"""What each sampling is, says and draws: a table of its words, and the new orders of shuffled batches."""

from dataclasses import asdict
from itertools import pairwise

import pytest
from sampling_table import SAMPLINGS as TABLE
from sampling_table import played

from fedcgd.participation import SAMPLINGS, Participation
from fedcgd.participation.cohorts import rounds_of
from fedcgd.participation.samplings import SECRET_SAMPLINGS, Law

KEY = bytes(range(32))


def test_secrets_amplify_and_need_no_groups() -> None:
    assert set(SECRET_SAMPLINGS) == {"balls-in-bins", "poisson", "b-min-sep", "random-allocation"}
    for scheme in SAMPLINGS.values():
        assert (scheme.hidden is None) == (scheme.law is Law.KNOWN) == ("same ε" not in scheme.absence)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_participation_is_made_for_cohorts(name: str) -> None:
    """With 8 of 24 users in a round, as the one of the table; what does not fit is refused."""
    made = Participation.for_cohorts(name, 12, users=24, cohort_size=8, min_separation=TABLE[name][0].min_separation)
    assert made == TABLE[name][0] or made.participations == TABLE[name][0].participations
    assert made.expected_rate in (None, pytest.approx(1 / 3))
    assert made.users_for(8) == 24
    assert eval(made.as_python(), {"Participation": Participation}) == made
    for wrong in ({"users": 24, "cohort_size": 25}, {"users": 24, "cohort_size": 0}):
        with pytest.raises(ValueError, match="cohort_size"):
            Participation.for_cohorts(name, 12, **wrong)
    with pytest.raises(ValueError, match="min_separation"):
        Participation.for_cohorts(name, 12, users=24, cohort_size=8, min_separation=4)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("number", ["rounds", "users", "cohort_size", "min_separation"])
@pytest.mark.parametrize("value", [8.0, 2.5, "8", True, float("nan")], ids=repr)
def test_what_is_no_whole_number_makes_no_cohorts(name: str, number: str, value: object) -> None:
    numbers = {"rounds": 12, "users": 24, "cohort_size": 8} | {number: value}
    with pytest.raises(ValueError, match=f"^{number} .*{value!r}"):
        Participation.for_cohorts(name, **numbers)


@pytest.mark.parametrize("name", ["none", "balls-in-bins"])
def test_of_a_run_that_is_shorter_than_an_epoch_each_round_has_other_users(name: str) -> None:
    assert Participation.for_cohorts(name, 5, users=100, cohort_size=5).min_separation == 5


@pytest.mark.parametrize("name", SAMPLINGS)
def test_numbers_are_of_some_samplings_only(name: str) -> None:
    numbers = asdict(TABLE[name][0])
    assert SAMPLINGS[name].takes_rate == (name in ("poisson", "cyclic-poisson", "b-min-sep"))
    assert SAMPLINGS[name].has_bins == (name in ("balls-in-bins", "cyclic-poisson"))
    if not SAMPLINGS[name].takes_rate:
        with pytest.raises(ValueError, match="sampling_rate"):
            Participation(**numbers | {"sampling_rate": 0.5})
    if name != "b-min-sep":
        with pytest.raises(ValueError, match="warm_start"):
            Participation(**numbers | {"warm_start": False})


@pytest.mark.parametrize(("groups", "n", "k"), [(1, 1024, 4), (8, 1024, 4), (256, 1024, 4), (13, 390, 10)])
def test_groups_keep_the_expected_participations(groups: int, n: int, k: int) -> None:
    """Trap: q = p·k/n in n/p rounds. With q = p²·k/n, as arXiv:2405.15913 can be read, a user would take part p·k times."""
    made = Participation.for_cohorts("cyclic-poisson", n, users=n, cohort_size=k, min_separation=groups)
    assert made.sampling_rate == groups * k / n
    assert (made.sampling_rate == 1) == (groups == 256)  # nothing is left to chance


@pytest.mark.parametrize("name", SAMPLINGS)
def test_rounds_are_known_in_advance_or_it_is_said_that_they_are_not(name: str) -> None:
    participation = TABLE[name][0]
    if name in ("none", "shuffle", "poisson", "cyclic-poisson"):
        with pytest.raises(ValueError, match=name):
            rounds_of("a", participation, KEY)
    else:
        rounds = rounds_of("a", participation, KEY)
        assert [t for t, users in enumerate(played(participation, ["a"])) if users] == sorted(set(rounds))


@pytest.mark.parametrize("name", ["balls-in-bins", "b-min-sep", "random-allocation"])
def test_who_is_away_changes_nothing_of_when_users_are_drawn(name: str) -> None:
    """A third is away in each round: their rounds are spent, and nobody takes their place."""
    participation, users = TABLE[name][0], [str(i) for i in range(30)]
    found = played(participation, users, away=lambda i, t: (i + t) % 3 == 0)
    rounds = [rounds_of(user, participation, KEY) for user in users]
    for t, chosen in enumerate(found):
        assert chosen == sorted(user for i, user in enumerate(users) if (i + t) % 3 and t in rounds[i])


def shuffled(b: int, epochs: int = 5, steps: int = 6) -> Participation:
    return Participation(rounds=epochs * steps, min_separation=b, max_participations=epochs, sampling="shuffle")


@pytest.mark.parametrize("b", [1, 4, 5, 6])
def test_each_epoch_has_everybody_once_in_another_order(b: int) -> None:
    """30 users in cohorts of 5; blocks of 6, 3, 2 rounds and of 1, of which the order is always the same."""
    users = [str(i) for i in range(30)]
    found = played(shuffled(b), users, 5)
    epochs = [found[start : start + 6] for start in range(0, 30, 6)]
    for epoch in epochs:
        assert sorted(user for chosen in epoch for user in chosen) == sorted(users)
    assert all((one == other) == (b == 6) for one, other in pairwise(epochs))
    for user in users:
        rounds = [t for t, chosen in enumerate(found) if user in chosen]
        assert all(later - sooner >= b for sooner, later in pairwise(rounds))
        assert len({t % 6 // (7 - b) for t in rounds}) == 1  # its block


def test_users_come_back_after_b_rounds_or_in_the_next_epoch() -> None:
    """How many rounds after each one live on users who have not been asked: of 12 that are 4 apart, and of epochs of 6."""
    none, shuffle = Participation(rounds=12, min_separation=4), shuffled(1, epochs=2)
    assert [max(0, none.scheme.rounds_without_return(none, t)) for t in range(12)] == [3, 2, 1, *[0] * 9]
    assert [shuffle.scheme.rounds_without_return(shuffle, t) for t in range(12)] == [5, 4, 3, 2, 1, 0] * 2


@pytest.mark.parametrize("b", [1, 4])
def test_who_is_away_breaks_no_limit_of_a_shuffle(b: int) -> None:
    """A third is away in each round: rounds that find too few are skipped, and nobody has two rounds of an epoch."""
    users = [str(i) for i in range(30)]
    found = played(shuffled(b), users, 4, away=lambda i, t: (i + t) % 3 == 0)
    assert any(found)
    for user in users:
        rounds = [t for t, chosen in enumerate(found) if user in chosen]
        assert all(later - sooner >= b and later // 6 > sooner // 6 for sooner, later in pairwise(rounds))


@pytest.mark.parametrize(("b", "k"), [(2, 4), (3, 4), (7, 4), (1, 5), (1, None)])
def test_a_shuffle_of_parts_of_blocks_or_epochs_is_refused(b: int, k: int | None) -> None:
    """Epochs of 24/4 = 6 rounds: blocks of 5 and 4 do not divide them, and 24 rounds are not 5 epochs."""
    with pytest.raises(ValueError, match="min_separation" if k == 4 else "max_participations"):
        Participation(rounds=24, min_separation=b, max_participations=k, sampling="shuffle")
