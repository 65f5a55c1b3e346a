"""Which users can be reached, at which node, and which nodes may speak for them."""

import logging

import pytest
from fake_grid import FakeGrid, FakeNode
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

import fedcgd_flower.roster as module
from fedcgd_flower import host_users
from fedcgd_flower.roster import Roster
from fedcgd_flower.user_messages import is_users_query


def pool(*users: str, **options) -> FakeNode:
    app = ClientApp()
    host_users(app, lambda context: users, lambda work, context: pytest.fail("only asked who is there"))
    return FakeNode(app, **options)


def silent(*users: str) -> FakeNode:
    return pool(*users, tamper=lambda request, reply: None)


def roster(identity="declared", *, timeout=0.0, pins: dict[str, str] | None = None, **options) -> Roster:
    """A roster whose pins are kept in `pins`."""
    owner = {} if pins is None else pins

    def pin(users, node):
        if node:
            for user in users:
                owner.setdefault(user, node)
        return {user for user in users if owner.get(user, node) == node}

    return Roster(identity, pin, timeout=timeout, **options)


def questions(grid: FakeGrid) -> list[Message]:
    return [message for message in grid.sent if is_users_query(message)]


def test_users_are_followed_to_a_new_node_and_each_node_is_asked_once() -> None:
    grid = FakeGrid({1: pool("ann", "bob"), 2: pool("cat")})
    directory = roster()
    assert directory.refresh(grid) == {"ann": 1, "bob": 1, "cat": 2}
    grid.nodes[9] = grid.nodes.pop(1)  # the same pool, reconnected under a new node id
    assert directory.refresh(grid) == {"ann": 9, "bob": 9, "cat": 2}
    assert len(questions(grid)) == 3


def test_users_claimed_twice_take_no_part_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid({1: pool("ann", "bob"), 2: pool("bob", "cat")})
    directory = roster()
    for _ in range(3):
        assert directory.refresh(grid) == {"ann": 1, "cat": 2}
    assert caplog.text.count("1 users are claimed by two nodes") == 1


def test_authenticated_nodes_are_one_user_each_by_registered_name(caplog: pytest.LogCaptureFixture) -> None:
    """A key alone says nothing: a node without registration makes a new one at each start."""
    grid = FakeGrid(
        {
            1: FakeNode(ClientApp(), name="u1"),
            2: FakeNode(ClientApp(), public_key=b"\x01\xff"),
            3: FakeNode(ClientApp()),
            4: FakeNode(ClientApp(), name="u4"),
            5: FakeNode(ClientApp(), name="u4"),
        }
    )
    directory = roster("authenticated")
    assert directory.refresh(grid) == {"u1": 1}
    assert directory.refresh(grid) == {"u1": 1}
    assert not grid.sent
    assert caplog.text.count("2 of 5 nodes are not registered by name") == 1
    with pytest.raises(ValueError, match=r"1 of 1 nodes are not registered by name.*flwr supernode register"):
        roster("authenticated").refresh(FakeGrid({2: grid.nodes[2]}))


def test_a_user_belongs_to_the_registered_node_that_named_it_first(caplog: pytest.LogCaptureFixture) -> None:
    pins: dict[str, str] = {}
    grid = FakeGrid({1: pool("ann", "bob", name="silo0")})
    roster(pins=pins).refresh(grid)
    del grid.nodes[1]
    grid.nodes[2] = pool("ann", "cat", name="silo1")
    grid.nodes[3] = pool("bob")  # not registered
    directory = roster(pins=pins)  # after a restart of the server
    for _ in range(3):
        assert directory.refresh(grid) == {"cat": 2}
    assert caplog.text.count("claims 1 users that belong to another node") == 2  # once for each node
    grid.nodes[77] = pool("ann", "bob", name="silo0")  # back under another node id
    assert directory.refresh(grid) == {"ann": 77, "bob": 77, "cat": 2}


def test_a_registered_node_takes_a_user_back_from_one_that_is_not() -> None:
    grid = FakeGrid({3: pool("ann", "bob")})
    directory = roster()
    assert directory.refresh(grid) == {"ann": 3, "bob": 3}
    grid.nodes[1] = pool("ann", name="silo0")
    assert directory.refresh(grid) == {"ann": 1, "bob": 3}


def test_the_operators_map_says_which_node_a_user_belongs_to() -> None:
    grid = FakeGrid({1: pool("ann", "bob", name="silo0"), 2: pool("ann", "eve", name="silo1"), 3: pool("bob")})
    assert roster(hosts={"ann": "silo1", "bob": "silo0"}).refresh(grid) == {"bob": 1, "ann": 2}


def test_without_registration_a_secret_sampling_asks_nobody() -> None:
    grid = FakeGrid({1: pool("ann"), 2: pool("bob", name="silo0")})
    assert roster(registered_only=True).refresh(grid) == {"bob": 2}
    del grid.nodes[2]
    with pytest.raises(ValueError, match=r"1 of 1 nodes are not registered by name.*trusted_nodes=True"):
        roster(registered_only=True).refresh(grid)
    assert roster(registered_only=True).refresh(FakeGrid({})) == {}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_silent_node_is_waited_for_once_and_then_asked_ever_more_rarely(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    grid = FakeGrid({1: pool("ann"), 2: silent("bob")})
    directory = roster(timeout=60.0)
    assert directory.refresh(grid) == {"ann": 1}
    assert 60 <= clock.now < 62
    assert directory.silent == 1
    waited = clock.now
    for _ in range(1000):  # rounds that take ten seconds
        assert directory.refresh(grid) == {"ann": 1}
        clock.now += 10
    assert clock.now == pytest.approx(waited + 10_000)  # no wait in any of them
    assert 5 <= len(questions(grid)) - 1 <= 9  # after 60, 120, 240, … seconds
    assert caplog.text.count("node 2 did not answer within 60 s") == 1
    assert "host_users" not in caplog.text


def test_many_silent_nodes_are_one_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    roster(timeout=60.0).refresh(FakeGrid({i: silent(f"user {i}") for i in range(1, 21)}))
    assert caplog.text.count("did not answer") == 1
    assert "node 1 and 19 others did not answer within 60 s" in caplog.text


def test_a_late_answer_is_taken_down_whenever_it_comes(clock: Clock) -> None:
    grid = FakeGrid({2: silent("bob")})
    directory = roster(timeout=60.0)
    assert directory.refresh(grid) == {}
    [question] = questions(grid)
    reply = pool("bob").app
    from flwr.app import Context

    grid._replies[question.metadata.message_id] = reply(
        question, Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
    )
    assert directory.refresh(grid) == {"bob": 2}
    assert directory.silent == 0


def test_a_node_that_answers_something_else_is_not_waited_for(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid({1: FakeNode(ClientApp()), 2: pool("cat")})
    directory = roster(timeout=60.0)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        for _ in range(3):
            assert directory.refresh(grid) == {"cat": 2}
    assert clock.now == 0
    assert caplog.text.count("node 1 does not say which users it hosts") == 1
    assert "did not answer" not in caplog.text
