"""Users who train at once train as they do one by one; FedProx keeps them near the model they were sent."""

import numpy as np
import pytest
import torch
from local_training_work import CONTEXT, EXAMPLES, MODELS, PARTS, work_of
from torch import nn

from fedcgd_flower import LocalTask, arrays_of, sequential_training
from fedcgd_simulations.local_training import LocalTraining, train_many, train_one, vectorises
from fedcgd_simulations.models.lstm import lstm
from fedcgd_simulations.task import Examples, classification, seeded


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("proximal", [0.0, 0.7])
def test_together_as_one_by_one(name: str, proximal: float) -> None:
    task = classification(name, lambda: None, MODELS[name])
    work = work_of(seeded(2, MODELS[name]), clip_norm=0.5)
    local = LocalTraining(epochs=2, batch=5, learning_rate=0.1, proximal=proximal)

    def alone(model, user, config, context):
        return train_one(task, model, EXAMPLES.take(PARTS[user]), local)

    expected, counted = sequential_training(alone)(work, CONTEXT)
    found, answered = train_many(task, work, EXAMPLES, PARTS.__getitem__, local)
    assert counted == answered == 5
    step = work.clipping.grid.step
    assert np.linalg.norm(expected * step) > 0.2
    np.testing.assert_allclose(found * step, expected * step, atol=2e-5)


def test_a_user_without_finite_training_adds_nothing() -> None:
    inputs = EXAMPLES.inputs.clone()
    inputs[0] = torch.nan
    task = classification("softmax", lambda: None, MODELS["softmax"])
    work = work_of(MODELS["softmax"](), clip_norm=0.5)
    local = LocalTraining(epochs=1, batch=5, learning_rate=0.1)
    total, answered = train_many(task, work, Examples(inputs, EXAMPLES.targets), PARTS.__getitem__, local)
    others, _ = train_many(
        task, LocalTask(**vars(work) | {"users": ("1", "2", "3", "4")}), EXAMPLES, PARTS.__getitem__, local
    )
    assert answered == 4
    np.testing.assert_array_equal(total, others)


def test_fedprox_is_gradient_descent_on_the_loss_and_the_distance() -> None:
    task = classification("softmax", lambda: None, MODELS["softmax"])
    start = MODELS["softmax"]()
    mine = EXAMPLES.take(PARTS["2"])
    local = LocalTraining(epochs=3, batch=100, learning_rate=0.2, proximal=1.5)
    found = train_one(task, arrays_of(start), mine, local)
    model = MODELS["softmax"]()
    for _ in range(3):
        distance = sum(
            ((p - s.detach()) ** 2).sum() for p, s in zip(model.parameters(), start.parameters(), strict=True)
        )
        loss = task.loss(model(mine.inputs), mine.targets).mean() + 1.5 / 2 * distance
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.data -= 0.2 * g
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(found[name].numpy(), parameter.detach().numpy(), atol=1e-6)


def test_what_cannot_be_vectorised_is_known() -> None:
    assert all(vectorises(make()) for make in MODELS.values())
    assert not vectorises(lstm(50, classes=2, embedding=4, hidden=4))
    assert not vectorises(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    assert not vectorises(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


@pytest.mark.parametrize("wrong", [{"epochs": -1}, {"batch": 0}, {"learning_rate": 0.0}, {"proximal": -0.1}])
def test_numbers_that_make_no_sense_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=r"at least"):
        LocalTraining(**{"epochs": 1, "batch": 1, "learning_rate": 0.1} | wrong)
