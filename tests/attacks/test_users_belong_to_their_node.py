"""Invariant: a user is one user, and only its own node learns when it takes part, whoever claims it and whoever restarts."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from fake_grid import FakeGrid, FakeNode, is_training
from flower_runs import SIZE, make, names, node
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from shared import record

from fedcgd import DPSGD, NoiseKey, Participation
from fedcgd.ledger import verify
from fedcgd_flower import IncompleteRunError, clipped_update_mod

BINS = {
    "participation": Participation(rounds=12, min_separation=4, sampling="balls-in-bins"),
    "mechanism": DPSGD(),
    "cohort_size": 2,
}


def told(grid: FakeGrid, node_id: int, user: str) -> list[int]:
    """The rounds for which the node was asked to train the user."""
    return [
        message.content["fedcgd"]["round"]
        for message in grid.sent
        if is_training(message)
        and message.metadata.dst_node_id == node_id
        and user in message.content["fedcgd"]["users"]
    ]


@pytest.mark.parametrize("restart", [False, True])
def test_a_node_that_claims_an_absent_user_does_not_learn_its_bin(restart: bool, tmp_path: Path) -> None:
    users = names(8)
    grid = FakeGrid({1: node(users, name="silo0"), 2: node(["mine"], name="silo1")})
    key = NoiseKey.generate()
    options = BINS | {"key": key, "ledger": tmp_path / "run.db"}
    with make(**options) as strategy:
        strategy.start(grid, record(np.zeros(SIZE)), num_rounds=1)
        del grid.nodes[1]
        grid.nodes[2] = node(["mine", *users], name="silo1")
        if not restart:  # the claim comes from a node that was not known yet
            grid.nodes[3] = node(users, name="silo2")
            strategy.start(grid, record(np.zeros(SIZE)), num_rounds=3)
    if restart:
        make(**options).start(grid, record(np.zeros(SIZE)), num_rounds=11)
    for user in users:
        assert told(grid, 2, user) == told(grid, 3, user) == []


def test_the_node_of_the_users_does_learn_it(tmp_path: Path) -> None:
    """Or the test above would pass if nobody were ever asked."""
    users = names(8)
    grid = FakeGrid({1: node(users, name="silo0")})
    make(**BINS, key=NoiseKey.generate()).start(grid, record(np.zeros(SIZE)))
    assert all(len(told(grid, 1, user)) == 3 for user in users)


def test_a_secret_sampling_asks_no_node_that_nobody_knows() -> None:
    grid = FakeGrid({1: node(names(8))})
    with pytest.raises(ValueError, match="not registered"):
        make(**BINS, key=NoiseKey.generate()).start(grid, record(np.zeros(SIZE)))
    assert not [message for message in grid.sent if is_training(message)]
    strategy = make(**BINS, key=NoiseKey.generate(), trusted_nodes=True)
    strategy.start(grid, record(np.zeros(SIZE)))
    assert strategy.releases == 12


def silo(key: bytes, name: str = "") -> FakeNode:
    """A node whose every train reply is an honest one of the user it is asked for."""
    return FakeNode(node(["silo0", "silo1", key.hex()]).app, public_key=key, name=name)


def test_a_restarted_silo_is_not_another_user(tmp_path: Path) -> None:
    """With k = 1 two silos took part in three rounds, under a new key each time, and the record verified."""
    options = {
        "participation": Participation(rounds=3, max_participations=1),
        "mechanism": DPSGD(),
        "cohort_size": 2,
        "identity": "authenticated",
        "ledger": tmp_path / "run.db",
        "min_answers": 0,
        "expected_users": 2,
    }
    for start in range(3):
        grid = FakeGrid({1: silo(b"first %d" % start), 2: silo(b"second %d" % start)})
        with pytest.raises(ValueError, match="not registered"):
            make(**options).start(grid, record(np.zeros(SIZE)), num_rounds=1)
        assert not grid.sent

    registered = FakeGrid({1: silo(b"1", name="silo0"), 2: silo(b"2", name="silo1")})
    make(**options).start(registered, record(np.zeros(SIZE)), num_rounds=1)
    again = FakeGrid({7: silo(b"1", name="silo0"), 8: silo(b"2", name="silo1")})
    with pytest.raises(IncompleteRunError, match="time, which"):
        make(**options).start(again, record(np.zeros(SIZE)))
    checked = verify(tmp_path / "run.db")
    assert (checked.released, checked.problems) == (1, ())


def test_people_do_not_get_other_ids_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """With k = 2, each took part four times: twice as a declared user, twice as a registered name; and the record verified."""
    options = {
        "participation": Participation(rounds=4, max_participations=2),
        "mechanism": DPSGD(),
        "cohort_size": 2,
        "ledger": tmp_path / "run.db",
        "expected_users": 2,
    }
    grid = FakeGrid({1: node(["ann"], name="silo0"), 2: node(["bob"], name="silo1")})
    make(**options, identity="declared").start(grid, record(np.zeros(SIZE)), num_rounds=2)
    with pytest.raises(ValueError, match="identity: declared"):
        make(**options, identity="authenticated").start(grid, record(np.zeros(SIZE)))
    assert verify(tmp_path / "run.db").released == 2


def single_user_node(user: str, name: str) -> FakeNode:
    """A node whose ordinary app has the mod, and whose configuration names `user`."""
    app = ClientApp(mods=[clipped_update_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        moved = record(message.content["arrays"]["w"].numpy() + np.float32(1))
        return Message(RecordDict({"arrays": moved}), reply_to=message)

    return FakeNode(app, config={"user-id": user}, name=name)


def rounds_of_nodes(path: Path, user_of: Callable[[int, int], str], name_of: Callable[[int], str]) -> Counter[int]:
    """How often each of four nodes was asked, if node `i` is configured as `user_of(i, start)` at each of four starts."""
    options = {
        "participation": Participation(rounds=4, min_separation=4),
        "mechanism": DPSGD(),
        "cohort_size": 4,
        "expected_users": 4,
        "min_answers": 0,
        "ledger": path,
    }
    asked: Counter[int] = Counter()
    for start in range(4):
        grid = FakeGrid({i: single_user_node(user_of(i, start), name_of(i)) for i in range(1, 5)})
        with suppress(IncompleteRunError):
            make(**options).start(grid, record(np.zeros(SIZE)), num_rounds=1)
        asked.update(message.metadata.dst_node_id for message in grid.sent if is_training(message))
    return asked


def test_a_registered_node_whose_user_id_is_edited_at_each_restart_is_still_one_user(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All four people took part in all four rounds, with ε for one round each in the log, and the record verified."""
    renamed = rounds_of_nodes(tmp_path / "renamed.db", lambda i, start: f"{i} at {start}", lambda i: f"silo{i}")
    assert renamed == {1: 1, 2: 1, 3: 1, 4: 1}
    assert "second user" in caplog.text
    checked = verify(tmp_path / "renamed.db")
    assert (checked.released, checked.problems) == (1, ())
    assert checked.run.identity == "declared"
