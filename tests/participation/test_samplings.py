"""What each sampling is, says and draws: a table of its words."""

import pytest
from sampling_table import SAMPLINGS as TABLE

from fedcgd.participation import SAMPLINGS, Participation
from fedcgd.participation.cohorts import cohort, rounds_of
from fedcgd.participation.history import History
from fedcgd.participation.samplings import SECRET_SAMPLINGS, Law

KEY = bytes(range(32))

WORDS = {
    "none": ("may know, and even choose", "another matter"),
    "balls-in-bins": ("keep the bins secret", "not replace users who are absent", "bins are reused"),
    "poisson": ("its own coin", "secret", "not fill up", "not replace absent"),
    "cyclic-poisson": ("its own coin", "secret", "not move users between groups", "not replace absent"),
    "b-min-sep": ("its own coin", "secret", "be spent", "not replace absent"),
    "random-allocation": ("secret who drew what", "draw anew", "not replace absent"),
}
"""What a deployment must do, or need not, and what is said of a user who is not there at all."""


@pytest.mark.parametrize("name", SAMPLINGS)
def test_each_sampling_says_what_it_demands(name: str) -> None:
    scheme = SAMPLINGS[name]
    for words in WORDS[name]:
        assert words in scheme.assumption + scheme.absence
    assert ("same ε" in scheme.absence) == (scheme.hidden is not None)  # nobody is asked in the place of another
    assert (scheme.hidden is None) == (scheme.law is Law.KNOWN)


def test_secrets_amplify_and_need_no_groups() -> None:
    assert set(SECRET_SAMPLINGS) == {"balls-in-bins", "poisson", "b-min-sep", "random-allocation"}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_participation_is_made_for_cohorts(name: str) -> None:
    """With 8 of 24 users in a round, as the one of the table; what does not fit is refused."""
    made = Participation.for_cohorts(name, 12, users=24, cohort_size=8, min_separation=TABLE[name][0].min_separation)
    assert made == TABLE[name][0] or made.participations == TABLE[name][0].participations
    assert made.expected_rate in (None, pytest.approx(1 / 3))
    assert eval(made.as_python(), {"Participation": Participation}) == made
    for wrong in ({"users": 24, "cohort_size": 25}, {"users": 24, "cohort_size": 0}):
        with pytest.raises(ValueError, match="cohort_size"):
            Participation.for_cohorts(name, 12, **wrong)
    with pytest.raises(ValueError, match="min_separation"):
        Participation.for_cohorts(name, 12, users=24, cohort_size=8, min_separation=4)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_rounds_are_known_in_advance_or_it_is_said_that_they_are_not(name: str) -> None:
    participation = TABLE[name][0]
    if name in ("none", "poisson", "cyclic-poisson"):
        with pytest.raises(ValueError, match=name):
            rounds_of("a", participation, KEY)
    else:
        rounds = set(rounds_of("a", participation, KEY))
        drawn = (cohort(participation, t, ["a"], History(), cohort_size=1, key=KEY) for t in range(12))
        assert [t for t, users in enumerate(drawn) if users] == sorted(rounds)
