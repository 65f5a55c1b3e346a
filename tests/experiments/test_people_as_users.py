"""A user of the simulation may be a person with many examples and local epochs; the released model moves as in a plain loop."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from app_runs import DEFAULTS, released_by_the_app

from fedcgd.clipping.flat_models import flatten
from fedcgd_experiments import people
from fedcgd_experiments.people import run_people
from fedcgd_experiments.people_point import PeoplePoint
from fedcgd_simulations import client_app, server_app
from fedcgd_simulations.partitions import partition
from fedcgd_simulations.settings import Settings
from fedcgd_simulations.task import Data, Examples
from fedcgd_simulations.tasks import get_task

GENERATOR = torch.Generator().manual_seed(0)
EXAMPLES = Examples(
    torch.randn(24, 64, generator=GENERATOR),
    torch.arange(24) % 10,
    np.array([f"person {i % 5}" for i in range(24)]),
)
CLIP = 0.3


@pytest.fixture(autouse=True)
def _fresh_caches(threads_as_they_were):
    """What a node keeps between rounds belongs to the data of one test."""
    for cache in (client_app._material, client_app._parts):
        cache.cache_clear()
    yield
    for cache in (client_app._material, client_app._parts):
        cache.cache_clear()


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings) -> list[np.ndarray]:
    """The released models of a run with practically no noise, the initial one first."""
    made = get_task("digits")
    task = type(made)(made.name, lambda: Data(EXAMPLES, EXAMPLES, EXAMPLES), made.model, made.loss, made.metric)
    for module in (server_app, client_app):
        monkeypatch.setattr(module, "get_task", lambda name, **_: task)
    settings = {"rounds": 1, "learning-rate": 1.0, "epsilon": 1e9, "clip-norm": CLIP} | settings
    released, figures = released_by_the_app(settings, tmp_path, monkeypatch)
    assert figures["users"] == settings["cohort"]
    return released


def plain_step(parts: list[np.ndarray], epochs: int, rate: float) -> np.ndarray:
    """The mean of the users' clipped changes, each by whole-batch gradient descent on the user's own examples."""
    task = get_task("digits")
    total = 0.0
    for part in parts:
        model, mine = task.model(0), EXAMPLES.take(part)
        start = flatten(model).double().numpy()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(epochs):
            optimizer.zero_grad()
            task.loss(model(mine.inputs), mine.targets).mean().backward()
            optimizer.step()
        change = flatten(model).double().numpy() - start
        total = total + change * min(1.0, CLIP / np.linalg.norm(change))
    return total / len(parts)


@pytest.mark.parametrize(("users", "count"), [("iid:6", 6), ("dirichlet:0.5:4", 4), ("natural", 5)])
def test_a_round_is_the_mean_of_the_clipped_changes_of_people(users, count, tmp_path, monkeypatch) -> None:
    released = run(
        tmp_path, monkeypatch, users=users, cohort=count, participations=1,
        **{"local-epochs": 3, "local-batch": 100, "local-learning-rate": 0.5},
    )  # fmt: skip
    parts = partition(users, EXAMPLES, seed=0)
    assert sorted(np.concatenate(parts)) == list(range(24))
    step = plain_step(parts, epochs=3, rate=0.5)
    assert np.linalg.norm(step) > 0.05
    np.testing.assert_allclose(released[1] - released[0], step, atol=2e-4)


def test_people_say_how_often_they_go_through_their_examples() -> None:
    with pytest.raises(ValueError, match="local-epochs"):
        Settings.read(DEFAULTS | {"users": "iid:6"})


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("people", "users must be"),
        ("iid:many", "iid:many"),
        ("iid:1000", "24 examples"),
        ("dirichlet:4", "users must be"),
    ],
)
def test_partitions_that_do_not_exist_are_refused(form, message) -> None:
    with pytest.raises(ValueError, match=message):
        partition(form, EXAMPLES, seed=0)


POINT = PeoplePoint(
    task="digits", users="dirichlet:0.5:60", cohort=12, participations=2, mechanism="lambda-cgd:0.8", epsilon=8.0,
    clip_norm=0.5, learning_rate=1.5, local_epochs=2, local_batch=500, local_learning_rate=0.5, proximal=0.1, seed=3,
    split="test",
)  # fmt: skip
"""In whole batches: orders of examples are drawn from the model's bits, and would differ if rounding did."""


def model_of(point: PeoplePoint, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The last model of a run in this process."""
    models: list[np.ndarray] = []
    monkeypatch.setattr(people, "evaluate", lambda model, *_: models.append(flatten(model).numpy()) or 0.0)
    run_people(point)
    return models[0]


def test_the_models_of_the_app(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(client_app, "vectorises", lambda model: False)  # user by user, each apart, on two nodes
    released, figures = released_by_the_app(POINT.run_config, tmp_path, monkeypatch)
    monkeypatch.undo()
    record = run_people(POINT)
    assert record["rounds"] == figures["releases"] == 10
    assert record["noise_multiplier"] == figures["noise_multiplier"]
    assert record["accuracy"] == pytest.approx(figures["accuracy"][-1], abs=0.006)  # two of 357 examples
    here = model_of(POINT, monkeypatch)
    assert np.linalg.norm(here - released[0]) > 1
    np.testing.assert_allclose(here, released[-1], atol=1e-4)
    monkeypatch.undo()
    other = model_of(replace(POINT, seed=4), monkeypatch)
    assert np.abs(other - released[-1]).max() > 0.1


@pytest.mark.parametrize("change", [{"split": "tset"}, {"sampling": "sometimes"}, {"momentum": 1.0}])
def test_a_point_of_people_is_checked(change) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(POINT, **change)
