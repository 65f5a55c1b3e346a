"""Central trainings of the experiments: what they train is what the engine trains, and their ε is the accounting's."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from plans import make_plan
from rich.console import Console
from scipy.stats import norm

from fedcgd import NoiseKey, Plan
from fedcgd.clipping.flat_models import flatten
from fedcgd.optimisation import catalogue
from fedcgd.planning import private_mean
from fedcgd_experiments.__main__ import app
from fedcgd_experiments.central import CentralTrainer, check_steps, normalised, train_engine
from fedcgd_experiments.central_softmax import train_softmax
from fedcgd_experiments.point import CentralPoint
from fedcgd_experiments.results import Results
from fedcgd_experiments.runner import Deadline, PausedError, carry_out
from fedcgd_experiments.study import missing
from fedcgd_experiments.training import outcome, training, widened
from fedcgd_simulations.task import Data, Examples
from fedcgd_simulations.tasks import get_task

POINT = CentralPoint(
    task="digits", mechanism="lambda-cgd:0.8", epsilon=4.0, steps=9, epochs=2, learning_rate=2.0, seed=0
)


def plan_of(point: CentralPoint, noise_multiplier: float = 3.0) -> Plan:
    participation = point.setup.participation()
    return make_plan(
        catalogue.mechanism(point.mechanism, participation),
        participation,
        clip_norm=point.clip_norm,
        noise_multiplier=noise_multiplier,
    )


@pytest.mark.parametrize(
    ("mechanism", "sampling"),
    [("lambda-cgd:0.8", "none"), ("blt:2", "balls-in-bins"), ("dp-sgd", "poisson"), ("lambda-cgd:0.8", "b-min-sep")],
)
def test_softmax_is_trained_as_the_engine_trains_it(mechanism, sampling) -> None:
    """Several rates, momenta, schedules, norms and noises at once, and each as if it were alone."""
    task, key = get_task("digits"), NoiseKey.simulation(0)
    data = task.load()
    some = replace(POINT, mechanism=mechanism, sampling=sampling, learning_rate=0.5)
    points = [
        some,
        replace(some, learning_rate=0.1, momentum=0.9, schedule="cosine"),
        replace(some, clip_norm=0.3, schedule="linear", mechanism=mechanism if sampling == "poisson" else "bisr:3"),
    ]
    runs = [(plan_of(point, sigma), point.descent) for point, sigma in zip(points, (2.0, 5.0, 2.0), strict=True)]
    together = train_softmax(task.model(0), data.train, runs, key=key, steps=9)
    assert together.shape == (3, 650)
    for point, (plan, _), flat in zip(points, runs, together, strict=True):
        engine = flatten(train_engine(point, task, data.train, plan, physical_batch=512))
        assert torch.allclose(flat, engine, atol=2e-5)  # the engine rounds each example's gradient to the lattice


def test_each_of_those_trained_together_has_the_noise_of_its_own_budget() -> None:
    points, trainer = [replace(POINT, epsilon=epsilon) for epsilon in (0.1, 100.0)], CentralTrainer()
    loud, quiet = trainer.train(points)
    for point, row in zip(points, (loud, quiet), strict=True):
        (alone,) = trainer.train([point])
        assert (alone["accuracy"], alone["noise_multiplier"]) == (row["accuracy"], row["noise_multiplier"])
    assert loud["accuracy"] < 0.4 < 0.7 < quiet["accuracy"]


def test_a_calibration_that_a_row_has_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = CentralTrainer()
    (row,) = trainer.train([POINT])

    def never(setup):
        raise AssertionError(f"calibrated again: {setup}")

    monkeypatch.setattr("fedcgd_experiments.central.claim", never)
    assert trainer.train([POINT], [row])[0]["accuracy"] == row["accuracy"]
    with pytest.raises(AssertionError, match="calibrated again"):
        trainer.train([replace(POINT, epsilon=3.0)], [row])


def test_a_private_mean_and_training_cost_the_budget_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """1/σ² adds up over Gaussian mechanisms; δ by the formula of Balle and Wang (2018, arXiv:1805.06530)."""
    point = replace(POINT, mechanism="dp-sgd", epsilon=2.0, normalise=0.3)
    means = []

    def spied(*args: Any, **given: Any) -> Any:
        means.append(private_mean(*args, **given))
        return means[-1]

    monkeypatch.setattr("fedcgd_experiments.central.private_mean", spied)
    (row,) = CentralTrainer().train([point])
    of_mean, of_training = 1 / means[0].plan.noise_multiplier, math.sqrt(point.epochs) / row["noise_multiplier"]
    mu = math.hypot(of_mean, of_training)
    delta = norm.cdf(mu / 2 - 2 / mu) - math.exp(2) * norm.cdf(-mu / 2 - 2 / mu)
    assert 0.999e-5 < delta <= 1e-5
    assert of_mean**2 == pytest.approx(0.3 * mu**2, rel=1e-6)
    assert "0.3 of the budget" in row["method"]


def test_an_example_moves_the_mean_by_no_more_than_its_share() -> None:
    """Both have the same noise: a simulation's key has it from the seed."""
    point, data = replace(POINT, normalise=0.05), get_task("digits").load()
    other = replace(data, train=replace(data.train, inputs=data.train.inputs.clone()))
    other.train.inputs[7] *= 0  # zero out
    here, there = (normalised(each, point) for each in (data, other))
    moved = (here.test.inputs - there.test.inputs).norm(dim=1)
    assert torch.allclose(moved, torch.tensor(1 / len(data.train)), rtol=1e-3)
    assert here.train.inputs.mean(0).norm() < 0.2 < 0.9 < (here.train.inputs - there.train.inputs)[7].norm()


def test_channels_are_scaled_to_the_same_variance() -> None:
    """With next to no noise; the mean and the variance of rows of norm 1, each over the norm of what is said of it."""
    generator = torch.Generator().manual_seed(3)
    pictures = 0.3 + torch.randn(600, 3, 4, 4, generator=generator) * torch.tensor([3.0, 1.0, 0.2])[:, None, None]
    some = Examples(pictures, torch.zeros(600, dtype=torch.long))
    point = replace(POINT, normalise=0.5, epsilon=1e6)
    flat = normalised(Data(some, some, some), point).train.inputs.view(600, 3, 16)
    assert flat.mean(0).abs().max() < 0.05
    assert torch.allclose(flat.square().sum(2).mean(0), torch.ones(3), atol=0.05)
    quiet = normalised(Data(some, some, some), replace(point, epsilon=1.0, normalise=0.05)).train.inputs.view(
        600, 3, 16
    )
    assert quiet.var(0).sum(1)[2] < 0.5  # what is as small as the noise is not blown up


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "steps"}, "schedule must be one of constant, linear, cosine, got 'steps'"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"mechanism": "bisr:p=16"}, "p of bisr must be a whole number"),
        ({"mechanism": "sgd"}, "unknown mechanism"),
        ({"seed": 3, "split": "test"}, "got 3"),  # no seed both tunes and tests
        ({"seed": 1000}, "got 1000"),
        ({"split": "train"}, "split must be validation or test, got 'train'"),
        *(({"normalise": part}, "normalise") for part in (1.0, -0.1)),  # the mean needs a budget of its own
        ({"normalise": 0.1, "sampling": "poisson"}, "normalise"),
    ],
)
def test_a_point_is_checked(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(POINT, **change)
    assert replace(POINT, seed=1000, split="test").seed == 1000


@pytest.mark.parametrize("sampling", ["none", "poisson"])
def test_a_training_that_is_stopped_goes_on_from_its_last_epoch(tmp_path: Path, sampling) -> None:
    """And ends with the model of one that was not: the rounds, the noise, the rate and the momentum are where they were."""
    mechanism = "lambda-cgd:0.8" if sampling == "none" else "dp-sgd"
    point = replace(
        POINT, model="tanh-cnn", epochs=3, sampling=sampling, mechanism=mechanism, learning_rate=0.1, momentum=0.9,
        schedule="linear", average=0.9, augmentations=2,
    )  # fmt: skip
    task = replace(get_task("digits", model="tanh-cnn"), augment=lambda inputs: inputs + 0.1 * torch.randn_like(inputs))
    train, plan, file = task.load().train.take(np.arange(180)), plan_of(point), tmp_path / "deep" / "one.pt"

    def trained(**more: Any) -> torch.Tensor:
        return flatten(train_engine(point, task, train, plan, physical_batch=100, **more))

    for _ in range(2):
        with pytest.raises(PausedError, match="3 epochs"):
            trained(checkpoint=file, late=lambda: True)
    whole = trained()
    assert torch.equal(trained(checkpoint=file, late=lambda: True), whole)
    assert not file.exists()
    for other in ({"average": 0.0}, {"augmentations": 1}):  # each of them counts
        point = replace(point, **other)
        assert (trained() - whole).abs().max() > 1e-3


def test_a_study_with_a_paused_training_is_gone_on_with(tmp_path: Path) -> None:
    point = replace(POINT, model="tanh-cnn", learning_rate=1.0)
    study, results = training(point, {4.0: [0.1]}, seeds=1), Results(tmp_path / "one.jsonl")
    late = CentralTrainer(checkpoints=tmp_path / "kept", late=Deadline(0.0))
    said = iter([False, True])
    stopped = carry_out(study, results, late, console=Console(quiet=True), late=lambda: next(said))
    assert (stopped.failures, stopped.left) == ((), 1)
    assert len(list((tmp_path / "kept").iterdir())) == 1
    assert outcome(study, results.rows()) == ""
    done = carry_out(study, results, CentralTrainer(checkpoints=tmp_path / "kept"), console=Console(quiet=True))
    assert (done.failures, done.left) == ((), 0)
    [row] = results.rows()
    assert (row["split"], row["learning_rate"]) == ("test", 0.1)  # one rate: there is nothing to tune
    assert f"{100 * row['accuracy']:.1f} % of test examples (1 seeds) at ε = 4" in outcome(study, results.rows())


def test_rates_go_on_until_the_best_lies_between_others() -> None:
    """The accuracy is best at 3 for ε = 1, and at .5 for ε = 2."""
    rates: Mapping[float, Sequence[float]] = {1.0: [0.5, 1.0], 2.0: [1.0, 2.0]}
    seen = []
    for _ in range(6):
        study = training(POINT, rates, seeds=0)
        points = missing(study, {})
        assert {point.split for point in points} == {"validation"}
        best_at = {1.0: 3.0, 2.0: 0.5}
        rows = [asdict(p) | {"accuracy": 1 - abs(math.log(p.learning_rate / best_at[p.epsilon])) / 10} for p in points]
        rates = widened(study, rates, rows)
        seen.append([min(rates[2.0]), max(rates[1.0])])
    assert seen[-1] == seen[-2] == [0.25, 8.0]
    assert rates == {1.0: [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0], 2.0: [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]}


def test_one_training_is_one_command_and_its_rates_surround_what_theory_expects(tmp_path: Path) -> None:
    words = ["train", "digits", "softmax", "lambda-cgd:0.9", "--epsilon", "8", "--epsilon", "2", "--epochs", "4",
             "--steps", "7", "--seeds", "2", "--results", str(tmp_path)]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert re.search(r"8\d\.\d ± \d\.\d % of test examples \(2 seeds\) at ε = 8, learning rate", done.output)
    assert "adjacency: zero out one user; sampling: none (exact Gaussian mechanism)" in done.output
    rows = Results(tmp_path / "digits-softmax.jsonl").rows()
    for epsilon in (2.0, 8.0):
        mine = [row for row in rows if row["epsilon"] == epsilon]
        tried = sorted(row["learning_rate"] for row in mine if row["split"] == "validation")
        assert len(tried) >= 3
        assert tried == pytest.approx([tried[0] * 2**place for place in range(len(tried))], rel=0.02)
        best = max((row for row in mine if row["split"] == "validation"), key=lambda row: row["accuracy"])
        assert tried[0] < best["learning_rate"] < tried[-1]
        assert {row["learning_rate"] for row in mine if row["split"] == "test"} == {best["learning_rate"]}
        assert sum(row["split"] == "test" for row in mine) == 2
    again = CliRunner().invoke(app, words)
    assert again.output.splitlines()[-4:] == done.output.splitlines()[-4:]
    assert len(Results(tmp_path / "digits-softmax.jsonl").rows()) == len(rows)


def test_what_is_trained_together_must_have_the_same_batches() -> None:
    task, trainer = get_task("digits"), CentralTrainer()
    other = replace(POINT, steps=3)
    runs = [(plan_of(POINT), POINT.descent), (plan_of(other), other.descent)]
    with pytest.raises(ValueError, match="same participation"):
        train_softmax(task.model(0), task.load().train, runs, key=NoiseKey.simulation(0), steps=9)
    with pytest.raises(ValueError, match="secret key"):  # they share their noise
        train_softmax(task.model(0), task.load().train, runs[:1], key=NoiseKey(bytes(32)), steps=9)
    with pytest.raises(ValueError, match="same batches"):
        trainer.train([POINT, replace(POINT, seed=1)])
    grouped = trainer.groups([POINT, other, replace(POINT, momentum=0.5), replace(POINT, seed=1)])
    assert sorted(len(group) for group in grouped) == [1, 1, 2]
    network = replace(POINT, model="tanh-cnn")
    assert len(trainer.groups([network, replace(network, momentum=0.5)])) == 2


def test_steps_that_no_batch_makes_are_refused() -> None:
    check_steps(1260, 21)
    with pytest.raises(ValueError, match="5 steps"):
        check_steps(10, 6)


def test_the_rounds_of_a_sampling_are_those_of_the_mechanism_and_the_epochs() -> None:
    cyclic = replace(POINT, mechanism="band-mf:2", sampling="cyclic-poisson", steps=4)
    assert cyclic.setup.participation().min_separation == 2
    assert cyclic.batches != replace(cyclic, mechanism="band-mf:4").batches
    drawn = replace(POINT, sampling="b-min-sep", steps=9).setup.participation()
    assert drawn.expected_rate == pytest.approx(1 / 9)  # once an epoch
    assert (drawn.min_separation, drawn.rounds) == (6, 9 * POINT.epochs)
