"""The paired comparison: each seed with its own counterpart, each side tuned on validation."""

import json
import math
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from fedcgd_experiments.__main__ import app
from fedcgd_experiments.experiment import Point, Setup, identity
from fedcgd_experiments.significance import compare_paired, holm

PLAIN = Setup(mechanism="dp-sgd", epsilon=2.0, delta=1e-5, steps=9, epochs=10)
CGD = replace(PLAIN, mechanism="lambda-cgd:0.9")


def run(setup, seed, accuracy, split="test", rate=1.0):
    seed += 1000 * (split == "test")
    point = Point(setup=setup, task="digits", clip_norm=1.0, learning_rate=rate, seed=seed, split=split)
    return {"kind": "run", "point": json.loads(identity(point)), "accuracy": accuracy}


def runs():
    records = [run(PLAIN, seed, value) for seed, value in enumerate((0.50, 0.60, 0.70))]
    records += [run(CGD, seed, value) for seed, value in enumerate((0.53, 0.64, 0.75))]
    records += [
        run(replace(CGD, mechanism="lambda-cgd:0.5"), seed, 0.99) for seed in range(3)
    ]  # better on test, worse on validation
    records += [run(setup, 0, value, "validation") for setup, value in ((PLAIN, 0.5), (CGD, 0.8))]
    return [*records, run(replace(CGD, mechanism="lambda-cgd:0.5"), 0, 0.7, "validation")]


def test_seeds_are_paired():
    (row,) = compare_paired(runs())
    assert row.setup == CGD
    assert (row.accuracy, row.baseline) == pytest.approx((0.64, 0.60))
    # differences 0.03, 0.04, 0.05: mean 0.04, standard error 0.01/√3, t = 6.928 with 2 degrees of freedom
    assert row.difference == pytest.approx(0.04)
    assert row.p_value == pytest.approx(1 - 6.9282 / math.sqrt(2 + 6.9282**2), rel=1e-4)


def test_only_the_learning_rate_that_validation_chose_counts():
    records = runs() + [run(setup, seed, 0.99, rate=2.0) for setup in (PLAIN, CGD) for seed in range(3)]
    assert compare_paired(records) == compare_paired(runs())
    (row,) = compare_paired([*records, run(PLAIN, 0, 0.6, "validation", rate=2.0)])
    assert (row.accuracy, row.baseline) == pytest.approx((0.64, 0.99))


def test_another_baseline():
    bisr = replace(PLAIN, mechanism="bisr:4")
    others = [run(bisr, seed, 0.64) for seed in range(3)] + [run(bisr, 0, 0.8, "validation")]
    plain, row = sorted(compare_paired(runs() + others, "lambda-cgd"), key=lambda r: r.difference)
    assert (plain.setup, row.setup) == (PLAIN, bisr)
    # differences 0.11, 0.00, −0.11
    assert (row.difference, row.p_value) == pytest.approx((0.0, 1.0), abs=1e-12)
    assert plain.difference == pytest.approx(-0.04)
    # BISR's differences to DP-SGD are 0.14, 0.04, −0.06: mean 0.04, standard error 0.1/√3, t = 0.6928
    ours = {r.setup: r for r in compare_paired(runs() + others)}
    assert ours[bisr].p_value == pytest.approx(1 - 0.6928 / math.sqrt(2 + 0.6928**2), rel=1e-3)
    # of the two, validation prefers 4 bands
    second = replace(bisr, mechanism="bisr:16")
    others += [run(second, seed, 0.9) for seed in range(3)] + [run(second, 0, 0.7, "validation")]
    assert {r.setup: r for r in compare_paired(runs() + others)} == ours
    assert {r.reference for r in compare_paired(runs() + others, "bisr")} == {bisr}


def test_poisson_dp_sgd_is_compared_with_balls_in_bins():
    bins, poisson = replace(CGD, sampling="balls-in-bins"), replace(PLAIN, sampling="poisson")
    records = [
        run(setup, seed, value + 0.01 * seed * (setup is bins), split)
        for setup, value in ((bins, 0.7), (poisson, 0.6))
        for seed in range(3)
        for split in ("test", "validation")
    ]
    assert compare_paired(records) == []
    (row,) = compare_paired(records, under="poisson")
    assert (row.setup, row.reference) == (bins, poisson)
    assert row.difference == pytest.approx(0.11)


def test_holm_is_the_step_down_procedure():
    # sorted 0.01·4, 0.02·3, 0.03·2 (lifted to 0.06, as what is before it), 0.5·1
    assert holm([0.02, 0.5, 0.01, 0.03]) == pytest.approx([0.06, 0.5, 0.04, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    first, second = holm([math.nan, 0.01])
    assert (math.isnan(first), second) == (True, 0.01)
    assert holm([]) == []


def test_the_correction_is_over_all_rows():
    bisr = replace(PLAIN, mechanism="bisr:4")
    others = [run(bisr, seed, 0.64) for seed in range(3)] + [run(bisr, 0, 0.8, "validation")]
    cgd, other = sorted(compare_paired(runs() + others), key=lambda row: row.p_value)
    assert cgd.corrected == pytest.approx(2 * cgd.p_value)
    assert other.corrected == pytest.approx(max(other.p_value, cgd.corrected))


def test_one_seed_makes_no_test():
    records = [run(setup, 0, 0.5, split) for setup in (PLAIN, CGD) for split in ("test", "validation")]
    (row,) = compare_paired(records)
    assert math.isnan(row.p_value)


def test_nothing_to_compare_with():
    assert compare_paired([run(CGD, 0, 0.5), run(CGD, 0, 0.5, "validation")]) == []


def sweep_file(path, *, calibrated):
    records = [
        {"kind": "calibration", "setup": asdict(setup), "adjacency": "one user", "method": "exact"}
        for setup in calibrated
    ]
    for one in runs():
        rate = one["point"].pop("learning_rate")
        records.append(one | {"kind": "runs", "learning_rates": [rate], "accuracies": [one["accuracy"]]})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_command_prints_a_table(tmp_path):
    path = tmp_path / "runs.jsonl"
    sweep_file(path, calibrated=[PLAIN, CGD, replace(CGD, mechanism="lambda-cgd:0.5")])
    done = CliRunner().invoke(app, ["compare", str(path)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "+0.0400" in done.output


def test_no_epsilon_is_shown_of_which_nothing_says_what_it_means(tmp_path):
    path = tmp_path / "runs.jsonl"
    sweep_file(path, calibrated=[PLAIN, CGD])
    done = CliRunner().invoke(app, ["compare", str(path)], env={"COLUMNS": "2000"})
    assert done.exit_code == 2
    assert "1 of 3 setups have runs and no calibration" in done.output
    assert "lambda-cgd:0.5" in done.output
    assert "+0.0400" not in done.output
