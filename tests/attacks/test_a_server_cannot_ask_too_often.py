"""A server that begins again, or asks twice, wants more of its users than was agreed: a node that counts turns trains nobody."""

import math
from functools import partial
from pathlib import Path

import pytest
from fake_grid import FakeGrid, FakeNode, is_training
from flower_runs import KEY, hosting, names, one_user
from flwr.app import Message
from keeper_runs import SIMULATED, make
from shared import record

from fedcgd_flower import ClippedUpdateMod, IncompleteRunError, sequential_training


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)


def hosts(tmp_path: Path, trained: list[str], *, count: bool) -> dict[int, FakeNode]:
    """Twelve users on two nodes, which note in `trained` whom they train."""

    def train(model, user, config, context):
        trained.append(user)
        return record(model["w"].numpy() + 1)

    return {
        i: hosting(
            names(12)[i - 1 :: 2], sequential_training(train), keepers=SIMULATED,
            config={"participations": str(tmp_path / f"{i}.db")} if count else {},
        )
        for i in (1, 2)
    }  # fmt: skip


def single(tmp_path: Path, trained: list[str], *, count: bool) -> dict[int, FakeNode]:
    """Twelve nodes that are one user each."""
    grid = {}
    for user in names(12):
        turns = {"participations": str(tmp_path / f"{user}.db")} if count else {}
        note = partial(lambda user, numbers: trained.append(user) or numbers, user)
        grid[len(grid) + 1] = one_user(user, note, ClippedUpdateMod(keepers=SIMULATED), **turns)
    return grid


class AsksTwice(FakeGrid):
    """Behind each training request another one, with what `changed` makes of it."""

    changed: dict

    def push_messages(self, messages):
        ids = super().push_messages(messages)
        for message in filter(is_training, messages):
            again = Message(message.content, dst_node_id=message.metadata.dst_node_id, message_type="train")
            task = again.content["fedcgd"]
            honest = dict(task)
            task.update({name: change(task[name]) for name, change in self.changed.items()})
            super().push_messages([again])
            task.update(honest)
        return ids


def start(grid: FakeGrid, **plan) -> None:
    make(key=KEY, **plan).start(grid, record([0.0] * 6), timeout=1.0)


@pytest.mark.parametrize("again", [{}, {"noise_multiplier": 3.0}], ids=["the same plan", "another plan"])
def test_a_second_run_trains_nobody(again: dict, tmp_path: Path) -> None:
    trained: list[str] = []
    start(FakeGrid(hosts(tmp_path, trained, count=True)))
    assert sorted(trained) == sorted(names(12) * 2)  # six rounds of four users, three apart
    with pytest.raises(IncompleteRunError):
        start(FakeGrid(hosts(tmp_path, trained, count=True)), **again)
    assert len(trained) == 24
    start(FakeGrid(hosts(tmp_path, trained, count=False)), **again)
    assert len(trained) == 48, "the attack is no attack: without a count it must succeed"


CHANGED: dict[str, dict] = {
    "the same": {},
    "in another order": {"users": lambda users: users[::-1]},
    "in the next round": {"round": lambda round: min(round + 1, 5)},
    "by another name": {"users": lambda users: ["somebody else"]},
}


@pytest.mark.parametrize(
    ("nodes", "how"),
    [*((hosts, how) for how in CHANGED if how != "by another name"), *((single, how) for how in CHANGED)],
)
def test_a_user_who_is_asked_twice_trains_once(nodes, how: str, tmp_path: Path) -> None:
    """Two answers for one try of a round would both fit its list, and the user's update would count twice."""
    trained: list[str] = []
    for count, expected in ((True, 24), (False, 48)):
        trained.clear()
        grid = AsksTwice(nodes(tmp_path, trained, count=count))
        grid.changed = CHANGED[how]
        start(grid)
        assert len(trained) == expected, "the attack is no attack" if not count else "asked twice, trained twice"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unit", -1.0),
        ("unit", 0.0),
        ("unit", math.nan),
        ("clip-norm", -0.1),
        ("clip-norm", math.nan),
        ("indicator", -1),
    ],
)
def test_a_request_by_which_nothing_is_clipped_trains_nobody(name: str, value: float, tmp_path: Path) -> None:
    """Divided by −1, an update of any length would have a norm below the bound, and take the place of all others of its node."""
    trained: list[str] = []
    grid = AsksTwice(hosts(tmp_path, trained, count=False))
    grid.changed = {name: lambda _: value}
    start(grid)
    assert len(trained) == 24
