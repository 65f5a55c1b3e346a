"""Every model of every task trains, in the app as it stands and centrally with hooks or ghost clipping: as in a plain loop."""

from pathlib import Path

import numpy as np
import pytest
import torch
from app_runs import released_by_the_app
from oracles_gradients import clipped_sum
from plans import make_plan
from small_models import USERS, every_model, inputs, small_transformers, tiny

from fedcgd.clipping.flat_models import flatten
from fedcgd.mechanisms import LambdaCGD
from fedcgd_experiments.central import train_engine
from fedcgd_experiments.point import CentralPoint
from fedcgd_simulations import client_app, server_app
from fedcgd_simulations.models.weights import RandomWeightsWarning
from fedcgd_simulations.task import Data, Examples, Task

RATE, CLIP_NORM, MOMENTUM = 0.5, 0.5, 0.9

pytestmark = pytest.mark.filterwarnings(f"ignore::{RandomWeightsWarning.__module__}.{RandomWeightsWarning.__name__}")


def made(name: str, *, model: str, data_dir: object = None) -> Task:
    """The task `name` with four examples, of its shape, as all its data."""
    examples = Examples(inputs(name, model), torch.tensor([0, 1, 1, 0]))
    return tiny(name, Data(examples, examples, examples), model=model)


def plain_loop(task: Task) -> tuple[np.ndarray, np.ndarray]:
    """(the first model, the last after two steps of gradients that are made, and clipped, one by one; the rate falls)."""
    model, examples = task.model(0), task.load().train
    trained = [p for p in model.parameters() if p.requires_grad]
    start, velocity = flatten(model).numpy().copy(), torch.tensor(0.0)
    for rate in (RATE, RATE / 2):
        total = clipped_sum(model, zip(examples.inputs, examples.targets, strict=True), CLIP_NORM, task.loss)
        velocity = MOMENTUM * velocity + total / USERS
        with torch.no_grad():
            for p, step in zip(trained, torch.split(velocity, [p.numel() for p in trained]), strict=True):
                p -= (rate * step).view_as(p)
    return start, flatten(model).numpy()


@every_model
def test_two_rounds_of_the_app(task: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_transformers(monkeypatch)
    for module in (server_app, client_app):
        monkeypatch.setattr(module, "get_task", made)
    client_app._material.cache_clear()
    config = {"task": task, "model": model, "cohort": USERS, "rounds": 2, "learning-rate": RATE, "epsilon": 1e9}
    config |= {"clip-norm": CLIP_NORM, "momentum": MOMENTUM, "schedule": "linear"}
    released, figures = released_by_the_app(config, tmp_path, monkeypatch)
    start, expected = plain_loop(made(task, model=model))
    assert (figures["releases"], [model.shape for model in released]) == (2, [start.shape] * 3)
    assert np.linalg.norm(expected - start) > 0
    np.testing.assert_allclose(released[2], expected, atol=2e-4 + 1e-3 * np.abs(expected - start).max())


@every_model
def test_two_central_rounds(task: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_transformers(monkeypatch)
    some = made(task, model=model)
    point = CentralPoint(
        task=task, model=model, mechanism="lambda-cgd:0.5", epsilon=1.0, steps=1, epochs=2, clip_norm=CLIP_NORM,
        learning_rate=RATE, momentum=MOMENTUM, schedule="linear", seed=0,
    )  # fmt: skip
    plan = make_plan(LambdaCGD(0.5), point.setup.participation(), clip_norm=CLIP_NORM, noise_multiplier=1e-9)
    private = train_engine(point, some, some.load().train, plan, physical_batch=3)
    start, expected = plain_loop(some)
    assert np.linalg.norm(expected - start) > 1e-3
    np.testing.assert_allclose(flatten(private).numpy(), expected, atol=1e-5 + 1e-3 * np.abs(expected - start).max())
