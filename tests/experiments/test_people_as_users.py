"""A user of the simulation may be a person with many examples and local epochs; the app and the runner train the same models."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from app_runs import DEFAULTS, released_by_the_app

from fedcgd.clipping.flat_models import flatten
from fedcgd_experiments import people
from fedcgd_experiments.people import run_people
from fedcgd_experiments.people_point import PeoplePoint
from fedcgd_simulations import client_app
from fedcgd_simulations.partitions import partition
from fedcgd_simulations.settings import Settings
from fedcgd_simulations.task import Examples

EXAMPLES = Examples(torch.zeros(24, 64), torch.arange(24) % 10)


@pytest.fixture(autouse=True)
def _fresh_caches(threads_as_they_were):
    """What a node keeps between rounds belongs to the data of one test."""
    for cache in (client_app._material, client_app._parts):
        cache.cache_clear()


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
