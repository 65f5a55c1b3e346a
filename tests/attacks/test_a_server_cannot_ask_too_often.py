"""A server that begins again asks users for more turns than were agreed: a node that counts them itself trains nobody."""

from pathlib import Path

import pytest
from fake_grid import FakeGrid, FakeNode
from flwr.clientapp import ClientApp
from keeper_runs import KEY, SIMULATED, make, names
from shared import record

from fedcgd_flower import IncompleteRunError, host_users, sequential_training


def nodes(tmp_path: Path, trained: list[str], *, count: bool) -> FakeGrid:
    """Twelve users on two nodes, which note in `trained` whom they train."""

    def train(model, user, config, context):
        trained.append(user)
        return record(model["w"].numpy() + 1)

    grid = {}
    for i in (1, 2):
        app = ClientApp()
        host_users(app, lambda context, i=i: names(12)[i - 1 :: 2], sequential_training(train), keepers=SIMULATED)
        grid[i] = FakeNode(app, config={"turns": str(tmp_path / f"{i}.db")} if count else {})
    return FakeGrid(grid)


def start(grid: FakeGrid, **plan) -> None:
    make(key=KEY, **plan).start(grid, record([0.0] * 6), timeout=1.0)


@pytest.mark.parametrize("again", [{}, {"noise_multiplier": 3.0}], ids=["the same plan", "another plan"])
def test_a_second_run_trains_nobody(again: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    trained: list[str] = []
    start(nodes(tmp_path, trained, count=True))
    assert sorted(trained) == sorted(names(12) * 2)  # six rounds of four users, three apart
    with pytest.raises(IncompleteRunError):
        start(nodes(tmp_path, trained, count=True), **again)
    assert len(trained) == 24
    start(nodes(tmp_path, trained, count=False), **again)
    assert len(trained) == 48, "the attack is no attack: without a count it must succeed"
