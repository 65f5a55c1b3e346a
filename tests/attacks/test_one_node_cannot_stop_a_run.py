"""Invariant: whatever one node sends, withholds or refuses, the other nodes' rounds go on; an operator's Ctrl-C loses nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from fake_grid import FakeGrid, is_training
from flower_runs import SIZE, make, names, node, two_nodes
from shared import record
from sql import rows

from fedcgd.ledger import verify
from fedcgd.participation import Participation


class MalformedGrid(FakeGrid):
    """As Flower, raises for a batch in which one reply has a good header and no JSON in its body. The batch is then lost."""

    malformed = 2

    def pull_messages(self, message_ids):
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            if "update" in reply.content and reply.metadata.src_node_id == self.malformed:
                json.loads("no JSON")
        return replies


def test_a_malformed_reply_is_no_answer() -> None:
    grid = MalformedGrid(two_nodes().nodes)
    strategy = make(min_answers=0)
    strategy.start(grid, record(np.zeros(SIZE)), timeout=60.0)
    assert strategy.releases == 6
    asked = [m for m in grid.sent if is_training(m) and m.metadata.dst_node_id == 2]
    assert strategy.dropped == {"no answer": len(asked)}  # node 1's replies were not lost with them


class DeadGrid(FakeGrid):
    """The connection to the SuperLink is gone after the messages were sent."""

    def pull_messages(self, message_ids):
        if any(is_training(message) for message in self.sent):
            self.nodes = None  # type: ignore[assignment]
            raise ConnectionError("no SuperLink")
        return super().pull_messages(message_ids)

    def get_nodes(self):
        if self.nodes is None:
            raise ConnectionError("no SuperLink")
        return super().get_nodes()

    def get_node_ids(self):
        return [node.node_id for node in self.get_nodes()]


def test_a_lost_connection_is_not_taken_for_silent_nodes(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="no SuperLink"):
        make(ledger=tmp_path / "run.db").start(DeadGrid(two_nodes().nodes), record(np.zeros(SIZE)))
    assert states(tmp_path / "run.db") == ["abandoned"]


def states(path: Path) -> list[str]:
    return [state for (state,) in rows(path, "SELECT state FROM attempts ORDER BY id")]


def test_one_silent_user_costs_a_try_and_not_the_run() -> None:
    """Every user must answer, and one never does: whoever was silent is replaced when the round is tried again."""
    nodes = {number + 1: node([user]) for number, user in enumerate(names(48))}
    nodes[1].tamper = lambda request, reply: None if is_training(request) else reply
    strategy = make(participation=Participation(rounds=40, min_separation=4), min_answers=4)
    result = strategy.start(FakeGrid(nodes), record(np.zeros(SIZE)), timeout=0.0)
    assert (result.released, result.complete) == (40, True)
    assert strategy.dropped["no answer"] <= 10  # twice at each of its turns: 40 rounds of 4 out of 48 users


def test_users_are_not_replaced_where_no_other_can_be_spared() -> None:
    """12 users, each of whom the plan needs at its turn: asking others in round 1 would leave nobody for round 2, for ever."""
    grid = two_nodes()
    silent = {"rounds": 8}

    def tamper(request, reply):
        if not is_training(request) or request.content["fedcgd"]["round"] != 1:
            return reply
        silent["rounds"] -= 1
        return None if silent["rounds"] > 0 else reply

    for fake in grid.nodes.values():
        fake.tamper = tamper
    assert make(min_answers=4).start(grid, record(np.zeros(SIZE)), timeout=0.0).complete


@pytest.mark.parametrize(
    "point", ["round.inner_step", "noise_provider.sum_of_replies", "run_loop.receive", "round.train_message"]
)
def test_ctrl_c_leaves_no_attempt_in_flight(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.db"

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with make(ledger=path) as strategy:
        strategy.start(two_nodes(), record(np.zeros(SIZE)), num_rounds=2)
        with monkeypatch.context() as patched:
            patched.setattr(f"fedcgd_flower.{point}", interrupt)
            with pytest.raises(KeyboardInterrupt):
                strategy.start(two_nodes(), record(np.zeros(SIZE)))
        assert states(path) == ["released", "released", "abandoned"]
        strategy.start(two_nodes(), record(np.zeros(SIZE)))  # the same object goes on
    checked = verify(path)
    assert (checked.released, checked.problems) == (6, ())


class RefusingGrid(FakeGrid):
    """What a request that is too large gets: HTTP 413 and no ids, or None in place of the id."""

    def __init__(self, nodes, answer) -> None:
        super().__init__(nodes)
        self.answer = answer

    def push_messages(self, messages):
        if any(is_training(message) for message in messages):
            for message in messages:
                message.metadata.__dict__["_message_id"] = f"refused-{id(message)}"
            return [] if self.answer == "nothing" else [None] * len(messages)
        return super().push_messages(messages)


@pytest.mark.parametrize("answer", ["nothing", "None"])
def test_a_refused_message_is_an_error_that_says_what_to_do(answer: str, tmp_path: Path) -> None:
    grid = RefusingGrid(two_nodes().nodes, answer)
    size = 2_000_000
    with pytest.raises(ValueError, match="of requests"):
        make(ledger=tmp_path / "run.db").start(grid, record(np.zeros(size)))
    assert states(tmp_path / "run.db") == ["abandoned"]


def test_a_message_to_a_node_that_has_just_gone_is_no_error() -> None:
    class GoneGrid(FakeGrid):
        def push_messages(self, messages):
            ids = list(super().push_messages(messages))
            train = is_training(messages[0])
            return [None if train and m.metadata.dst_node_id == 2 else i for m, i in zip(messages, ids, strict=True)]

        def get_node_ids(self):
            return [1]

    strategy = make(min_answers=0)
    strategy.start(GoneGrid(two_nodes().nodes), record(np.zeros(SIZE)))
    assert strategy.releases == 6
