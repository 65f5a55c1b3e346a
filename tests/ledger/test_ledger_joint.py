"""Several ledgers together: the joint ε of each group of users, against the composition of Gaussians done by hand."""

import math
from pathlib import Path

import ledgers
import numpy as np
import pytest
from command_line import figures, run
from ledgers import refused
from oracles_accounting import gaussian_epsilon

from fedcgd import Participation, Plan
from fedcgd.accounting.compose import JOINT_CONDITION
from fedcgd.ledger import joint
from fedcgd.mechanisms import LambdaCGD, matrix

PLAN = Plan.calibrated(
    LambdaCGD(0.9), Participation(rounds=210, min_separation=21), clip_norm=1.0, epsilon=8, delta=1e-5
)


def recorded(path: Path, users: list[str], plan: Plan = PLAN) -> Path:
    return ledgers.recorded(path, users, plan, over=False)


def test_two_runs_at_8_are_12_26_together_for_who_is_in_both(tmp_path: Path) -> None:
    users = [f"u{i}" for i in range(100)]
    one = recorded(tmp_path / "A.db", users[:97])
    two = recorded(tmp_path / "B.db", users[3:])
    found = joint([one, two])
    assert [(group.users, [Path(name).name for name in group.ledgers]) for group in found.groups] == [
        (94, ["A.db", "B.db"]),
        *[(3, [name]) for name in ("A.db", "B.db")],
    ]
    c = matrix(LambdaCGD(0.9), 210)
    mu = np.linalg.norm(c[:, ::21].sum(axis=1)) / PLAN.noise_multiplier
    assert found.worst.planned.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(2) * mu, 1e-5), rel=1e-4)
    assert found.worst.planned.epsilon == pytest.approx(12.26, abs=0.005)
    assert [group.planned.epsilon for group in found.groups[1:]] == pytest.approx([8, 8], rel=1e-4)
    first = np.linalg.norm(c[:1, :1]) / PLAN.noise_multiplier
    assert found.worst.released.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(2) * first, 1e-5), rel=1e-4)


def test_a_user_alone_and_another_delta(tmp_path: Path) -> None:
    one, two = recorded(tmp_path / "A.db", ["ann", "bob"]), recorded(tmp_path / "B.db", ["bob"])
    assert joint([one, two], user="ann").worst.planned.epsilon == pytest.approx(8, rel=1e-4)
    assert joint([one, two], user="bob").worst.planned.epsilon == pytest.approx(12.26, abs=0.005)
    assert joint([one, two], user="bob", delta=1e-9).worst.planned.epsilon > 13
    with refused("unknown-user"):
        joint([one, two], user="eve")


def test_what_cannot_be_composed_is_refused(tmp_path: Path) -> None:
    one = recorded(tmp_path / "A.db", ["ann"])
    other = Plan.from_description({**PLAN.to_description(), "delta": 1e-6})
    two = recorded(tmp_path / "B.db", ["ann"], other)
    with refused("several-deltas"):
        joint([one, two])
    with refused("no-ledger"):
        joint([one, tmp_path / "C.db"])
    empty = [recorded(tmp_path / f"{name}.db", []) for name in "DE"]
    with refused("no-users"):
        joint(empty)


def test_the_command_says_the_worst_and_no_ids(tmp_path: Path) -> None:
    one, two = recorded(tmp_path / "A.db", ["ann", "bob"]), recorded(tmp_path / "B.db", ["bob"])
    result = run("ledger", "compose", one, two)
    assert result.exit_code == 0, result.stderr
    assert all(part in result.stdout for part in ("ε ≤ 12.3", "1e-05", "1 user"))
    for word in (
        "zero out one user",
        "samplings: none, none",
        "exact composition of Gaussian mechanisms",
        "A.db, ",
    ):
        assert word in result.stdout
    assert "bob" not in result.stdout
    found = figures("ledger", "compose", one, two)
    assert found["groups"][0]["planned"]["epsilon"] == pytest.approx(12.26, abs=0.005)
    assert found["problems"] == []
    promised = found["groups"][0]["planned"]
    assert (promised["adjacency"], promised["condition"]) == ("zero out one user", JOINT_CONDITION)
