"""Sweeps: what is done is not done again, failures do not end them, and tuning looks at validation only."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedcgd.accounting import calibrate
from fedcgd.mechanisms import LambdaCGD
from fedcgd.participation import Participation
from fedcgd_experiments.__main__ import app
from fedcgd_experiments.experiment import Point, Setup, calibrate_setup, identity, run_points
from fedcgd_experiments.sweep import (
    ResultsFile,
    best_of_families,
    edges,
    here,
    on_ray,
    runs_of,
    sweep,
    to_point,
    tune,
    tuned,
)

SETUP = Setup(mechanism="lambda-cgd:0.8", epsilon=4.0, delta=1e-5, steps=9, epochs=2)
POINT = Point(setup=SETUP, task="digits", clip_norm=1.0, learning_rate=2.0, seed=0)
QUIET = Console(file=io.StringIO())


def test_a_calibration_is_the_accountings():
    record = calibrate_setup(SETUP)
    expected = calibrate(LambdaCGD(0.8), Participation(rounds=18, min_separation=9), epsilon=4.0, delta=1e-5)
    assert record["noise_multiplier"] == expected.noise_multiplier
    # ‖A·C⁻¹‖²_F = n + (1 − λ)²·n(n − 1)/2 = 18 + 0.04·153
    assert record["rmse"] == pytest.approx((24.12 / 18) ** 0.5 * expected.noise_multiplier, rel=1e-6)
    assert record["adjacency"] == "zero out one user"


def test_points_with_other_batches_are_not_trained_together():
    with pytest.raises(ValueError, match="must have the same batches"):
        run_points([POINT, replace(POINT, seed=1)], {identity(SETUP): calibrate_setup(SETUP)})


def test_no_seed_both_tunes_and_tests():
    with pytest.raises(ValueError, match=r"seeds for tests are 1000 and more, got 3"):
        replace(POINT, seed=3, split="test")
    with pytest.raises(ValueError, match=r"seeds for tuning are 0 … 999, got 1000"):
        replace(POINT, seed=1000)
    assert replace(POINT, seed=1000, split="test").seed == 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "lion"}, "optimizer must be one of sgd, adam, adagrad, got 'lion'"),
        ({"schedule": "steps"}, "schedule must be one of constant, linear, cosine, got 'steps'"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"momentum": 0.5, "optimizer": "adam"}, "0 with an optimizer other than sgd, got 0.5 with adam"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
    ],
)
def test_ways_to_descend_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        replace(POINT, **change)


def test_results_are_kept_and_not_made_again(tmp_path):
    points = [replace(POINT, seed=seed) for seed in range(2)]
    path = tmp_path / "deep" / "results.jsonl"
    assert sweep(points, ResultsFile(path), here, data_dir=None, console=QUIET) == []
    first = path.read_text()
    assert [json.loads(line)["kind"] for line in first.splitlines()] == ["calibration", "runs", "runs"]

    def never(work, items):
        raise AssertionError(f"run again: {items}")

    assert sweep(points, ResultsFile(path), never, data_dir=None, console=QUIET) == []
    path.write_text(first + '{"kind": "run", "po')  # the sweep was killed while it wrote
    again = ResultsFile(path)
    assert len(again.records) == 3
    sweep([replace(POINT, seed=2)], again, here, data_dir=None, console=QUIET)
    assert len(ResultsFile(path).runs()) == 3
    assert to_point(runs_of(ResultsFile(path).records)[-1]) == replace(POINT, seed=2)


def test_the_same_point_gives_the_same_accuracy():
    calibrations = {identity(SETUP): calibrate_setup(SETUP)}
    first, second = (run_points([POINT], calibrations)[0]["accuracies"] for _ in range(2))
    assert first == second
    assert first[0] > 0.3


def test_each_of_those_trained_together_has_the_noise_of_its_own_setup():
    points = [replace(POINT, setup=replace(SETUP, epsilon=epsilon)) for epsilon in (0.1, 100.0)]
    calibrations = {identity(point.setup): calibrate_setup(point.setup) for point in points}
    loud, quiet = (record["accuracies"][0] for record in run_points(points, calibrations))
    alone = [run_points([point], {identity(point.setup): calibrations[identity(point.setup)]}) for point in points]
    assert [record["accuracies"][0] for (record,) in alone] == [loud, quiet]
    assert loud < 0.4 < 0.7 < quiet


def test_a_failure_is_told_and_the_others_run(tmp_path):
    results = ResultsFile(tmp_path / "results.jsonl")
    points = [replace(POINT, model="none"), POINT]
    failures = sweep(points, results, here, data_dir=None, console=QUIET)
    assert len(failures) == 1
    assert "unknown model 'none'" in failures[0]
    assert list(results.runs()) == [identity(POINT)]


def record(accuracy, *, split="validation", mechanism="lambda-cgd:0.8", seed=0, **changes):
    seed += 1000 * (split == "test")
    point = replace(POINT, setup=replace(SETUP, mechanism=mechanism), split=split, seed=seed, **changes)
    return {"kind": "run", "point": json.loads(identity(point)), "accuracy": accuracy}


def test_tuning_takes_the_best_mean_of_validation():
    runs = [
        record(0.9, learning_rate=1.0, seed=0),
        record(0.1, learning_rate=1.0, seed=1),
        record(0.6, learning_rate=2.0, seed=0),
        record(0.6, learning_rate=2.0, seed=1),
        record(1.0, learning_rate=3.0, seed=0, split="test"),
    ]
    chosen = tuned(runs, 3)
    assert {point.learning_rate for point in chosen} == {2.0}
    assert {point.split for point in chosen} == {"test"}
    assert [point.seed for point in chosen] == [1000, 1001, 1002]


def test_of_equal_learning_rates_the_smaller_one_is_taken():
    assert tuned([record(0.5, learning_rate=4.0), record(0.5, learning_rate=1.0)], 1)[0].learning_rate == 1.0


@pytest.mark.parametrize("family", ["lambda-cgd", "nu-dp-ftrl"])
def test_the_number_of_a_mechanism_is_chosen_by_validation_not_by_test(family):
    runs = [
        record(0.7, mechanism=f"{family}:0.5"),
        record(0.8, mechanism=f"{family}:0.9"),
        record(0.99, mechanism=f"{family}:0.5", split="test"),
        record(0.1, mechanism=f"{family}:0.9", split="test"),
        record(0.3, mechanism="blt:2"),
        record(0.2, mechanism="blt:3"),
    ]
    assert {setup.mechanism for setup in best_of_families(runs)} == {f"{family}:0.9", "blt:2"}


def test_an_optimum_at_the_edge_asks_for_another_rate():
    inside = [record(value, learning_rate=rate) for rate, value in ((1.0, 0.5), (2.0, 0.6), (4.0, 0.5))]
    assert edges(inside) == {}
    budget = replace(SETUP, mechanism="dp-sgd")
    rising = [record(value, learning_rate=rate, mechanism="blt:2") for rate, value in ((1.0, 0.5), (4.0, 0.6))]
    assert edges([*inside, *rising]) == {budget: (1.0, 8.0)}
    falling = [record(value, learning_rate=rate, mechanism="dp-sgd") for rate, value in ((1.0, 0.5), (4.0, 0.4))]
    assert edges([*inside, *falling]) == {budget: (0.5, 4.0)}
    assert edges([*inside, *falling, *rising]) == {budget: (0.5, 8.0)}
    tested = record(0.9, learning_rate=4.0, split="test")
    assert edges([*inside, tested]) == {}


def test_tuning_extends_the_grid_for_all_until_the_best_rate_is_inside(tmp_path):
    points = [
        replace(POINT, setup=replace(SETUP, mechanism=mechanism), learning_rate=rate)
        for mechanism in ("dp-sgd", "lambda-cgd:0.8")
        for rate in (0.25, 0.5)
    ]
    results = ResultsFile(tmp_path / "results.jsonl")
    assert tune(points, results, here, extensions=8, data_dir=None, console=QUIET) == []
    runs = list(results.runs().values())
    assert edges(runs) == {}
    tried = {m: {to_point(r).learning_rate for r in runs if to_point(r).setup.mechanism == m}
             for m in ("dp-sgd", "lambda-cgd:0.8")}  # fmt: skip
    assert tried["dp-sgd"] == tried["lambda-cgd:0.8"] > {0.25, 0.5}


def test_an_optimum_that_stays_at_the_edge_is_said(tmp_path):
    points = [replace(POINT, learning_rate=rate) for rate in (0.01, 0.02)]
    (line,) = tune(points, ResultsFile(tmp_path / "x.jsonl"), here, extensions=1, data_dir=None, console=QUIET)
    assert line.startswith("an optimum is at the edge of the learning rates at {")


def test_a_setup_knows_its_mechanism_by_its_spelling() -> None:
    rest = {"epsilon": 1.0, "delta": 1e-5, "steps": 4, "epochs": 2}
    setup = Setup(mechanism="lambda-cgd:0.5:normalized", **rest)
    assert (setup.name, setup.lam, setup.family) == ("lambda-cgd", 0.5, "lambda-cgd:normalized")
    setup = Setup(mechanism="bisr:16", **rest)
    assert (setup.name, setup.lam, setup.family) == ("bisr", 0.0, "bisr")
    assert replace(setup, mechanism="bisr:2", sampling="cyclic-poisson").participation().min_separation == 2
    with pytest.raises(ValueError, match="p of bisr must be a whole number"):
        Setup(mechanism="bisr:p=16", **rest)
    with pytest.raises(ValueError, match="unknown mechanism"):
        Setup(mechanism="sgd", **rest)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_ray_gives_what_one_process_gives(tmp_path):
    files = [ResultsFile(tmp_path / name) for name in ("ray", "plain")]
    assert sweep([POINT], files[0], on_ray(None, cpus=1, gpus=0), data_dir=None, console=QUIET) == []
    assert sweep([POINT], files[1], here, data_dir=None, console=QUIET) == []
    assert [file.records[-1]["accuracies"] for file in files] == [files[0].records[-1]["accuracies"]] * 2


def test_the_command_tunes_tests_and_plots(tmp_path):
    output = tmp_path / "sweep.jsonl"
    command = ["sweep", "--output", str(output), "--batch", "140", "--epochs", "1", "--tuning-seeds", "2"]
    command += ["--mechanism", "dp-sgd", "--mechanism", "lambda-cgd:0.5", "--mechanism", "lambda-cgd:0.9"]
    command += ["--epsilon", "4", "--epsilon", "8", "--address", "here"]
    for rate in (0.25, 0.5, 1, 2, 4, 8, 16, 32):
        command += ["--learning-rate", str(rate)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    runs = ResultsFile(output).runs()
    # DP-SGD and 2 λ, 2 budgets, 2 seeds and 8 rates for validation; for test DP-SGD and the better λ with 10 other seeds
    assert len(runs) == 3 * 2 * 2 * 8 + 2 * 2 * 10
    assert len(ResultsFile(output).calibrations()) == 6
    seeds = {split: {to_point(run).seed for run in runs.values() if to_point(run).split == split}
             for split in ("validation", "test")}  # fmt: skip
    assert seeds == {"validation": {0, 1}, "test": set(range(1000, 1010))}
    for words in ([], ["--format", "svg"]):
        drawn = CliRunner().invoke(app, ["plot", str(output), "--output", str(tmp_path / "plots"), *words])
        assert drawn.exit_code == 0, drawn.output
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    stems = {"digits-accuracy-lambda", "digits-accuracy-epsilon", "digits-rmse-ratios"}
    assert names == {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "svg")}


def test_the_command_says_what_failed(tmp_path):
    command = ["sweep", "--output", str(tmp_path / "x.jsonl"), "--epsilon", "-1", "--epochs", "1", "--address", "here"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "got -1.0" in done.output
