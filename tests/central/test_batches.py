"""Which examples are in which round: the promise of each sampling holds, and batches are the key's."""

import math
from itertools import pairwise

import numpy as np
import pytest

from fedcgd import NoiseKey, Participation
from fedcgd.central.batches import parts_of
from fedcgd.participation.batches import ExampleRounds
from fedcgd.participation.cohorts import cohort
from fedcgd.participation.history import History

EXAMPLES, ROUNDS = 600, 24
SAMPLINGS = {
    "none": Participation(rounds=ROUNDS, min_separation=6),
    "none, fewer times": Participation(rounds=ROUNDS, min_separation=2, max_participations=3),
    "full batches": Participation(rounds=ROUNDS),
    "balls-in-bins": Participation(rounds=ROUNDS, min_separation=6, sampling="balls-in-bins"),
    "poisson": Participation(rounds=ROUNDS, sampling="poisson", sampling_rate=1 / 6),
    "everybody by Poisson": Participation(rounds=ROUNDS, sampling="poisson", sampling_rate=1.0),
    "cyclic-poisson": Participation(rounds=ROUNDS, min_separation=3, sampling="cyclic-poisson", sampling_rate=0.5),
    "b-min-sep": Participation.for_cohorts("b-min-sep", ROUNDS, users=EXAMPLES, cohort_size=100, min_separation=4),
    "random-allocation": Participation(rounds=ROUNDS, max_participations=4, sampling="random-allocation"),
    "shuffle": Participation(rounds=ROUNDS, max_participations=4, sampling="shuffle"),
    "shuffle in blocks": Participation(rounds=ROUNDS, min_separation=4, max_participations=4, sampling="shuffle"),
}
SIZES = {"none, fewer times": 75.0, "full batches": 600.0, "everybody by Poisson": 600.0}


def batches(name, key=1):
    participation = SAMPLINGS[name]
    parts = parts_of(participation, EXAMPLES)
    made = ExampleRounds(participation, EXAMPLES, NoiseKey.simulation(key).choices, parts)
    return made, [made.rows(t).tolist() for t in range(ROUNDS)]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_promise_is_kept(name):
    """At most k rounds, b apart; by Poisson sampling any number, in rounds of the group; and each round once."""
    participation, (_, found) = SAMPLINGS[name], batches(name)
    turns = {i: [t for t, rows in enumerate(found) if i in set(rows)] for i in range(EXAMPLES)}
    assert all(rows == sorted(set(rows)) for rows in found)
    for taken in turns.values():
        assert all(later - sooner >= participation.min_separation for sooner, later in pairwise(taken))
        assert len(taken) <= participation.participations
        if participation.sampling in ("random-allocation", "shuffle"):
            assert [t // 6 for t in taken] == [0, 1, 2, 3]
        if participation.scheme.has_bins:
            assert len({t % participation.min_separation for t in taken}) <= 1
        if participation.sampling == "balls-in-bins":
            assert len(taken) == 4


@pytest.mark.parametrize("name", SAMPLINGS)
def test_rounds_have_the_planned_size_on_average(name):
    made, found = batches(name)
    assert made.planned_size == pytest.approx(SIZES.get(name, 100.0))
    sizes = np.array([len(rows) for rows in found])
    assert abs(sizes.mean() - made.planned_size) < 5 * math.sqrt(made.planned_size / ROUNDS) + 1e-9
    fixed = SIZES.get(name) == 600.0 or not SAMPLINGS[name].is_secret
    assert (len(set(sizes)) == 1) == fixed


@pytest.mark.parametrize("name", SAMPLINGS)
def test_they_follow_from_the_key_alone(name):
    assert batches(name)[1] == batches(name)[1]
    if SIZES.get(name) != 600.0:
        assert batches(name, key=2)[1] != batches(name)[1]


@pytest.mark.parametrize(
    "name", ["none", "balls-in-bins", "b-min-sep", "random-allocation", "shuffle", "shuffle in blocks"]
)
def test_a_server_draws_the_same(name):
    """A server's cohorts of users that are called "0", "1", …, all of whom are there."""
    participation, key, history = SAMPLINGS[name], NoiseKey.simulation(1).choices, History()
    for t, rows in enumerate(batches(name)[1]):
        users = cohort(participation, t, map(str, range(EXAMPLES)), history, cohort_size=100, key=key)
        history = history.with_round(t, users)
        assert sorted(map(int, users)) == rows


@pytest.mark.parametrize("name", ["poisson", "cyclic-poisson"])
def test_coins_are_fair_and_independent(name):
    """Of pairs of rounds of the same group, as many examples are in both as chance says."""
    participation, (_, found) = SAMPLINGS[name], batches(name)
    b, rate = participation.min_separation, participation.sampling_rate
    both = [len(set(found[t]) & set(found[u])) for t in range(ROUNDS) for u in range(t + 1, ROUNDS) if (u - t) % b == 0]
    assert abs(np.mean(both) - EXAMPLES / b * rate**2) < 2
