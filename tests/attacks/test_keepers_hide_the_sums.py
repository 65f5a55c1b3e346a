"""Whoever reads the server sees noised sums only. With stolen keys: test_a_lying_pointer_gains_nothing.py."""

import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
from fake_grid import FakeGrid
from flower_runs import KEY, names
from flwr.app import Array, ArrayRecord, Message
from flwr.clientapp import ClientApp
from keeper_runs import SIMULATED, make, node
from scipy import stats

from fedcgd.noise import NoiseStream
from fedcgd_flower import host_users

SIZE = 6_000


class Tap:
    """A FakeGrid whose every reply is kept: all that a server, its database and its memory ever hold of nodes."""

    def __init__(self, amounts: dict[str, float], size: int) -> None:
        self.kept: list[Message] = []

        def keep(request: Message, reply: Message) -> Message:
            if "fedcgd" in reply.content.config_records and "update" in reply.content.array_records:
                self.kept.append(reply)
            return reply

        self.grid = FakeGrid(
            {i: node([user], SIMULATED, amount, tamper=keep) for i, (user, amount) in enumerate(amounts.items(), 1)}
        )
        self.size = size

    def run(self, **options) -> None:
        make(**options).start(self.grid, ArrayRecord({"w": Array(np.zeros(self.size, np.float32))}), num_rounds=2)

    def updates(self) -> list[np.ndarray]:
        return [reply.content["update"]["flat"].numpy() for reply in self.kept]


def chi_square(values: np.ndarray) -> float:
    return stats.chisquare(np.bincount(np.ascontiguousarray(values).view(np.uint8), minlength=256)).pvalue


def test_no_upload_no_difference_and_no_partial_sum_at_the_server_can_be_told_from_uniform() -> None:
    tap = Tap(dict.fromkeys(names(12), 1.0), SIZE)
    tap.run()
    uploads = tap.updates()
    assert len(uploads) == 8
    for one in uploads:
        assert chi_square(one) > 1e-6
    for one, other in pairwise(uploads):
        assert chi_square(one - other) > 1e-6
        assert chi_square(one + other) > 1e-6


def test_users_that_fail_are_slow_or_give_nan_are_told_apart_by_nothing() -> None:
    """Every byte of a reply but the masked integers and the random ticket and seeds is the same, whatever the data are."""

    def failing(work, context):
        raise RuntimeError("this user's record says HIV")

    def described(amount: float | None) -> list[dict]:
        tap = Tap({user: 1.0 if amount is None or user != "u000" else amount for user in names(12)}, 6)
        if amount is None:
            host_users(app := ClientApp(), lambda context: ["u000"], failing, keepers=SIMULATED)
            tap.grid.nodes[1].app = app
        tap.run()
        found = []
        for reply in tap.kept:
            task = dict(reply.content["fedcgd"])
            lengths = {name: len(task.pop(name)) for name in ("ticket", "sealed")}
            array = reply.content["update"]["flat"]
            found.append(task | lengths | {"dtype": array.dtype, "shape": tuple(array.shape), "bytes": len(array.data)})
            assert set(reply.content) == {"fedcgd", "update"}
        return found

    honest = described(1.0)
    for amount in (None, 0.0, float("nan"), float("inf"), 1e30):  # None: it raises
        assert described(amount) == honest
    assert all(set(one) == {"round", "attempt", "ticket", "sealed", "dtype", "shape", "bytes"} for one in honest)


def test_the_server_has_no_key_of_the_noise_and_its_ledger_none_of_the_sums(tmp_path: Path) -> None:
    """What the server's key makes is not in the release; and no table of the ledger has a column of the sum's size."""
    released = []
    strategy = make(ledger=tmp_path / "run.db")
    grid = FakeGrid({1: node(names(12)[::2], amount=0.0), 2: node(names(12)[1::2], amount=0.0)})
    strategy.start(
        grid,
        ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))}),
        num_rounds=1,
        evaluate_fn=lambda r, a: released.append(a["w"].numpy().astype(np.float64)),
    )
    own = NoiseStream(KEY.choices).normal(0, 0, 0, SIZE)
    assert abs(np.corrcoef(released[1], own)[0, 1]) < 0.06
    with closing(sqlite3.connect(tmp_path / "run.db")) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        for table in tables:
            for row in connection.execute(f"SELECT * FROM {table}"):
                assert all(not isinstance(value, bytes) or len(value) < SIZE for value in row)
