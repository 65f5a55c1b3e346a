"""How late a reply is seen, on a clock that only sleeping moves."""

from unittest.mock import create_autospec

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcgd_flower import send_and_receive as module


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.looks = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


def seen_after(seconds: float, monkeypatch: pytest.MonkeyPatch, *, look: float = 0.0, timeout: float = 1e6) -> Clock:
    """The clock when the reply to a message, there `seconds` after it was sent, has been seen; a look takes `look` seconds."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    message = Message(RecordDict({"c": ConfigRecord()}), dst_node_id=1, message_type="train")
    message.metadata.__dict__["_message_id"] = "m"
    reply = Message(RecordDict(), reply_to=message)
    grid = create_autospec(Grid, instance=True)
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


def test_looking_takes_at_most_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = seen_after(60.0, monkeypatch, look=3.0)
    assert clock.looks <= 11


def test_waiting_ends_with_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = seen_after(100.0, monkeypatch, timeout=7.3)
    assert clock.now - 1000.0 == pytest.approx(7.3)
