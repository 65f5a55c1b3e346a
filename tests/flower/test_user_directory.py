"""Which users can be reached, at which node, and which nodes may speak for them."""

import logging
from collections.abc import Mapping

import pytest
from clock import Clock
from fake_grid import FakeGrid, FakeNode
from flower_runs import hosting
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

import fedcgd_flower.users as module
from fedcgd_flower import ClippedUpdateMod
from fedcgd_flower.users import UserDirectory, is_users_query


def pool(*users: str, shared: bool = False, **options) -> FakeNode:
    return hosting(users, lambda work, context: pytest.fail("only asked who is there"), shared=shared, **options)


def silent(*users: str) -> FakeNode:
    return pool(*users, tamper=lambda request, reply: None)


def make_directory(identity="declared", *, timeout=0.0, pins: dict[str, str] | None = None, **options) -> UserDirectory:
    """A directory whose pins are kept in `pins`."""
    owner = {} if pins is None else pins

    def bind(users, node, *, single=False):
        if single and any(theirs == node and user not in users for user, theirs in owner.items()):
            return set()
        if node:
            for user in users:
                owner.setdefault(user, node)
        return {user for user in users if owner.get(user, node) == node}

    return UserDirectory(identity, bind, timeout=timeout, **options)


def alone(nodes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Users who are at one node each, and that node."""
    return {user: node for user, (node,) in nodes.items()}


def questions(grid: FakeGrid) -> list[Message]:
    return [message for message in grid.sent if is_users_query(message)]


def test_users_are_followed_to_a_new_node_and_each_node_is_asked_once() -> None:
    grid = FakeGrid({1: pool("ann", "bob"), 2: pool("cat")})
    directory = make_directory()
    assert alone(directory.refresh(grid)) == {"ann": 1, "bob": 1, "cat": 2}
    grid.nodes[9] = grid.nodes.pop(1)  # the same pool, reconnected under a new node id
    assert alone(directory.refresh(grid)) == {"ann": 9, "bob": 9, "cat": 2}
    assert len(questions(grid)) == 3


def test_users_claimed_twice_take_no_part_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid({1: pool("ann", "bob"), 2: pool("bob", "cat")})
    directory = make_directory()
    for _ in range(3):
        assert alone(directory.refresh(grid)) == {"ann": 1, "cat": 2}
    assert caplog.text.count("1 user") == 1


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
    directory = make_directory("authenticated")
    assert alone(directory.refresh(grid)) == {"u1": 1}
    assert alone(directory.refresh(grid)) == {"u1": 1}
    assert not grid.sent
    assert caplog.text.count("5 nodes") == 1
    with pytest.raises(ValueError, match="supernode register"):
        make_directory("authenticated").refresh(FakeGrid({2: grid.nodes[2]}))


def test_a_user_belongs_to_the_registered_node_that_named_it_first(caplog: pytest.LogCaptureFixture) -> None:
    pins: dict[str, str] = {}
    grid = FakeGrid({1: pool("ann", "bob", name="silo0")})
    make_directory(pins=pins).refresh(grid)
    del grid.nodes[1]
    grid.nodes[2] = pool("ann", "cat", name="silo1")
    grid.nodes[3] = pool("bob")  # not registered
    directory = make_directory(pins=pins)  # after a restart of the server
    for _ in range(3):
        assert alone(directory.refresh(grid)) == {"cat": 2}
    assert caplog.text.count("claims 1") == 2  # once for each node
    grid.nodes[77] = pool("ann", "bob", name="silo0")  # back under another node id
    assert alone(directory.refresh(grid)) == {"ann": 77, "bob": 77, "cat": 2}


def test_a_registered_node_of_many_users_may_name_others_later() -> None:
    """Only a node that is one user cannot become another one."""
    pins: dict[str, str] = {}
    make_directory(pins=pins).refresh(FakeGrid({1: pool("ann", "bob", name="silo0")}))
    later = FakeGrid({2: pool("ann", "cat", name="silo0")})
    assert alone(make_directory(pins=pins).refresh(later)) == {"ann": 2, "cat": 2}


def test_a_registered_node_takes_a_user_back_from_one_that_is_not() -> None:
    grid = FakeGrid({3: pool("ann", "bob")})
    directory = make_directory()
    assert alone(directory.refresh(grid)) == {"ann": 3, "bob": 3}
    grid.nodes[1] = pool("ann", name="silo0")
    assert alone(directory.refresh(grid)) == {"ann": 1, "bob": 3}
    grid.nodes[2] = pool("ann", "bob", name="silo1")  # the same list as that of node 3
    assert alone(directory.refresh(grid)) == {"ann": 1, "bob": 2}


def test_the_operators_map_says_which_node_a_user_belongs_to() -> None:
    grid = FakeGrid({1: pool("ann", "bob", name="silo0"), 2: pool("ann", "eve", name="silo1"), 3: pool("bob")})
    assert alone(make_directory(hosts={"ann": "silo1", "bob": "silo0"}).refresh(grid)) == {"bob": 1, "ann": 2}


def test_without_registration_a_secret_sampling_asks_nobody() -> None:
    grid = FakeGrid({1: pool("ann"), 2: pool("bob", name="silo0")})
    assert alone(make_directory(registered_only=True).refresh(grid)) == {"bob": 2}
    del grid.nodes[2]
    says = r"1 of 1 node is not registered by name.* --name NAME\. A secret sampling needs it; or, .*trusted_nodes=True"
    with pytest.raises(ValueError, match=says):
        make_directory(registered_only=True).refresh(grid)
    assert alone(make_directory(registered_only=True).refresh(FakeGrid({}))) == {}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_silent_node_is_waited_for_once_and_then_asked_ever_more_rarely(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    grid = FakeGrid({1: pool("ann"), 2: silent("bob")})
    directory = make_directory(timeout=60.0)
    assert alone(directory.refresh(grid)) == {"ann": 1}
    assert 60 <= clock.now < 62
    assert directory.silent == 1
    waited = clock.now
    for _ in range(1000):  # rounds that take ten seconds
        assert alone(directory.refresh(grid)) == {"ann": 1}
        clock.now += 10
    assert clock.now == pytest.approx(waited + 10_000)  # no wait in any of them
    assert 5 <= len(questions(grid)) - 1 <= 9  # after 60, 120, 240, … seconds
    assert caplog.text.count("node 2") == 1
    assert "host_users" not in caplog.text


def test_who_connects_first_is_waited_for_however_late(clock: Clock) -> None:
    directory = make_directory(timeout=60.0)
    assert alone(directory.refresh(FakeGrid({}))) == {}
    assert clock.now == 0
    directory.refresh(FakeGrid({2: silent("bob")}))
    assert clock.now >= 60


def test_many_silent_nodes_are_one_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    make_directory(timeout=60.0).refresh(FakeGrid({i: silent(f"user {i}") for i in range(1, 21)}))
    assert caplog.text.count("not answer") == 1
    assert "19 others" in caplog.text


def test_a_late_answer_is_taken_down_whenever_it_comes(clock: Clock) -> None:
    grid = FakeGrid({2: silent("bob")})
    directory = make_directory(timeout=60.0)
    assert alone(directory.refresh(grid)) == {}
    [question] = questions(grid)
    reply = pool("bob").app
    from flwr.app import Context

    grid._replies[question.metadata.message_id] = reply(
        question, Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
    )
    assert alone(directory.refresh(grid)) == {"bob": 2}
    assert directory.silent == 0


def test_a_node_that_answers_something_else_is_not_waited_for(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid({1: FakeNode(ClientApp()), 2: pool("cat")})
    directory = make_directory(timeout=60.0)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        for _ in range(3):
            assert alone(directory.refresh(grid)) == {"cat": 2}
    assert clock.now == 0
    assert caplog.text.count("cannot take") == 1
    assert "ClientApp(mods=[clipped_update_mod])" in caplog.text
    assert not directory.is_hopeless


def test_a_node_that_names_no_user_takes_no_part_and_hears_why(caplog: pytest.LogCaptureFixture) -> None:
    app = ClientApp(mods=[ClippedUpdateMod(user=lambda context: None)])
    app.train()(lambda message, context: pytest.fail("only asked who is there"))
    grid = FakeGrid({1: FakeNode(app), 2: pool("cat")})
    directory = make_directory()
    with caplog.at_level(logging.WARNING, logger="flwr"):
        for _ in range(3):
            assert alone(directory.refresh(grid)) == {"cat": 2}
    assert caplog.text.count("cannot take") == 1
    assert "not answer" not in caplog.text


def test_nodes_that_share_users_are_all_where_they_can_be_asked() -> None:
    grid = FakeGrid({i: pool("ann", "bob", shared=True) for i in (3, 1)} | {2: pool("cat")})
    assert make_directory().refresh(grid) == {"ann": (1, 3), "bob": (1, 3), "cat": (2,)}
    grid.nodes[4] = pool("bob", "dan", shared=True)
    assert make_directory().refresh(grid) == {"ann": (1, 3), "bob": (1, 3, 4), "cat": (2,), "dan": (4,)}


def test_a_node_that_names_everybodys_users_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """It kept everybody out of the run, and no line said which node it was."""
    grid = FakeGrid({1: pool("ann", "bob"), 2: pool("cat"), 3: pool("dan"), 7: pool("ann", "bob", "cat", "dan")})
    directory = make_directory()
    assert directory.refresh(grid) == {}
    assert "are claimed" in caplog.text
    assert ("registered) names") in caplog.text
    assert directory.claimants.startswith("node 7 (not registered) names 4")
    grid.nodes[1] = pool("ann", "bob", name="silo0")  # a registered node keeps its own
    grid.nodes[8] = grid.nodes.pop(1)
    assert alone(directory.refresh(grid)) == {"ann": 8, "bob": 8}


@pytest.mark.parametrize("says_so", [1, 2])
def test_a_user_is_shared_only_if_both_nodes_say_so(says_so: int, caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid({i: pool("ann", f"user {i}", shared=i == says_so) for i in (1, 2)})
    grid.nodes[3] = pool("ann", shared=True)
    assert alone(make_directory().refresh(grid)) == {"user 1": 1, "user 2": 2}
    assert "is claimed" in caplog.text


def test_an_answer_that_is_not_exactly_shared_is_not() -> None:
    def almost(request: Message, reply: Message) -> Message:
        reply.content["fedcgd"]["shared"] = 1
        return reply

    grid = FakeGrid({i: pool("ann", shared=True, tamper=almost) for i in (1, 2)})
    assert make_directory().refresh(grid) == {}


def test_registered_nodes_share_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The same id at two silos may be two people, of whom one would have had the other's turns."""
    silos = {1: pool("ann", "bob", shared=True, name="silo0"), 2: pool("ann", "cat", shared=True, name="silo1")}
    assert alone(make_directory().refresh(FakeGrid(silos))) == {"ann": 1, "bob": 1, "cat": 2}
    assert "claims 1" in caplog.text
    assert alone(make_directory(hosts={"ann": "silo1"}).refresh(FakeGrid(silos))) == {"ann": 2}
    silos[3] = pool("cat", "dan", shared=True, name="silo1")  # there twice
    assert alone(make_directory().refresh(FakeGrid(silos))) == {"ann": 1, "bob": 1, "dan": 3}


def test_nodes_that_share_cannot_take_a_registered_nodes_users_and_lose_what_it_names() -> None:
    sharing = {i: pool("ann", "bob", "cat", shared=True) for i in (1, 2)}
    pins = {"ann": "silo0"}  # known from before the server restarted, and away
    grid = FakeGrid(dict(sharing))
    directory = make_directory(pins=pins)
    assert directory.refresh(grid) == {"bob": (1, 2), "cat": (1, 2)}
    grid.nodes[3] = pool("bob", name="silo1")
    assert directory.refresh(grid) == {"bob": (3,), "cat": (1, 2)}
    grid.nodes[4] = pool("ann", "bob", "cat", shared=True)  # with a list that was there before
    assert directory.refresh(grid) == {"bob": (3,), "cat": (1, 2, 4)}
    grid.nodes[5] = pool("cat", name="silo2")
    assert directory.refresh(grid) == {"bob": (3,), "cat": (5,)}
