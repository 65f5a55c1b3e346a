"""Runs in this process release the app's models, one by one and many at once."""

from dataclasses import replace

import numpy as np
import pytest
from app_runs import released_by_the_app

from fedcgd.clipping.flat_models import flatten
from fedcgd_experiments import people, people_softmax
from fedcgd_experiments.people import PeopleTrainer, run_people
from fedcgd_experiments.people_point import PeoplePoint, prepared
from fedcgd_experiments.people_softmax import train_people
from fedcgd_simulations import client_app

pytestmark = pytest.mark.usefixtures("threads_as_they_were")

POINT = PeoplePoint(
    task="digits", users="dirichlet:0.5:60", cohort=12, participations=2, mechanism="lambda-cgd:0.8", epsilon=8.0,
    clip_norm=0.5, learning_rate=1.5, local_epochs=2, local_batch=500, local_learning_rate=0.5, proximal=0.1, seed=3,
    split="test",
)  # fmt: skip
"""In whole batches: orders of examples are drawn from the model's bits, and would differ if rounding did."""


def models_together(points: list[PeoplePoint], monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The last models of runs that are trained at once."""
    models: list[np.ndarray] = []

    def keep(model, *_, **__) -> float:
        models.append(flatten(model).numpy().copy())
        return 0.0

    monkeypatch.setattr(people_softmax, "evaluate", keep)
    train_people(points)
    return models


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


def test_runs_that_are_trained_at_once_are_those_of_the_app(monkeypatch) -> None:
    others = {"mechanism": "blt:2", "epsilon": 2.0, "learning_rate": 0.7}
    local = {"local_learning_rate": 0.2, "proximal": 1.0, "clip_norm": 0.2}
    points = [
        POINT,
        replace(POINT, **others),
        replace(POINT, momentum=0.9, schedule="linear", learning_rate=0.3),
        replace(POINT, mechanism="dp-sgd", **local),
    ]
    shared = PeopleTrainer().shared
    assert len({shared(point) for point in points}) == 1
    assert shared(POINT) != shared(replace(POINT, seed=4))
    assert shared(replace(POINT, model="tanh-cnn")) is None
    together = models_together(points, monkeypatch)
    for point, found in zip(points, together, strict=True):
        expected = model_of(point, monkeypatch)
        assert np.linalg.norm(expected) > 1
        assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)  # the smoothing of the app's noise
    assert shared(POINT) != shared(replace(POINT, sampling="balls-in-bins"))
    quiet = replace(POINT, epsilon=1e7)
    np.testing.assert_allclose(models_together([quiet], monkeypatch)[0], model_of(quiet, monkeypatch), atol=5e-4)
    small = replace(POINT, local_batch=7)  # where the order of a user's examples matters, and is another one
    apart = models_together([small], monkeypatch)[0] - model_of(small, monkeypatch)
    assert 1e-3 < np.linalg.norm(apart) < 0.1 * np.linalg.norm(together[0])


@pytest.mark.parametrize(
    ("sampling", "mechanism"),
    [("poisson", "dp-sgd"), ("balls-in-bins", "lambda-cgd:0.5"), ("b-min-sep", "lambda-cgd:0.5")],
)
def test_people_who_are_sampled_secretly_are_those_of_the_app(
    sampling: str, mechanism: str, monkeypatch, few_draws: None
) -> None:
    point = replace(POINT, sampling=sampling, mechanism=mechanism, epsilon=4.0, cohort=6, participations=1)
    public = replace(point, sampling="none")
    known, secret = (prepared(one).guarantee for one in (public, point))
    assert (secret.sampling, secret.rounds) == (sampling, 10)
    assert secret.noise_multiplier < 0.8 * known.noise_multiplier
    [found], [others], expected = (
        *(models_together([one], monkeypatch) for one in (point, public)),
        model_of(point, monkeypatch),
    )
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)
    assert np.linalg.norm(found - others) > 0.2 * np.linalg.norm(expected)


@pytest.mark.parametrize("change", [{"split": "tset"}, {"sampling": "sometimes"}, {"momentum": 1.0}])
def test_a_point_of_people_is_checked(change) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(POINT, **change)
