"""The promise about who takes part when: what is allowed, and that contradictions are refused."""

import pytest

from fedcgd.participation import Participation


def test_k_defaults_to_the_most_that_fit():
    assert Participation(rounds=10).participations == 10
    assert Participation(rounds=4, max_participations=4, sampling="random-allocation").spacing == 1
    assert Participation(rounds=10, min_separation=3).participations == 4  # rounds 0, 3, 6, 9
    assert Participation(rounds=10, min_separation=10).participations == 1
    assert Participation(rounds=10, min_separation=3, max_participations=2).participations == 2
    assert Participation(rounds=12, min_separation=3, sampling="balls-in-bins").participations == 4
    assert Participation(rounds=12, sampling="poisson", sampling_rate=0.1).participations == 12
    assert Participation(rounds=12, min_separation=4, sampling="cyclic-poisson", sampling_rate=1.0).participations == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"rounds": 6.5}, "rounds must be a whole number, got 6.5"),
        ({"rounds": 6, "min_separation": 2.5}, "min_separation must be a whole number, got 2.5"),
        ({"rounds": 6, "max_participations": "2"}, "max_participations must be a whole number, got '2'"),
        ({"rounds": 5, "min_separation": 0}, "between 1 and rounds = 5, got 0"),
        ({"rounds": 5, "min_separation": 6}, "between 1 and rounds = 5, got 6"),
        ({"rounds": 5, "max_participations": 0}, "max_participations must be between 1 and .* = 5"),
        ({"rounds": 5, "sampling": "often"}, "sampling must be none"),
        ({"rounds": 5, "sampling": "poisson"}, r"in \(0, 1\] .* got None"),
        ({"rounds": 5, "sampling": "poisson", "sampling_rate": 0.0}, r"in \(0, 1\] .* got 0.0"),
        ({"rounds": 5, "sampling": "poisson", "sampling_rate": 1.01}, r"in \(0, 1\] .* got 1.01"),
        ({"rounds": 5, "sampling": "poisson", "sampling_rate": 5e-324}, "at least 2⁻⁶⁴.* got 5e-324"),
        ({"rounds": 5, "sampling": "b-min-sep", "sampling_rate": 1e-310}, "at least 2⁻⁶⁴.* got 1e-310"),
        ({"rounds": 5, "sampling": "poisson", "sampling_rate": float("nan")}, r"in \(0, 1\] .* got nan"),
        ({"rounds": 5, "min_separation": 2, "sampling": "poisson", "sampling_rate": 0.5}, "use cyclic-poisson"),
        (
            {"rounds": 5, "max_participations": 2, "sampling": "poisson", "sampling_rate": 0.5},
            "does not apply to poisson",
        ),
        ({"rounds": 10, "min_separation": 4, "sampling": "balls-in-bins"}, "got 10; use 8 or 12 rounds"),
    ],
)
def test_contradictions_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Participation(**options)


def test_bins_may_name_the_participations_that_they_give():
    # The least and the most bins: k = n / b in each case, and one more or one fewer is refused.
    for bins, k in ((1, 12), (4, 3), (12, 1)):
        options = {"rounds": 12, "min_separation": bins, "sampling": "balls-in-bins"}
        assert Participation(**options, max_participations=k).participations == k
        if k > 1:
            with pytest.raises(ValueError, match="leave max_participations"):
                Participation(**options, max_participations=k - 1)


def test_rounds_released_are_within_the_run():
    participation = Participation(rounds=5)
    assert [participation.rounds_released(released) for released in (None, 0, 1, 5)] == [5, 0, 1, 5]
    for released in (-1, 6):
        with pytest.raises(ValueError, match=f"got {released};"):
            participation.rounds_released(released)


ALLOCATED = {"max_participations": 4, "sampling": "random-allocation"}


@pytest.mark.parametrize(
    ("wrong", "words", "remedy"),
    [
        ({"sampling_rate": 0.5}, "leave it out", {"sampling_rate": None}),
        (
            {"min_separation": 3, "max_participations": 5}, "= 4 for 12 rounds 3 apart, got 5; leave it out",
            {"max_participations": None},
        ),
        (
            {"min_separation": 3, "max_participations": 2, "sampling": "balls-in-bins"}, "leave max_participations out",
            {"max_participations": None},
        ),
        (
            ALLOCATED | {"min_separation": 3}, "random-allocation has min_separation 1, .* got 3; leave it out",
            {"min_separation": 1},
        ),
        (
            ALLOCATED | {"max_participations": 5}, "the number of epochs, that divides the 12 rounds; got 5",
            {"max_participations": 4},
        ),
    ],
)  # fmt: skip
def test_what_is_refused_is_mended_as_the_message_says(wrong: dict, words: str, remedy: dict) -> None:
    with pytest.raises(ValueError, match=words):
        Participation(rounds=12, **wrong)
    Participation(rounds=12, **wrong | remedy)


@pytest.mark.parametrize(("released", "most"), [(0, 0), (1, 1), (12, 1), (13, 2), (24, 2), (25, 3), (48, 3)])
def test_first_rounds_hold_so_many_participations_of_a_user(released: int, most: int) -> None:
    """At least 12 apart and at most 3; of epochs one each."""
    apart = Participation(rounds=48, min_separation=12, max_participations=3)
    assert apart.scheme.most_of(apart, released) == most
    epochs = Participation(rounds=36, max_participations=3, sampling="random-allocation")
    assert epochs.scheme.most_of(epochs, min(released, 36)) == most
