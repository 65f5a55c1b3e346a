"""Who takes part when: no churn, retry or order breaks (k, b), and sampled cohorts follow the accounted rule."""

from collections import Counter, defaultdict
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles_b_min_sep import patterns
from sampling_table import played
from scipy import stats

from fedcgd.participation import Participation
from fedcgd.participation.cohorts import cohort, eligible, rounds_of
from fedcgd.participation.draws import bin_of
from fedcgd.participation.history import History
from fedcgd.participation.samplings import cyclic_poisson

KEY = bytes(range(32))
USERS = [f"user-{i}" for i in range(12)]


@st.composite
def participations(draw):
    sampling = draw(st.sampled_from(["none", "balls-in-bins", "cyclic-poisson"]))
    b = draw(st.integers(1, 5))
    epochs = draw(st.integers(1, 4))
    if sampling == "balls-in-bins":
        return Participation(rounds=b * epochs, min_separation=b, sampling=sampling)
    if sampling == "cyclic-poisson":
        rate = draw(st.floats(0.01, 1.0))
        return Participation(rounds=b * epochs, min_separation=b, sampling=sampling, sampling_rate=rate)
    rounds = draw(st.integers(b, b * epochs))
    most = -(-rounds // b)
    return Participation(rounds=rounds, min_separation=b, max_participations=draw(st.integers(1, most)))


@settings(derandomize=True, max_examples=250, deadline=None)
@given(participations(), st.data())
def test_no_schedule_breaks_the_participation(participation, data):
    history = History()
    rounds_of = defaultdict(set)
    key = data.draw(st.binary(min_size=32, max_size=32))
    for round in range(participation.rounds):
        for _attempt in range(data.draw(st.integers(1, 2))):  # a crashed attempt counts, and the round is tried again
            available = data.draw(st.lists(st.sampled_from(USERS)))  # churn; even with users named twice
            size = data.draw(st.integers(1, 5))
            chosen = cohort(participation, round, available, history, cohort_size=size, key=key)
            if chosen is None:
                assert participation.sampling == "none"
                assert len(eligible(participation, round, set(available), history)) < size
                continue
            assert len(chosen) == len(set(chosen))
            assert set(chosen) <= set(available)
            if participation.sampling == "none":
                assert len(chosen) == size
            history = history.with_round(round, chosen)
            for user in chosen:
                rounds_of[user].add(round)
    for user, taken in rounds_of.items():
        assert len(taken) <= participation.participations
        ordered = sorted(taken)
        assert all(later - earlier >= participation.min_separation for earlier, later in pairwise(ordered))
        assert history.counts[user] == len(taken)


def test_the_result_depends_on_the_set_of_users_and_the_key_alone():
    participation = Participation(rounds=10, min_separation=2)
    chosen = cohort(participation, 3, USERS, History(), cohort_size=4, key=KEY)
    assert chosen == cohort(participation, 3, USERS[::-1] + USERS, History(), cohort_size=4, key=KEY)
    others = [cohort(participation, 3, USERS, History(), cohort_size=4, key=bytes([i]) * 32) for i in range(20)]
    assert len({tuple(other) for other in others}) > 10
    rounds = [cohort(participation, t, USERS, History(), cohort_size=4, key=KEY) for t in range(10)]
    assert len({tuple(users) for users in rounds}) == 1  # the order is drawn once for a run


def test_a_fixed_population_is_used_up_evenly_to_the_last_round():
    # 12 users in cohorts of 4, 9 rounds: 3 participations each, at least 2 apart, and never a round without a cohort.
    found = played(Participation(rounds=9, min_separation=2, max_participations=3), USERS, 4)
    assert [len(chosen) for chosen in found] == [4] * 9
    assert Counter(chain(*found)) == dict.fromkeys(USERS, 3)


def test_a_retry_takes_those_that_are_counted_already():
    participation = Participation(rounds=3, max_participations=1)
    first = cohort(participation, 0, USERS, History(), cohort_size=5, key=KEY)
    history = History().with_round(0, first)
    again = history.with_round(0, first)
    assert set(again.counts.values()) == {1}
    assert not set(cohort(participation, 1, USERS, again, cohort_size=5, key=KEY)) & set(first)


def test_a_history_stays_as_it_was_when_another_is_made_of_it():
    first = History().with_round(0, ["a", "b"])
    second = first.with_round(1, ["a", "c"])
    assert first == History({"a": 1, "b": 1}, {"a": 0, "b": 0})
    assert second == History({"a": 2, "b": 1, "c": 1}, {"a": 1, "b": 0, "c": 1})


def test_too_few_users_give_no_cohort():
    participation = Participation(rounds=4, min_separation=2)
    assert cohort(participation, 0, USERS[:3], History(), cohort_size=4, key=KEY) is None
    history = History().with_round(0, USERS[:6])
    assert cohort(participation, 1, USERS[:9], history, cohort_size=4, key=KEY) is None
    assert cohort(participation, 2, USERS[:9], history, cohort_size=4, key=KEY) is not None


def test_bins_are_uniform_and_differ_between_keys():
    users = [str(i) for i in range(20_000)]
    bins = np.array([bin_of(user, 10, KEY) for user in users])
    epochs = Participation(rounds=30, min_separation=10, sampling="balls-in-bins")
    assert [tuple(rounds_of(user, epochs, KEY)) for user in users[:99]] == [
        (bin, bin + 10, bin + 20) for bin in bins[:99]
    ]
    assert stats.chisquare(np.bincount(bins, minlength=10)).pvalue > 1e-3
    other = np.array([bin_of(user, 10, bytes(32)) for user in users])
    table = np.histogram2d(bins, other, bins=10)[0]
    assert stats.chi2_contingency(table).pvalue > 1e-3
    assert stats.chi2_contingency(np.histogram2d(bins, np.where(other < 2, bins, other), bins=10)[0]).pvalue < 1e-6
    neighbours = np.histogram2d(bins[:-1], bins[1:], bins=10)[0]
    assert stats.chi2_contingency(neighbours).pvalue > 1e-3


def test_poisson_takes_each_user_at_the_rate_in_each_round_independently():
    participation = Participation(rounds=200, sampling="poisson", sampling_rate=0.3)
    users = [str(i) for i in range(1000)]
    drawn = np.zeros((200, 1000))
    for t in range(200):
        chosen = cohort(participation, t, users, History(), cohort_size=1, key=KEY)
        drawn[t, [int(user) for user in chosen]] = 1
    assert drawn.mean() == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / 200_000))
    assert drawn.mean() != pytest.approx(0.31, abs=4 * np.sqrt(0.21 / 200_000))
    assert np.var(drawn.sum(0)) == pytest.approx(200 * 0.21, rel=0.2)
    assert np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("draw", "taken"), [(0, True), (2, True), (3, False), (4, False), (2**64 - 1, False)])
def test_a_rate_between_two_draws_is_rounded_down(draw, taken, monkeypatch):
    # A rate of 3.5 / 2⁶⁴ takes the draws 0, 1 and 2 of 2⁶⁴: below the accounted rate, never above it.
    monkeypatch.setattr(cyclic_poisson, "draw", lambda key, purpose, user: draw)
    participation = Participation(rounds=2, sampling="poisson", sampling_rate=3.5 / 2**64)
    assert cohort(participation, 0, ["a"], History(), cohort_size=1, key=KEY) == (["a"] if taken else [])


def test_cyclic_poisson_takes_the_group_at_the_rate():
    participation = Participation(rounds=8, min_separation=4, sampling="cyclic-poisson", sampling_rate=0.5)
    users = [str(i) for i in range(4000)]
    for t in range(8):
        chosen = cohort(participation, t, users, History(), cohort_size=1, key=KEY)
        assert {bin_of(user, 4, KEY) for user in chosen} == {t % 4}
        assert len(chosen) == pytest.approx(500, abs=100)
    everyone = Participation(rounds=8, min_separation=4, sampling="cyclic-poisson", sampling_rate=1.0)
    chosen = [cohort(everyone, t, users, History(), cohort_size=1, key=KEY) for t in range(4)]
    assert sorted(user for group in chosen for user in group) == sorted(users)


@pytest.mark.parametrize("round", [-1, 4, 100])
@pytest.mark.parametrize("sampling", ["none", "balls-in-bins"])
def test_a_round_outside_the_plan_is_refused(round, sampling):
    participation = Participation(rounds=4, min_separation=2, sampling=sampling)
    with pytest.raises(ValueError, match=f"got {round};"):
        cohort(participation, round, USERS, History(), cohort_size=1, key=KEY)


def test_a_user_counted_in_a_later_round_is_not_eligible():
    participation = Participation(rounds=10, min_separation=2)
    assert eligible(participation, 3, ["a", "b"], History({"a": 1}, {"a": 5})) == ["b"]


def b_min_sep(rounds: int, b: int, rate: float, **rest) -> Participation:
    return Participation(rounds=rounds, min_separation=b, sampling="b-min-sep", sampling_rate=rate, **rest)


@pytest.mark.parametrize("warm", [True, False])
def test_b_min_sep_coins_have_the_law_that_is_accounted(warm: bool) -> None:
    """40,000 users, n = 8, b = 3, p = .3: every set of rounds as often as by enumeration, and another p is told apart."""
    participation = b_min_sep(8, 3, 0.3, warm_start=warm)
    counts = Counter(rounds_of(str(user), participation, KEY) for user in range(40_000))

    def chi_squared(rate: float) -> float:
        law = patterns(8, 3, rate, warm=warm)
        assert counts.keys() <= law.keys()
        return sum((counts[taken] - 40_000 * p) ** 2 / (40_000 * p) for taken, p in law.items())

    cells = len(patterns(8, 3, 0.3, warm=warm))
    assert chi_squared(0.3) < cells + 5 * (2 * cells) ** 0.5
    assert chi_squared(0.33) > cells + 10 * (2 * cells) ** 0.5


def test_b_min_sep_keeps_a_limit_per_user() -> None:
    found = played(b_min_sep(40, 5, 0.5, max_participations=2), ["a", "b", "c"])
    assert Counter(chain(*found)) == {"a": 2, "b": 2, "c": 2}


def test_certain_coins_fall_every_b_rounds() -> None:
    assert rounds_of("a", b_min_sep(12, 4, 1.0, warm_start=False), KEY) == (0, 4, 8)
    starts = {rounds_of(str(i), b_min_sep(12, 4, 1.0), KEY)[0] for i in range(100)}
    assert starts == {0, 1, 2, 3}
