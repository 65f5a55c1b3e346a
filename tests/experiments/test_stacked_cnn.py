"""Copies of a network that are trained side by side are those that autograd trains alone, one example after the other."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedcgd_experiments import stacked_cnn
from fedcgd_experiments.batched_descent import Rounds, participants
from fedcgd_experiments.stacked_cnn import Copy, Trainable
from fedcgd_simulations.task import seeded

CLIP_NORM = 0.6
USERS = 12


def network() -> nn.Sequential:
    """All kinds of layers; its weights are random, those of GroupNorm too."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.Tanh(),
        nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.GroupNorm(3, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def data() -> Trainable:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn((USERS, 2, 6, 8), generator=generator)
    labels = torch.randint(0, 3, (USERS,), generator=generator)
    return Trainable(pictures, labels, lambda seed: seeded(seed, network), CLIP_NORM)


def alone(copy: Copy) -> Tensor:
    """The parameters of one copy, in plain loops."""
    given = data()
    model = given.network(copy.seed)
    parameters = list(model.parameters())
    generator, drawn = torch.Generator().manual_seed(copy.seed), list[Tensor]()
    for t, rows in enumerate(participants(USERS, copy.when, copy.seed)):
        flat = nn.utils.parameters_to_vector(parameters).detach()
        drawn.append(torch.randn(len(flat), generator=generator))
        total = sum(tap * drawn[t - k] for k, tap in enumerate(copy.taps) if k <= t) + torch.zeros(len(flat))
        for row in rows:
            loss = cross_entropy(model(given.inputs[row][None]), given.labels[row][None])
            slope = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])
            total += slope * min(1.0, CLIP_NORM / float(slope.norm()))
        nn.utils.vector_to_parameters(flat - copy.rates[t] * copy.when.steps / USERS * total, parameters)
    return nn.utils.parameters_to_vector(parameters).detach()


@pytest.mark.parametrize("at_once", [3072, 7])
def test_each_copy_is_the_one_that_is_trained_alone(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked_cnn, "_AT_ONCE", at_once)  # so that a round's sum has several parts
    samplings = ["none", "poisson", "balls-in-bins"]
    copies = [
        Copy(Rounds(4, 3, sampling), taps, (0.5, 0.4, 0.3, 0.2), seed)
        for sampling, taps, seed in zip(
            samplings * 2, ((0.1, -0.09), (0.3,), (0.2, -0.1, 0.05)) * 2, (5, 5, 5, 6, 6, 6), strict=True
        )
    ]
    over: list[int] = []
    found = stacked_cnn.trained(data(), copies, over.append)
    assert over == [1, 2, 3, 4]
    for mine, copy in zip(found, copies, strict=True):
        assert mine.numpy() == pytest.approx(alone(copy).numpy(), abs=2e-5)


def test_gradients_of_few_digits_are_not_longer_than_the_clip_norm() -> None:
    given = data()
    few = Trainable(given.inputs, given.labels, given.network, 1e-3, torch.bfloat16)
    model = given.network(1)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()[None]
    for row in range(USERS):
        total = stacked_cnn.clipped_sums(model, weights, few, torch.tensor([[row]]), torch.ones(1, 1))
        assert 0.9e-3 < float(total.norm()) <= 1e-3
