"""The simulation's server: what it leaves behind says whether the run is done."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from app_runs import DEFAULTS
from fake_grid import FakeGrid, FakeNode
from flwr.app import Context, RecordDict

from fedcgd.clipping.flat_models import flatten
from fedcgd_flower import IncompleteRunError
from fedcgd_flower.cohort import CohortSelector
from fedcgd_simulations import client_app as client_module
from fedcgd_simulations import server_app
from fedcgd_simulations.client_app import app as client_app
from fedcgd_simulations.task import Examples
from fedcgd_simulations.tasks import get_task


def run(results: Path, nodes: int = 2, **changes) -> FakeGrid:
    config = DEFAULTS | {"rounds": 2, "results": str(results)} | changes
    hosts = {i + 1: FakeNode(client_app, {"silo": i, "silos": 2}) for i in range(nodes)}
    grid = FakeGrid(hosts, config)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    server_app.main(grid, context)
    return grid


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    real = server_app.CorrelatedNoise
    monkeypatch.setattr(server_app, "CorrelatedNoise", lambda *a, **k: real(*a, **k, patience=0.0))


def test_a_run_that_releases_nothing_leaves_no_accuracy(tmp_path: Path) -> None:
    """Half of the users are there: it used to write 0 of 42 rounds with the accuracy of the initial model."""
    results = tmp_path / "run.json"
    results.write_text("of another run")
    with pytest.raises(ValueError, match=r"630.*1260"):
        run(results, nodes=1)
    assert not results.exists()
    left = json.loads((tmp_path / "run.failed.json").read_text())
    assert "630 users" in left["failure"]
    assert "accuracy" not in left


def test_fewer_releases_than_planned_are_a_failure_and_the_resumed_run_has_all_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"ledger": str(tmp_path / "run.db"), "rounds": 4}
    with monkeypatch.context() as patched:
        releases = iter(range(100))
        real = CohortSelector.wait_for

        def stalling(self, *asked):
            return real(self, *asked) if next(releases) < 2 else "nobody is there"

        patched.setattr(CohortSelector, "wait_for", stalling)
        with pytest.raises(IncompleteRunError, match="4 rounds"):
            run(tmp_path / "run.json", **options)
    assert json.loads((tmp_path / "run.failed.json").read_text())["releases"] == 2
    assert not (tmp_path / "run.json").exists()
    run(tmp_path / "run.json", **options)
    assert {path.name for path in tmp_path.glob("run.*") if "db" not in path.name} == {"run.json", "run.png"}
    run(tmp_path / "whole.json", rounds=4)
    resumed, whole = (json.loads((tmp_path / name).read_text()) for name in ("run.json", "whole.json"))
    np.testing.assert_array_equal(resumed["accuracy"], whole["accuracy"])
    assert len(whole["accuracy"]) == 5


def test_a_private_run_with_a_sampling_wants_registered_nodes_or_a_word_that_all_are_trusted(tmp_path: Path) -> None:
    options = {"sampling": "balls-in-bins", "key-file": str(tmp_path / "key"), "rounds": 2, "cohort": 630}
    with pytest.raises(ValueError, match="not registered"):
        run(tmp_path / "run.json", **options)
    run(tmp_path / "run.json", **options, **{"trusted-nodes": True})
    assert json.loads((tmp_path / "run.json").read_text())["releases"] == 2


def test_a_slow_evaluation_is_announced_with_the_remedy(monkeypatch, caplog) -> None:
    """A vision transformer released nothing in ten minutes: it was evaluating the initial model on 10,000 examples."""
    task = get_task("digits")
    examples = Examples(torch.zeros(9000, 64), torch.zeros(9000, dtype=torch.long))
    seen = []

    def slow(model, task, examples):
        seen.append(len(examples))
        now[0] += 0.5 * len(examples)

    now = [0.0]
    monkeypatch.setattr(server_app.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(server_app, "evaluate", slow)
    logger = logging.getLogger("flwr")
    monkeypatch.setattr(logger, "propagate", True)
    server_app._warn_of_slow_evaluation(task.model(0), task, examples)
    assert seen == [4]
    assert "4500 s" in caplog.text
    assert "= 120" in caplog.text
    caplog.clear()
    server_app._warn_of_slow_evaluation(task.model(0), task, examples.take(np.arange(100)))
    assert not caplog.text


def test_the_test_examples_are_drawn_by_the_seed_and_not_the_first() -> None:
    """IMDB's negatives come first: half of its test examples measured how good a model is at negatives."""
    examples = Examples(torch.arange(1000.0)[:, None], (torch.arange(1000) >= 500).long())
    some = server_app.some_of(examples, 400, seed=1)
    assert 150 < int(some.targets.sum()) < 250
    assert len(set(some.inputs[:, 0].tolist())) == 400
    assert some.inputs[:, 0].tolist() == sorted(server_app.some_of(examples, 400, seed=1).inputs[:, 0].tolist())
    assert some.inputs[:, 0].tolist() != server_app.some_of(examples, 400, seed=2).inputs[:, 0].tolist()
    for number in (0, 1000, 10**6):
        assert len(server_app.some_of(examples, number, seed=1)) == 1000


def test_the_average_of_released_models_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After t updates it keeps min(decay, (1 + t)/(10 + t)) of itself."""
    judged: list[np.ndarray] = []

    def keep(model, *_) -> float:
        judged.append(flatten(model).numpy().copy())
        return 0.0

    monkeypatch.setattr(server_app, "evaluate", keep)
    run(tmp_path / "last.json", rounds=4)
    last, judged = judged[-5:], []  # the first judgement of a run measures how long one takes
    run(tmp_path / "mean.json", rounds=4, average=0.3)
    mean = last[0]
    for t, (model, found) in enumerate(zip(last, judged[-5:], strict=True)):
        mean = model if t == 0 else mean + (1 - min(0.3, (1 + t) / (10 + t))) * (model - mean)
        np.testing.assert_allclose(found, mean, atol=1e-6)
    assert np.abs(judged[-1] - last[-1]).max() > 0.01


def test_a_task_without_augmentation_is_refused_before_any_round(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="digits for this model have no augmentation"):
        run(tmp_path / "run.json", augmentations=2)


def test_the_mean_gradient_of_an_examples_copies_is_what_a_user_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a digit that are it and its negative, by turns: half of each gradient, made by hand."""
    made = get_task("digits")
    signs = torch.tensor([1.0, -1.0])

    def negated(inputs: torch.Tensor) -> torch.Tensor:
        return inputs * signs.repeat(len(inputs) // 2)[:, None]

    for module in (server_app, client_module):
        monkeypatch.setattr(module, "get_task", lambda name, **_: replace(made, augment=negated))
    client_module._material.cache_clear()
    models: list[np.ndarray] = []
    monkeypatch.setattr(server_app, "evaluate", lambda model, *_: models.append(flatten(model).numpy().copy()) or 0.0)
    run(tmp_path / "run.json", rounds=1, cohort=1260, epsilon=1e9, augmentations=2, **{"learning-rate": 1.0})
    client_module._material.cache_clear()
    model, train, total = made.model(0), made.load().train, torch.zeros(650)
    for picture, label in zip(train.inputs, train.targets, strict=True):
        model.zero_grad()
        made.loss(model(negated(picture.repeat(2, 1))), label.repeat(2)).mean().backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        total -= gradient / max(1.0, float(gradient.norm()))
    np.testing.assert_allclose(models[-1] - models[-2], total / 1260, atol=2e-4)
    assert total.abs().max() > 10
