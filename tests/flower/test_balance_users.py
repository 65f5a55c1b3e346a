"""At which node each user of a round is asked: evenly, and at one that may be asked for it."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from fake_grid import FakeGrid, FakeNode, is_training
from flower_runs import SIZE, asked_users, hosting, make, names, two_nodes
from shared import record

from fedcgd import DPSGD, Participation
from fedcgd.participation.history import History
from fedcgd_flower import IncompleteRunError, sequential_training
from fedcgd_flower.cohort import Draw
from fedcgd_flower.users import HostedUsers, balance_users, nodes_of_users


def trains(model, user, config, context):
    """Updates that differ by user and by round."""
    return record(model["w"].numpy() + np.random.default_rng(int(user[1:])).normal(size=SIZE).astype(np.float32))


def sharing(users, **options) -> FakeNode:
    def evaluate(model, user, config, context):
        return {"eval_acc": 1.0}

    return hosting(users, sequential_training(trains), evaluate=evaluate, shared=True, **options)


def asked_at(grid: FakeGrid) -> dict[tuple[int, int], dict[int, list[str]]]:
    """(round, attempt) → node → the users that it was asked to train."""
    found: dict[tuple[int, int], dict[int, list[str]]] = {}
    for message in grid.sent:
        if is_training(message):
            task = message.content["fedcgd"]
            nodes = found.setdefault((task["round"], task["attempt"]), {})
            assert message.metadata.dst_node_id not in nodes
            nodes[message.metadata.dst_node_id] = list(task["users"])
    for nodes in found.values():
        together = list(itertools.chain.from_iterable(nodes.values()))
        assert len(together) == len(set(together))  # nobody is in two messages
    return found


def test_users_of_nodes_that_share_are_split_evenly_with_those_who_have_one_node_counted_first() -> None:
    nodes = {f"u{i}": (1, 2, 3) for i in range(8)} | {"v0": (1,), "v1": (1,), "v2": (2,)}
    chosen = balance_users([*nodes], nodes)
    assert list(chosen) == [*nodes]
    assert [chosen["v0"], chosen["v1"], chosen["v2"]] == [1, 1, 2]
    assert Counter(chosen.values()) == {1: 4, 2: 4, 3: 3}
    assert Counter(balance_users(["v0", "v1", "u0", "u1"], nodes).values()) == {1: 2, 2: 1, 3: 1}


def test_every_user_goes_to_a_node_of_its_own_and_the_same_draw_to_the_same_nodes() -> None:
    random_ = random.Random(1)
    for _ in range(200):
        sets = [tuple(sorted(random_.sample(range(6), random_.randint(1, 4)))) for _ in range(4)]
        nodes = {f"u{i}": random_.choice(sets) for i in range(30)}
        users = random_.sample(sorted(nodes), 12)
        chosen = balance_users(users, nodes)
        assert list(chosen) == users
        assert chosen == balance_users(users, dict(reversed(nodes.items())))
        assert all(node in nodes[user] for user, node in chosen.items())


def test_every_round_is_at_as_many_nodes_as_a_sum_needs_wherever_a_plan_can_have_that() -> None:
    """Exactly the users that the plan needs: one who is asked too early is missing in a later round."""
    random_, possible = random.Random(1), 0
    for number in range(300):
        rounds, least, hosts = random_.randint(2, 5), random_.randint(2, 3), random_.randint(3, 5)
        size, apart = random_.randint(least, 7), random_.choice([1, rounds])
        participation = Participation(rounds=2 * rounds, min_separation=apart, max_participations=2)
        users, weights = names(participation.users_for(size)), [random_.random() for _ in range(hosts)]
        nodes = {user: (random_.choices(range(hosts), weights)[0],) for user in users}
        hosted, history = Counter(node for (node,) in nodes.values()), History()
        if sum(min(count, rounds) for count in hosted.values()) < least * rounds:
            continue  # some round must be at fewer, whoever is asked when (Gale and Ryser)
        possible += 1
        for round in range(2 * rounds):
            draw = Draw(participation, round, history, b"key%d" % number)
            chosen = draw.at_nodes(nodes, size, least)
            assert chosen is not None
            assert len(chosen) == size
            assert len(set(chosen.values())) >= least
            history = history.with_round(round, chosen)
            again = Draw(participation, round, history, draw.key).at_nodes(nodes, size, least)
            assert again == chosen
    assert possible > 100


@pytest.mark.parametrize(
    "participation",
    [
        Participation(rounds=6, min_separation=3),
        Participation(rounds=6, min_separation=3, sampling="balls-in-bins"),
        Participation(rounds=6, sampling="poisson", sampling_rate=0.4),
    ],
    ids=lambda participation: participation.sampling,
)
def test_neither_who_is_drawn_nor_a_bit_of_the_model_depends_on_how_many_nodes_share(participation) -> None:
    users = names(15)
    models, drawn = [], []
    for count in (1, 3):
        grid = FakeGrid({i: sharing(users) for i in range(1, count + 1)})
        result = make(mechanism=DPSGD(), participation=participation).start(grid, record(np.zeros(SIZE)))
        models.append(result.arrays["w"].numpy().tobytes())
        drawn.append(asked_users(grid))
        for nodes in asked_at(grid).values():
            sizes = [len(nodes.get(i, [])) for i in range(1, count + 1)]
            assert max(sizes) - min(sizes) <= 1
    assert models[0] == models[1]
    assert drawn[0] == drawn[1]


def test_users_that_two_nodes_claim_are_counted_where_too_few_are_left() -> None:
    grid = FakeGrid({i: sharing(names(6)) for i in (1, 2)})
    grid.nodes[3] = two_nodes(6).nodes[1]  # every other one of them
    claimed = r"^.*3 users are there .*; 3 more are claimed .*\(node 1 "
    with pytest.raises(ValueError, match=claimed):
        make().start(grid, record(np.zeros(SIZE)))
    with pytest.raises(IncompleteRunError, match=claimed):
        make(expected_users=3).start(grid, record(np.zeros(SIZE)))


def test_who_is_drawn_and_away_is_not_asked_anywhere() -> None:
    """Two nodes share; one user, that lived at a third, has gone with it. With a sampling nobody stands in."""
    users = names(8)
    bins = {
        "participation": Participation(rounds=4, min_separation=2, sampling="balls-in-bins"),
        "mechanism": DPSGD(),
        "cohort_size": 4,
    }
    grid = FakeGrid({1: sharing(users), 2: sharing(users), 3: sharing(["u100"])})
    with make(**bins) as strategy:
        strategy.start(grid, record(np.zeros(SIZE)), num_rounds=2)
        del grid.nodes[3]
        grid.nodes[5] = grid.nodes.pop(2)
        strategy.start(grid, record(np.zeros(SIZE)), num_rounds=2)
    tries = asked_at(grid)
    whole = [sorted(itertools.chain(*tries[round, 0].values())) for round in range(4)]
    assert "u100" in whole[0] + whole[1]
    assert whole[2] + whole[3] == [user for user in whole[0] + whole[1] if user != "u100"]
    assert {node for round in (2, 3) for node in tries[round, 0]} == {1, 5}


def test_a_list_that_many_nodes_share_is_gone_through_once() -> None:
    """500 nodes and 10,000 users would be five million looks a round."""
    looked = Counter()

    class Counted(tuple):
        def __iter__(self):
            looked["at it"] += 1
            return super().__iter__()

    theirs = HostedUsers(Counted(names(10_000)), shared=True)
    nodes, twice = nodes_of_users(dict.fromkeys(range(500), theirs))
    assert (len(nodes), twice, looked) == (10_000, set(), {"at it": 1})
    assert set(Counter(balance_users(theirs.users[:1000], nodes).values()).values()) == {2}


def test_a_round_in_which_nobody_is_drawn_is_a_round_all_the_same() -> None:
    """Were it skipped, who is drawn would be seen."""
    rare = Participation(rounds=6, sampling="poisson", sampling_rate=2.0**-60)
    assert Draw(rare, 0, History(), b"key").at_nodes({"ann": (1,)}, 4, least=1) == {}
