"""A round's large memory: asked for once, given back before the inner strategy needs it, and seen by nobody else."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from fake_grid import FakeGrid, is_training
from flower_runs import SIZE, make, two_nodes
from flwr.serverapp.strategy import FedAvg
from shared import record

from fedcgd_flower import grid, replies
from fedcgd_flower import round as training_rounds


@pytest.fixture
def quick_collection() -> Iterator[None]:
    """`gc.collect` looks at what the test makes alone, not at every module that is loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize("at_once", [0, 10**9])
def test_a_reply_is_gone_before_the_next_one_comes_or_the_inner_strategy_steps(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten models of 40 MB lay there while the inner strategy made its own; a large one is added as soon as it is there."""
    updates: list[weakref.ref] = []
    before_next: list[int] = []
    before_step: list[int] = []
    received, step = replies._received, training_rounds.inner_step

    def alive() -> int:
        gc.collect()
        return sum(reference() is not None for reference in updates)

    class Watched(FakeGrid):
        def pull_messages(self, message_ids):
            before_next.append(alive())
            return super().pull_messages(message_ids)

    def reading(reply, task):
        part = received(reply, task)
        updates.extend([weakref.ref(reply), weakref.ref(part)])
        return part

    def stepping(*args):
        before_step.append(alive())
        return step(*args)

    monkeypatch.setattr(replies, "_AT_ONCE", at_once)
    monkeypatch.setattr(replies, "_received", reading)
    monkeypatch.setattr(training_rounds, "inner_step", stepping)
    make().start(Watched(two_nodes().nodes), record(np.zeros(SIZE)))
    assert len(updates) >= 2 * 6
    assert before_step == [0] * 6
    assert (max(before_next) == 0) == (at_once == 0)


def test_a_large_message_is_gone_when_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that it carries is the round's largest array beside the sum: nobody needs it while replies are added."""
    sent: list[weakref.ref] = []
    alive: list[int] = []

    class Watched(FakeGrid):
        def push_messages(self, messages):
            sent.extend(weakref.ref(message.content) for message in messages if is_training(message))
            ids = super().push_messages(messages)
            self.sent = [None] * len(self.sent)
            return ids

        def pull_messages(self, message_ids):
            alive.append(sum(reference() is not None for reference in sent))
            return super().pull_messages(message_ids)

    monkeypatch.setattr(grid, "DEPLOYMENT", replace(grid.DEPLOYMENT, large=-1))
    make().start(Watched(two_nodes().nodes), record(np.zeros(SIZE)))
    assert len(sent) == 2 * 6
    assert set(alive) == {0}


def test_what_an_inner_strategy_keeps_of_a_round_stays_as_it_was() -> None:
    class Keeps(FedAvg):
        kept: list = []  # noqa: RUF012
        as_it_was: list = []  # noqa: RUF012

        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            arrays = replies[0].content["arrays"]
            self.kept.append(arrays)
            self.as_it_was.append(arrays["w"].numpy().copy())
            return super().aggregate_train(server_round, replies)

    result = make(Keeps()).start(two_nodes(), record(np.zeros(SIZE)))
    assert len(Keeps.kept) == 6
    for arrays, before in zip(Keeps.kept, Keeps.as_it_was, strict=True):
        np.testing.assert_array_equal(arrays["w"].numpy(), before)
    np.testing.assert_array_equal(result.arrays["w"].numpy(), Keeps.as_it_was[-1])  # FedAvg of one reply
