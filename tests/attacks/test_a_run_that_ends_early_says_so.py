"""Invariant: a run that released fewer rounds than planned cannot be taken for one that is done."""

from pathlib import Path

import numpy as np
import pytest
from clock import Clock
from fake_grid import FakeGrid, FakeNode, is_training
from flower_runs import SIZE, make, names, node, two_nodes
from flwr.app import Error, Message, MetricRecord
from flwr.clientapp import ClientApp
from shared import record

from fedcgd.participation import Participation
from fedcgd_flower import IncompleteRunError


def test_a_run_that_releases_nothing_raises() -> None:
    """Three users, where a cohort has four: it used to return a result with the accuracy of the model nobody had trained."""
    grid = FakeGrid({1: node(names(3))})
    with pytest.raises(ValueError, match="are expected"):
        make().start(grid, record(np.zeros(SIZE)))
    with pytest.raises(IncompleteRunError, match="6 rounds") as stopped:
        make(expected_users=1).start(
            grid, record(np.zeros(SIZE)), evaluate_fn=lambda release, arrays: MetricRecord({"accuracy": 0.1})
        )
    result = stopped.value.result
    assert (result.released, result.planned, result.complete) == (0, 6, False)
    assert "users are" in result.stopped
    assert "6 rounds" in repr(result)


def test_a_run_that_stalls_raises_with_what_it_released(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid({1: node(names(12))})
    path = tmp_path / "run.db"
    options = {"participation": Participation(rounds=9, min_separation=3, max_participations=2), "ledger": path}
    with pytest.raises(IncompleteRunError) as stopped:
        make(**options, expected_users=12).start(grid, record(np.zeros(SIZE)))
    result = stopped.value.result
    assert (result.released, sorted(result.train_metrics_clientapp)) == (6, [1, 2, 3, 4, 5, 6])
    assert "times, which" in str(stopped.value)
    assert caplog.text.count("its plan") == 1
    grid.nodes[2] = node(names(12, "v"))
    assert make(**options, expected_users=12).start(grid, record(np.zeros(SIZE))).complete


def test_a_part_that_was_asked_for_is_no_failure_and_is_not_complete() -> None:
    result = make().start(two_nodes(), record(np.zeros(SIZE)), num_rounds=2)
    assert (result.released, result.complete, bool(result.stopped)) == (2, False, True)


def test_a_try_that_fails_does_not_end_a_run_of_all_its_rounds() -> None:
    """`num_rounds` as one writes it for Flower, equal to the plan's rounds: a lost try is made again, not a release too few."""
    grid = two_nodes()
    lost = iter([True])
    for fake in grid.nodes.values():
        fake.tamper = lambda q, r: None if is_training(q) and next(lost, False) else r
    assert make(min_answers=4).start(grid, record(np.zeros(SIZE)), num_rounds=6, timeout=0.0).complete


class InMemoryGrid(FakeGrid):
    """What Flower calls the grid of a simulation."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("fedcgd_flower.cohort.time", clock)
    return clock


def test_where_no_node_has_the_mod_the_run_ends_early_and_says_what_to_add(clock: Clock) -> None:
    """It waited for ten minutes; and the last line did not say what was wrong."""
    plain = ClientApp()
    plain.train()(lambda message, context: Message(message.content["arrays"], reply_to=message))
    grid = FakeGrid({7: FakeNode(plain), 8: FakeNode(plain)})
    with pytest.raises(ValueError, match="after 30") as told:
        make(patience=600.0).start(grid, record(np.zeros(SIZE)))
    assert "ClientApp(mods=[clipped_update_mod])" in str(told.value)


@pytest.mark.parametrize(
    ("nodes", "simulated", "seconds"), [("unable", False, 600), ("three", False, 600), ("three", True, 30)]
)
def test_who_may_come_is_waited_for_until_patience_ends(
    nodes: str, simulated: bool, seconds: int, clock: Clock
) -> None:
    """In a simulation nobody comes later."""
    there = {"unable": unable(1), "three": {1: node(names(3))}}[nodes]
    with pytest.raises(ValueError, match=f"after {seconds}"):
        make(patience=600.0).start((InMemoryGrid if simulated else FakeGrid)(there), record(np.zeros(SIZE)))


def test_in_a_simulation_a_node_that_failed_ends_the_run_before_its_first_round(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine of a Ray cluster lacks the code: asked again, a node may answer from another one, and lose users later."""

    monkeypatch.setattr("fedcgd_flower.users.time", clock)
    grid = InMemoryGrid(two_nodes(24).nodes)
    failed: list[int] = []

    def once(request: Message, reply: Message) -> Message:
        failed.append(1)
        return Message(Error(code=1, reason="no module"), reply_to=request) if len(failed) == 1 else reply

    next(iter(grid.nodes.values())).tamper = once
    with pytest.raises(ValueError, match="which users"):
        make(patience=600.0).start(grid, record(np.zeros(SIZE)))
    assert len(failed) == 1


def unable(count: int, first: int = 50) -> dict[int, FakeNode]:
    """Nodes whose ClientApp cannot be loaded, as on a machine that lacks the app's code."""

    def fails(request: Message, reply: Message) -> Message:
        return Message(Error(code=1, reason="no module"), reply_to=request)

    return {first + i: FakeNode(ClientApp(), tamper=fails) for i in range(count)}


@pytest.mark.parametrize(("able", "without"), [(1, 1), (2, 2), (9, 2)])
def test_a_run_does_not_begin_without_the_users_of_nodes_that_fail(able: int, without: int) -> None:
    """A Ray cluster whose second machine lacked the app's code went on with half of the people, and two warnings."""
    users = names(12 * able)
    grid = FakeGrid({i + 1: node(users[i::able]) for i in range(able)} | unable(without))
    there = len(users)
    with pytest.raises(
        ValueError,
        match=rf"{without} of {able + without} nodes .*expected_users={there}",
    ):
        make().start(grid, record(np.zeros(SIZE)))
    assert not [message for message in grid.sent if is_training(message)]
    assert make(expected_users=there).start(grid, record(np.zeros(SIZE))).complete


def test_of_many_nodes_a_single_one_cannot_keep_the_others_from_beginning() -> None:
    grid = FakeGrid({i + 1: node(names(12)[i::3]) for i in range(3)} | unable(1))
    assert make().start(grid, record(np.zeros(SIZE))).complete


def test_nodes_that_fail_later_do_not_end_a_run_that_has_begun(tmp_path: Path) -> None:
    grid = FakeGrid({1: node(names(12))})
    make(ledger=tmp_path / "run.db").start(grid, record(np.zeros(SIZE)), num_rounds=1)
    grid.nodes |= unable(3)
    assert make(ledger=tmp_path / "run.db").start(grid, record(np.zeros(SIZE))).complete
