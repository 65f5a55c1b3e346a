"""The app, with the settings that the command `flower` prints, releases the models of the central run that they stand for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from app_runs import released_by_the_app

from fedcgd.clipping.flat_models import flatten
from fedcgd_experiments import central as central_runs
from fedcgd_experiments.central import CentralTrainer
from fedcgd_experiments.flower_command import run_config
from fedcgd_experiments.point import CentralPoint
from fedcgd_simulations.tasks import get_task

pytestmark = pytest.mark.usefixtures("threads_as_they_were")

POINT = CentralPoint(
    task="digits", mechanism="lambda-cgd:0.8", epsilon=1.0, steps=21, epochs=1, clip_norm=0.5, learning_rate=1.5, seed=1000,
    split="test",
)  # fmt: skip

ROUNDING = 2e-3
"""Of the way that the model went: a federated user rounds its update towards zero on the grid, central training each sum."""


def apart(there: np.ndarray, here: np.ndarray, start: np.ndarray) -> float:
    """How far two models are apart, as a part of the way from the first one."""
    return float(np.linalg.norm(there - here) / np.linalg.norm(here - start))


def federated(config: dict, folder: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The last model of the app under `config`."""
    released, _ = released_by_the_app(config, folder, monkeypatch)
    return released[-1]


def central(point: CentralPoint, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The model at the end of the central run."""
    trained: list[np.ndarray] = []

    def keep(model, *_, **__) -> float:
        trained.append(flatten(model).numpy())
        return 0.0

    monkeypatch.setattr(central_runs, "evaluate", keep)
    CentralTrainer().train([point])
    return trained[0]


def test_the_same_models_with_momentum_and_a_schedule(tmp_path, monkeypatch) -> None:
    point = replace(POINT, momentum=0.9, schedule="cosine", learning_rate=0.3)
    there, here = federated(run_config(point, users=1260), tmp_path, monkeypatch), central(point, monkeypatch)
    start = flatten(get_task("digits").model(1000)).numpy()
    assert apart(there, here, start) < ROUNDING
    assert apart(there, central(replace(point, momentum=0.0), monkeypatch), start) > 20 * ROUNDING
    assert apart(there, central(replace(point, schedule="linear"), monkeypatch), start) > 20 * ROUNDING
