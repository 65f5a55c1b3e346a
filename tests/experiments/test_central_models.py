"""Every model of every task trains centrally, with hooks and with ghost clipping: two rounds, as in a plain loop."""

import numpy as np
import pytest
import torch
from oracles_gradients import clipped_sum
from plans import make_plan
from small_models import every_model, inputs, small_transformers, tiny

from fedcgd.clipping.flat_models import flatten
from fedcgd.mechanisms import LambdaCGD
from fedcgd_experiments.central import train_engine
from fedcgd_experiments.point import CentralPoint
from fedcgd_simulations.models.weights import RandomWeightsWarning
from fedcgd_simulations.task import Data, Examples

RATE, CLIP_NORM = 0.5, 0.5


def plain_loop(task, examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    """(the first model, the model after two steps of gradients that are made, and clipped, one by one)."""
    model = task.model(0)
    trained = [p for p in model.parameters() if p.requires_grad]
    start = flatten(model).numpy().copy()
    for _ in range(2):
        total = clipped_sum(model, zip(examples.inputs, examples.targets, strict=True), CLIP_NORM, task.loss)
        with torch.no_grad():
            for p, step in zip(trained, torch.split(total, [p.numel() for p in trained]), strict=True):
                p -= (RATE / len(examples) * step).view_as(p)
    return start, flatten(model).numpy()


@every_model
@pytest.mark.filterwarnings(f"ignore::{RandomWeightsWarning.__module__}.{RandomWeightsWarning.__name__}")
def test_two_rounds(task: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_transformers(monkeypatch)
    examples = Examples(inputs(task, model), torch.tensor([0, 1, 1, 0]))
    made = tiny(task, Data(examples, examples, examples), model=model)
    point = CentralPoint(
        task=task, model=model, mechanism="lambda-cgd:0.5", epsilon=1.0, steps=1, epochs=2, clip_norm=CLIP_NORM,
        learning_rate=RATE, seed=0,
    )  # fmt: skip
    plan = make_plan(LambdaCGD(0.5), point.setup.participation(), clip_norm=CLIP_NORM, noise_multiplier=1e-9)
    private = train_engine(point, made, examples, plan, physical_batch=3)
    start, expected = plain_loop(made, examples)
    assert np.linalg.norm(expected - start) > 1e-3
    np.testing.assert_allclose(flatten(private).numpy(), expected, atol=1e-5 + 1e-3 * np.abs(expected - start).max())
