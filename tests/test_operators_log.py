"""What the operator reads: a line a round, in Flower's manner, with causes apart, and nothing twice."""

import logging
import re

import numpy as np
import pytest
from fake_grid import FakeGrid, is_training
from flwr.app import Error, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg
from test_flower_strategy import SIZE, make, names, node, record, two_nodes

from fedcgd.participation import Participation
from fedcgd_flower import IncompleteRunError


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.name == "flwr"]


@pytest.fixture(autouse=True)
def _hear_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flwr")


def test_a_round_is_one_line_and_no_line_comes_twice(caplog: pytest.LogCaptureFixture) -> None:
    make().start(
        two_nodes(), record(np.zeros(SIZE)), evaluate_fn=lambda release, arrays: MetricRecord({"accuracy": release / 8})
    )
    said = lines(caplog)
    rounds = [line for line in said if line.startswith("[ROUND ")]
    assert len(rounds) == 6
    assert re.fullmatch(
        r"\[ROUND 3/6\] 4 users asked at [12] nodes, 4 answered \| ε ≤ [0-9.]+ so far at δ = 1e-05 \| evaluate: accuracy 0.375",
        rounds[2],
    )
    assert len(said) == len(set(said))
    assert len(said) < 6 + 25
    [once] = [line for line in said if "each user counts once" in line]
    assert "numbers of examples per client are not used" in once
    assert "Release 0: evaluate: accuracy 0" in said
    [ended] = [line for line in said if line.startswith("Finished")]
    assert re.fullmatch(r"Finished in [0-9.]+ s with 6 of 6 rounds released", ended)
    assert "4 users a round (cohort_size)" in caplog.text


def test_epsilon_of_a_part_is_said_with_its_condition_beside_that_of_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    strategy = make()
    strategy.start(two_nodes(), record(np.zeros(SIZE)), num_rounds=2)
    whole, part = strategy.plan.guarantee().epsilon, strategy.plan.guarantee(released=2).epsilon
    assert part < whole
    last = lines(caplog)[-2]
    assert f"the planned run: ε ≤ {whole:.3g}" in last
    assert f"for the 2 rounds released, ε ≤ {part:.4g}, provided that nobody looked at a released model" in last
    assert "ended before its plan: after 2 tries, as asked for" in lines(caplog)[-1]


def failing(code: int, reason: str):
    return lambda q, r: Message(Error(code=code, reason=reason), reply_to=q) if is_training(q) else r


def test_causes_are_told_apart_and_a_hint_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    users = names(12)
    grid = FakeGrid({i + 1: node(users[2 * i : 2 * i + 2]) for i in range(6)})
    for i, tamper in enumerate(
        [
            failing(5, "node unavailable"),
            failing(2, "local training failed"),
            failing(2, "KeyError: 'arrays' of patient 17"),
            lambda q, r: None if is_training(q) else r,
        ]
    ):
        grid.nodes[i + 1].tamper = tamper
    participation = Participation(rounds=3)
    make(participation=participation, cohort_size=12).start(grid, record(np.zeros(SIZE)), timeout=0.0)
    [line, *_] = [line for line in lines(caplog) if line.startswith("[ROUND ")]
    assert (
        "12 users asked at 6 nodes, 4 answered (client error: 2, error in local training: 2, no answer: 2, node lost: 2)"
        in line
    )
    assert caplog.text.count("must be the first of its mods") == 1
    assert caplog.text.count("a node's own log says where its training failed") == 1
    assert "patient" not in caplog.text


def test_too_few_users_says_who_is_there_and_what_keeps_the_others(caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid({1: node(names(9))})
    participation = Participation(rounds=6, min_separation=3, max_participations=1)
    with pytest.raises(IncompleteRunError):
        make(participation=participation, expected_users=9).start(grid, record(np.zeros(SIZE)))
    skipped = [line for line in lines(caplog) if "[ROUND 3/6]" in line]
    assert skipped[0] == (
        "[ROUND 3/6] not released: 9 users are there at 1 nodes and 1 of them may take part, of 4 for a cohort; "
        "8 have taken part 1 times, which is all they may"
    )
    caplog.clear()
    participation = Participation(rounds=6, min_separation=3)
    with pytest.raises(IncompleteRunError):
        make(participation=participation, expected_users=9).start(grid, record(np.zeros(SIZE)))
    assert "1 of them may take part, of 4 for a cohort; 8 took part less than 3 rounds ago" in caplog.text


def test_the_log_does_not_claim_what_is_not_done(caplog: pytest.LogCaptureFixture) -> None:
    """The inner strategy logs its own fraction and minimum of nodes, which here decide nothing."""
    make(FedAvg(fraction_train=0.5, min_train_nodes=3)).start(two_nodes(), record(np.zeros(SIZE)), num_rounds=1)
    said = lines(caplog)
    [words] = [
        i for i, line in enumerate(said) if "its fractions and numbers of nodes for training are not used" in line
    ]
    [claim] = [i for i, line in enumerate(said) if "Fraction: train" in line]
    assert claim > words
