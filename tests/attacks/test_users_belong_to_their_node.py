"""Invariant: a user is one user, and only its own node learns when it takes part, whoever claims it and whoever restarts."""

from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from fake_grid import FakeGrid, is_training
from flower_runs import SIZE, make, names, node, one_user
from shared import record

from fedcgd import DPSGD, NoiseKey, Participation
from fedcgd.ledger import verify
from fedcgd_flower import IncompleteRunError

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


def test_a_registered_node_whose_user_id_is_edited_at_each_restart_is_still_one_user(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All four people took part in all four rounds, with ε for one round each in the log, and the record verified."""
    options = BINS | {"participation": Participation(rounds=4, min_separation=4), "cohort_size": 4, "min_answers": 0}
    path, asked = tmp_path / "run.db", Counter[int]()
    for start in range(4):
        grid = FakeGrid({i: one_user(f"{i} at {start}", lambda numbers: numbers + 1) for i in range(1, 5)})
        for number, fake in grid.nodes.items():
            fake.name = f"silo{number}"
        with suppress(IncompleteRunError):
            make(**options, expected_users=4, ledger=path).start(grid, record(np.zeros(SIZE)), num_rounds=1)
        asked.update(message.metadata.dst_node_id for message in grid.sent if is_training(message))
    assert asked == {1: 1, 2: 1, 3: 1, 4: 1}
    assert "second user" in caplog.text
    assert (verify(path).released, verify(path).problems) == (1, ())
