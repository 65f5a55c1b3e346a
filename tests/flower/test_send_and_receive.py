"""How late a reply is seen, on a clock that only sleeping moves."""

from collections.abc import Sequence
from unittest.mock import create_autospec

import pytest
from clock import Clock
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid

from fedcgd_flower import grid as module


class CountingClock(Clock):
    """It begins at 1000, and counts how often somebody looks for a reply."""

    def __init__(self) -> None:
        super().__init__(1000.0)
        self.looks = 0


def seen_after(
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
    *,
    look: float = 0.0,
    timeout: float = 1e6,
    kind: type[Grid] = Grid,
) -> CountingClock:
    """The clock when the reply to a message, there `seconds` after it was sent, has been seen; a look takes `look` seconds."""
    clock = CountingClock()
    monkeypatch.setattr(module, "time", clock)
    message = Message(RecordDict({"c": ConfigRecord()}), dst_node_id=1, message_type="train")
    message.metadata.__dict__["_message_id"] = "m"
    reply = Message(RecordDict(), reply_to=message)
    grid = create_autospec(kind, instance=True)
    grid.push_messages.return_value = ["m"]

    def pull(ids):
        clock.looks += 1
        clock.now += look
        return [reply] if clock.now - 1000.0 >= seconds else []

    grid.pull_messages.side_effect = pull
    (got,) = module.send_and_receive(grid, [message], timeout)
    assert (got is reply) == (seconds <= timeout)
    return clock


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.03, 0.6, 0.61, 4.4, 60.0, 3600.0])
def test_a_reply_is_seen_at_most_a_tenth_late(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = seen_after(seconds, monkeypatch)
    assert clock.now - 1000.0 - seconds <= min(max(0.1 * seconds, 0.005), 1.0) + 1e-9
    assert clock.looks <= 100 + seconds


@pytest.mark.parametrize(("kind", "late"), [(InMemoryGrid, 0.021), (Grid, 0.3)])
def test_a_simulations_reply_is_seen_as_soon_as_a_twentieth_of_the_time_allows(
    kind: type[Grid], late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = seen_after(3.0, monkeypatch, look=0.001, kind=kind)
    assert late / 10 < clock.now - 1003.0 <= late
    assert clock.looks * 0.001 <= 0.05 * 3.0 + 0.02


def test_looking_takes_at_most_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = seen_after(60.0, monkeypatch, look=3.0)
    assert clock.looks <= 11


def test_waiting_ends_with_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = seen_after(100.0, monkeypatch, timeout=7.3)
    assert clock.now - 1000.0 == pytest.approx(7.3)


def taken(messages: Sequence[Message]) -> list[str]:
    """As a grid takes messages: each has an ID then."""
    for message in messages:
        message.metadata.__dict__["_message_id"] = f"m{message.metadata.dst_node_id}"
    return [message.metadata.message_id for message in messages]


@pytest.mark.parametrize(("kind", "most"), [(InMemoryGrid, 64), (Grid, 200)])
def test_of_simulated_nodes_few_are_asked_at_once(kind: type[Grid], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each once; the third look at a message finds its reply, but node 7 never answers."""
    clock = CountingClock()
    monkeypatch.setattr(module, "time", clock)
    grid = create_autospec(kind, instance=True)
    sent: dict[str, Message] = {}
    looks: dict[str, int] = {}
    at_once = []

    def push(messages):
        for message_id, message in zip(taken(messages), messages, strict=True):
            assert message_id not in sent
            sent[message_id], looks[message_id] = message, 0
        at_once.append(len(looks))
        return list(sent)[-len(messages) :]

    def pull(ids):
        (message_id,) = ids
        looks[message_id] += 1
        if message_id == "m7" or looks[message_id] < 3:
            return []
        del looks[message_id]
        return [Message(RecordDict(), reply_to=sent[message_id])]

    grid.push_messages.side_effect, grid.pull_messages.side_effect = push, pull
    messages = [Message(RecordDict(), dst_node_id=node, message_type="train") for node in range(1, 201)]
    replies = module.send_and_receive(grid, messages, timeout=100.0)
    assert [node for node, reply in enumerate(replies, 1) if reply is None] == [7]
    assert all(reply.metadata.reply_to_message_id == f"m{n}" for n, reply in enumerate(replies, 1) if reply is not None)
    assert max(at_once) == most
    assert clock.now == pytest.approx(1100.0)


def test_what_was_not_sent_in_time_has_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = CountingClock()
    monkeypatch.setattr(module, "time", clock)
    grid = create_autospec(InMemoryGrid, instance=True)
    grid.push_messages.side_effect = taken
    grid.pull_messages.return_value = []
    messages = [Message(RecordDict(), dst_node_id=node, message_type="train") for node in range(1, 101)]
    assert module.send_and_receive(grid, messages, timeout=5.0) == [None] * 100
    assert clock.now == pytest.approx(1005.0)
    assert len(grid.push_messages.call_args.args[0]) == 64


def test_for_a_node_that_is_gone_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = CountingClock()
    monkeypatch.setattr(module, "time", clock)
    grid = create_autospec(Grid, instance=True)
    grid.push_messages.return_value, grid.get_node_ids.return_value = [None], []
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    taken([message])
    [reply] = module.send_and_receive(grid, [message], timeout=60.0)
    assert (reply.error.code, clock.now) == (5, 1000.0)
