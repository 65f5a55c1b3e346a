"""Every model of every task trains federated, by the app as it stands: its trained parameters move as in a plain loop."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from app_runs import released_by_the_app
from oracles_gradients import clipped_sum
from small_models import USERS, every_model, inputs, small_transformers, tiny

from fedcgd.clipping.flat_models import flatten
from fedcgd_simulations import client_app, server_app
from fedcgd_simulations.models.weights import RandomWeightsWarning
from fedcgd_simulations.task import Data, Examples


@every_model
@pytest.mark.filterwarnings(f"ignore::{RandomWeightsWarning.__module__}.{RandomWeightsWarning.__name__}")
def test_two_rounds(task: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_transformers(monkeypatch)
    examples = Examples(inputs(task, model), torch.tensor([0, 1, 1, 0]))
    made = partial(tiny, data=Data(examples, examples, examples))
    for module in (server_app, client_app):
        monkeypatch.setattr(module, "get_task", made)
    client_app._material.cache_clear()
    config = {"task": task, "model": model, "cohort": USERS, "rounds": 2, "learning-rate": 1.0, "epsilon": 1e9}
    released, figures = released_by_the_app(config | {"clip-norm": 0.5}, tmp_path, monkeypatch)
    assert figures["releases"] == 2

    reference = made(task, model=model)
    first_model = reference.model(0)
    total = clipped_sum(first_model, zip(examples.inputs, examples.targets, strict=True), 0.5, reference.loss)
    start, step = flatten(first_model).numpy(), -total.numpy() / USERS
    assert [model.shape for model in released] == [start.shape] * 3
    first = released[1]
    assert np.linalg.norm(step) > 0
    np.testing.assert_allclose(first - start, step, atol=2e-4 + 1e-3 * np.abs(step).max())
