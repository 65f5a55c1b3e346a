"""The paired comparison: each seed with its own counterpart, each side tuned on validation."""

import json
import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedcgd_simulations.__main__ import app
from fedcgd_simulations.paired import against_dp_sgd
from fedcgd_simulations.point import Point, Setup, identity

PLAIN = Setup(mechanism="dp-sgd", epsilon=2.0, delta=1e-5, steps=9, epochs=10)
CGD = replace(PLAIN, mechanism="lambda-cgd", lam=0.9)


def run(setup, seed, accuracy, split="test"):
    point = Point(setup=setup, task="digits", clip_norm=1.0, learning_rate=1.0, seed=seed, split=split)
    return {"kind": "run", "point": json.loads(identity(point)), "accuracy": accuracy}


def runs():
    records = [run(PLAIN, seed, value) for seed, value in enumerate((0.50, 0.60, 0.70))]
    records += [run(CGD, seed, value) for seed, value in enumerate((0.53, 0.64, 0.75))]
    records += [run(replace(CGD, lam=0.5), seed, 0.99) for seed in range(3)]  # better on test, worse on validation
    records += [run(setup, 0, value, "validation") for setup, value in ((PLAIN, 0.5), (CGD, 0.8))]
    return [*records, run(replace(CGD, lam=0.5), 0, 0.7, "validation")]


def test_seeds_are_paired():
    (row,) = against_dp_sgd(runs())
    assert row.setup == CGD
    assert (row.accuracy, row.baseline) == pytest.approx((0.64, 0.60))
    # differences 0.03, 0.04, 0.05: mean 0.04, standard error 0.01/√3, t = 6.928 with 2 degrees of freedom
    assert row.difference == pytest.approx(0.04)
    assert row.p_value == pytest.approx(1 - 6.9282 / math.sqrt(2 + 6.9282**2), rel=1e-4)


def test_one_seed_makes_no_test():
    records = [run(setup, 0, 0.5, split) for setup in (PLAIN, CGD) for split in ("test", "validation")]
    (row,) = against_dp_sgd(records)
    assert math.isnan(row.p_value)


def test_nothing_to_compare_with():
    assert against_dp_sgd([run(CGD, 0, 0.5), run(CGD, 0, 0.5, "validation")]) == []


def test_the_command_prints_a_table(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in runs()))
    done = CliRunner().invoke(app, ["compare", str(path)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "+0.0400" in done.output
