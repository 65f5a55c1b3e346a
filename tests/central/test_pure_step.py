"""The pure step is what its definition says: clipped gradients of single examples, their sum, the noise of C⁻¹Z, the mean."""

import copy

import numpy as np
import pytest
import torch
from oracles_gradients import clipped_sum
from plans import make_plan
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from fedcgd import DPSGD, BandedToeplitz, LambdaCGD, NoiseKey, Participation
from fedcgd.central import PrivateGradient
from fedcgd.noise import NoiseStream

ROUNDS = 6


class Noted(Dataset):
    """Examples, and which of them were read."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets, self.read = inputs, targets, []

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, i):
        self.read.append(i)
        return self.inputs[i], int(self.targets[i])

    def take(self):
        read, self.read = self.read, []
        return read


def data():
    generator = torch.Generator().manual_seed(0)
    return Noted(torch.randn(24, 5, generator=generator), torch.randint(0, 3, (24,), generator=generator))


def plan(sigma=0.7, mechanism=None, clip_norm=0.3, **participation):
    participation = participation or {"min_separation": 3}
    participation = Participation(rounds=ROUNDS, **participation)
    return make_plan(
        mechanism or LambdaCGD(0.5), participation, clip_norm=clip_norm, noise_multiplier=sigma, delta=1e-3
    )


def words():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def stepped(step, model, examples, clip_norm=0.3):
    """(what a step fills in, the sum of the clipped gradients of the examples that it reads, how many these are)"""
    examples.take()
    step()
    rows = [(examples.inputs[i], examples.targets[i]) for i in examples.take()]
    return filled(model), clipped_sum(copy.deepcopy(model), rows, clip_norm).numpy(), len(rows)


def noise(key, matrix, size):
    """The last row of C⁻¹Z, with the dither of its rounding, from C itself and the definition of Z, whose nonces are 0."""
    stream, t = NoiseStream(key.noise_of("")), len(matrix) - 1
    z = np.stack([stream.normal(round, 0, 0, size).astype(float) for round in range(t + 1)])
    return (np.linalg.inv(matrix) @ z)[t] + stream.derive("smoothing").words(t, 0, 0, size) * 2.0**-8 * 2.0**-31


def lambda_matrix(lam, n=ROUNDS):
    return np.array([[lam ** (i - j) if i >= j else 0.0 for j in range(n)] for i in range(n)])


def filled(model):
    return np.concatenate([p.grad.double().numpy().ravel() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("mechanism", ["lambda", "independent", "banded"])
def test_a_run_is_what_its_definition_says(mechanism):
    value, matrix = {
        "lambda": (LambdaCGD(0.5), lambda_matrix(0.5)),
        "independent": (DPSGD(), np.eye(ROUNDS)),
        "banded": (BandedToeplitz((1.0, 0.5)), np.eye(ROUNDS) + 0.5 * np.eye(ROUNDS, k=-1)),
    }[mechanism]
    model, examples, key = words(), data(), NoiseKey.simulation(3)
    step = PrivateGradient(model, cross_entropy, examples, plan(mechanism=value), key=key, micro_batch=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for t in range(ROUNDS):
        before = [p.detach().clone() for p in model.parameters()]
        found, expected, _ = stepped(step, model, examples)
        expected += 0.3 * 0.7 * noise(key, matrix[: t + 1, : t + 1], len(expected))
        np.testing.assert_allclose(found * 8, expected, atol=2e-5)
        assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
        optimizer.step()
    assert step.round == ROUNDS
    with pytest.raises(RuntimeError, match="6 rounds"):
        step()


def test_without_noise_the_gradient_is_exactly_the_clipped_mean():
    """Also with a clip norm far above the gradients, where a lattice of its size would leave nothing of them."""
    for clip_norm in (0.3, 1e9, 1e20):
        model, examples = words(), data()
        with pytest.warns(UserWarning, match="NO NOISE"):
            step = PrivateGradient(
                model, cross_entropy, examples, plan(0.0, clip_norm=clip_norm), key=NoiseKey.simulation(1)
            )
        found, expected, _ = stepped(step, model, examples, clip_norm)
        np.testing.assert_allclose(found, expected / 8, rtol=1e-5, atol=1e-8)


def test_frozen_parameters_stay_and_are_not_in_the_norm():
    model, examples = words(), data()
    model[0].weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="NO NOISE"):
        step = PrivateGradient(model, cross_entropy, examples, plan(0.0), key=NoiseKey.simulation(1))
    found, expected, _ = stepped(step, model, examples)
    assert model[0].weight.grad is None
    np.testing.assert_allclose(found, expected / 8, rtol=1e-5, atol=1e-8)
    model[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="another PrivateGradient"):
        step()


def test_the_divisor_is_the_planned_size_whatever_the_batch():
    poisson = {"sampling": "poisson", "sampling_rate": 0.25}
    model, examples = words(), data()
    with pytest.warns(UserWarning, match="NO NOISE"):
        step = PrivateGradient(
            model, cross_entropy, examples, plan(0.0, DPSGD(), **poisson), key=NoiseKey.simulation(5)
        )
    sizes = set()
    for _ in range(ROUNDS):
        found, expected, size = stepped(step, model, examples)
        sizes.add(size)
        np.testing.assert_allclose(found, expected / 6, rtol=1e-5, atol=1e-8)
    assert len(sizes) > 2


def test_an_empty_batch_releases_noise_alone():
    rare = {"sampling": "poisson", "sampling_rate": 1e-9}
    model, key = words(), NoiseKey.simulation(5)
    PrivateGradient(model, cross_entropy, data(), plan(0.7, DPSGD(), **rare), key=key)()
    expected = 0.3 * 0.7 * noise(key, np.eye(1), 39) / (24 * 1e-9)
    np.testing.assert_allclose(filled(model), expected, rtol=1e-5, atol=1e3)
