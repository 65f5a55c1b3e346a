"""Sweeps: what is done is not done again, failures do not end them, and tuning looks at validation only."""

import io
import json
from dataclasses import replace

import pytest
import torch
from central_training import train_central
from rich.console import Console
from typer.testing import CliRunner

from fedcgd.accounting import calibrate
from fedcgd.mechanisms import LambdaCGD
from fedcgd.participation import Participation
from fedcgd_experiments.__main__ import app
from fedcgd_experiments.experiment import Point, Setup, calibrate_setup, identity, run_point
from fedcgd_experiments.plots import best_lambda
from fedcgd_experiments.sweep import ResultsFile, on_ray, one_by_one, sweep, to_point, tuned
from fedcgd_simulations.task import evaluate
from fedcgd_simulations.tasks import get_task

SETUP = Setup(mechanism="lambda-cgd:0.8", epsilon=4.0, delta=1e-5, steps=9, epochs=2)
POINT = Point(setup=SETUP, task="digits", clip_norm=1.0, learning_rate=2.0, seed=0)
QUIET = Console(file=io.StringIO())


def test_a_calibration_is_the_accountings():
    record = calibrate_setup(SETUP)
    expected = calibrate(LambdaCGD(0.8), Participation(rounds=18, min_separation=9), epsilon=4.0, delta=1e-5)
    assert record["noise_multiplier"] == expected.noise_multiplier
    # ‖A·C⁻¹‖²_F = n + (1 − λ)²·n(n − 1)/2 = 18 + 0.04·153
    assert record["rmse"] == pytest.approx((24.12 / 18) ** 0.5 * expected.noise_multiplier, rel=1e-6)
    assert record["adjacency"] == "add or remove one user"


def test_a_point_trains_what_central_training_trains():
    """The engine's batches and noise, put through the other implementation of per-example gradients."""
    from fedcgd.keys import NoiseKey
    from fedcgd.opacus.batches import RoundBatches
    from fedcgd.plan import Plan

    calibration = calibrate_setup(SETUP) | {"noise_multiplier": 3.0}
    task, key = get_task("digits"), NoiseKey.simulation(0)
    data, participation = task.load(), SETUP.participation()
    plan = Plan(mechanism=LambdaCGD(0.8), participation=participation, clip_norm=1.0, noise_multiplier=3.0, delta=1e-5)
    batches = RoundBatches(participation, 1260, 9, lambda: key.choices, lambda: 0)
    seen = {}

    def watch(module, _task, examples, **_):
        seen["model"] = [p.detach().clone() for p in module.parameters()]
        return evaluate(module, task, examples)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedcgd_experiments.experiment.evaluate", watch)
        record = run_point(POINT, calibration)
        minus = train_central(
            task, data.train, replace(plan), [batches.batch(t) for t in range(18)],
            key=key.noise, learning_rate=2.0, planned_cohort=140, seed=0,
        )  # fmt: skip
        noiseless = train_central(
            task, data.train, replace(plan, noise_multiplier=1e-9), [batches.batch(t) for t in range(18)],
            key=key.noise, learning_rate=2.0, planned_cohort=140, seed=0,
        )  # fmt: skip
        run_point(POINT, calibration | {"noise_multiplier": 1e-9})
        # Central training rounds each coordinate of each gradient to a grid of step 2^-15: 18 rounds · 140 examples · 2^-15 ·
        # 2/140 is 1.1e-3 at most.
        assert all(
            torch.allclose(a, b, atol=1.1e-3) for a, b in zip(seen["model"], noiseless.parameters(), strict=True)
        )
    assert record["accuracy"] > 0.3
    assert not torch.allclose(next(iter(minus.parameters())), next(iter(noiseless.parameters())), atol=1e-2)


def test_results_are_kept_and_not_made_again(tmp_path):
    points = [replace(POINT, seed=seed) for seed in range(2)]
    path = tmp_path / "deep" / "results.jsonl"
    assert sweep(points, ResultsFile(path), one_by_one, data_dir=None, console=QUIET) == []
    first = path.read_text()
    assert [json.loads(line)["kind"] for line in first.splitlines()] == ["calibration", "run", "run"]

    def never(work, items):
        raise AssertionError(f"run again: {items}")

    assert sweep(points, ResultsFile(path), never, data_dir=None, console=QUIET) == []
    path.write_text(first + '{"kind": "run", "po')  # the sweep was killed while it wrote
    again = ResultsFile(path)
    assert len(again.records) == 3
    sweep([replace(POINT, seed=2)], again, one_by_one, data_dir=None, console=QUIET)
    assert len(ResultsFile(path).runs()) == 3
    assert to_point(ResultsFile(path).records[-1]) == replace(POINT, seed=2)


def test_the_same_point_gives_the_same_accuracy():
    calibration = calibrate_setup(SETUP)
    first, second = (run_point(POINT, calibration)["accuracy"] for _ in range(2))
    assert first == second


def test_a_failure_is_told_and_the_others_run(tmp_path):
    results = ResultsFile(tmp_path / "results.jsonl")
    points = [replace(POINT, model="none"), POINT]
    failures = sweep(points, results, one_by_one, data_dir=None, console=QUIET)
    assert len(failures) == 1
    assert "unknown model 'none'" in failures[0]
    assert list(results.runs()) == [identity(POINT)]


def record(accuracy, *, split="validation", lam=0.8, **changes):
    point = replace(POINT, setup=replace(SETUP, mechanism=f"lambda-cgd:{lam}"), split=split, **changes)
    return {"kind": "run", "point": json.loads(identity(point)), "accuracy": accuracy}


def test_tuning_takes_the_best_mean_of_validation():
    runs = [
        record(0.9, learning_rate=1.0, seed=0),
        record(0.1, learning_rate=1.0, seed=1),
        record(0.6, learning_rate=2.0, seed=0),
        record(0.6, learning_rate=2.0, seed=1),
        record(1.0, learning_rate=3.0, seed=0, split="test"),
    ]
    chosen = tuned(runs)
    assert {point.learning_rate for point in chosen} == {2.0}
    assert {point.split for point in chosen} == {"test"}
    assert [point.seed for point in chosen] == [0, 1]
    assert [(point.seed, point.learning_rate) for point in tuned(runs, range(3))] == [(0, 2.0), (1, 2.0), (2, 2.0)]


def test_of_equal_learning_rates_the_smaller_one_is_taken():
    assert tuned([record(0.5, learning_rate=4.0), record(0.5, learning_rate=1.0)])[0].learning_rate == 1.0


def test_lambda_is_chosen_by_validation_not_by_test():
    runs = [
        record(0.7, lam=0.5),
        record(0.8, lam=0.9),
        record(0.99, lam=0.5, split="test"),
        record(0.1, lam=0.9, split="test"),
    ]
    assert [setup.lam for setup in best_lambda(runs)] == [0.9]


def test_a_setup_knows_its_mechanism_by_its_spelling() -> None:
    rest = {"epsilon": 1.0, "delta": 1e-5, "steps": 4, "epochs": 2}
    setup = Setup(mechanism="lambda-cgd:0.5:normalized", **rest)
    assert (setup.name, setup.lam, setup.family) == ("lambda-cgd", 0.5, "lambda-cgd:normalized")
    setup = Setup(mechanism="bisr:16", **rest)
    assert (setup.name, setup.lam, setup.family) == ("bisr", 0.0, "bisr:16")
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
    assert sweep([POINT], files[1], one_by_one, data_dir=None, console=QUIET) == []
    assert [file.records[-1]["accuracy"] for file in files] == [files[0].records[-1]["accuracy"]] * 2


def test_the_command_tunes_tests_and_plots(tmp_path, monkeypatch):
    monkeypatch.setattr("fedcgd_experiments.__main__.on_ray", lambda address, *, cpus, gpus: one_by_one)
    output = tmp_path / "sweep.jsonl"
    command = ["sweep", "--output", str(output), "--batch", "140", "--epochs", "1", "--seeds", "2"]
    command += ["--mechanism", "dp-sgd", "--mechanism", "lambda-cgd:0.5", "--mechanism", "lambda-cgd:0.9"]
    command += ["--epsilon", "4", "--epsilon", "8", "--learning-rate", "1", "--learning-rate", "4"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    runs = ResultsFile(output).runs()
    # DP-SGD and 2 λ, 2 budgets, 2 seeds and 2 learning rates for validation; for test DP-SGD and the better λ, at the better rate
    assert len(runs) == 3 * 2 * 2 * 2 + 2 * 2 * 2
    assert len(ResultsFile(output).calibrations()) == 6
    for words in ([], ["--format", "svg"]):
        drawn = CliRunner().invoke(app, ["plot", str(output), "--output", str(tmp_path / "plots"), *words])
        assert drawn.exit_code == 0, drawn.output
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    stems = {"digits-accuracy-lambda", "digits-accuracy-epsilon", "digits-rmse-ratios"}
    assert names == {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "svg")}


def test_the_command_says_what_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("fedcgd_experiments.__main__.on_ray", lambda address, *, cpus, gpus: one_by_one)
    command = ["sweep", "--output", str(tmp_path / "x.jsonl"), "--epsilon", "-1", "--epochs", "1"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "got -1.0" in done.output
