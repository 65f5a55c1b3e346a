"""The pure step is what its definition says: clipped gradients of single examples, their sum, the noise of C⁻¹Z, the mean."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

from fedcgd import DPSGD, BandedToeplitz, LambdaCGD, NoiseKey, Participation, Plan
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


def data(examples=24, seed=0, shape=(5,)):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(examples, *shape, generator=generator)
    return Noted(inputs, torch.randint(0, 3, (examples,), generator=generator))


def plan(sigma=0.7, mechanism=None, clip_norm=0.3, **participation):
    participation = participation or {"min_separation": 3}
    return Plan(
        mechanism=LambdaCGD(0.5) if mechanism is None else mechanism,
        participation=Participation(rounds=ROUNDS, **participation),
        clip_norm=clip_norm, noise_multiplier=sigma, delta=1e-3,
    )  # fmt: skip


def words(model_seed=0):
    torch.manual_seed(model_seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def clipped_sum(model, rows, loss=cross_entropy, clip_norm=0.3):
    """Example by example, with autograd."""
    trained = [p for p in model.parameters() if p.requires_grad]
    total = np.zeros(sum(p.numel() for p in trained))
    for x, y in rows:
        gradients = torch.autograd.grad(
            loss(model(x[None]), torch.tensor([y])), trained, allow_unused=True, materialize_grads=True
        )
        flat = np.concatenate([g.double().numpy().ravel() for g in gradients])
        norm = math.sqrt(math.fsum(flat * flat))
        if math.isfinite(norm):
            total += flat * min(1, clip_norm / norm)
    return total


def noise(key, mechanism_rows, nonces, size, run=""):
    """(C⁻¹Z)_t, with the dither of its rounding, from C itself and the definition of Z."""
    stream, t = NoiseStream(key.noise_of(run)), len(nonces) - 1
    z = np.stack([stream.normal(round, nonce, 0, size).astype(float) for round, nonce in enumerate(nonces)])
    row = (np.linalg.inv(mechanism_rows) @ z)[t]
    return row + stream.derive("smoothing").words(t, nonces[t], 0, size) * 2.0**-8 * 2.0**-31


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
        examples.take()
        before = [p.detach().clone() for p in model.parameters()]
        step()
        rows = [(examples.inputs[i], examples.targets[i]) for i in examples.take()]
        expected = clipped_sum(model, rows)
        expected += 0.3 * 0.7 * noise(key, matrix[: t + 1, : t + 1], [0] * (t + 1), len(expected))
        np.testing.assert_allclose(filled(model) * 8, expected, atol=2e-5)
        assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
        optimizer.step()
    assert step.round == ROUNDS


def test_after_the_last_round_nothing_is_released():
    step = PrivateGradient(words(), cross_entropy, data(), plan(), key=NoiseKey.simulation(1))
    for _ in range(ROUNDS):
        step()
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
        examples.take()
        step()
        rows = [(examples.inputs[i], examples.targets[i]) for i in examples.take()]
        np.testing.assert_allclose(
            filled(model), clipped_sum(model, rows, clip_norm=clip_norm) / 8, rtol=1e-5, atol=1e-8
        )


def test_micro_batches_change_rounding_at_most():
    found = []
    for size in (1, 3, 8, None):
        model = words()
        PrivateGradient(model, cross_entropy, data(), plan(), key=NoiseKey.simulation(1), micro_batch=size)()
        found.append(filled(model))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-5)


def test_a_tensor_data_set_is_read_as_any_other():
    found = []
    for examples in (data(), TensorDataset(data().inputs, data().targets)):
        model = words()
        PrivateGradient(model, cross_entropy, examples, plan(), key=NoiseKey.simulation(1))()
        found.append(filled(model))
    np.testing.assert_array_equal(*found)


def test_frozen_parameters_stay_and_are_not_in_the_norm():
    model, examples = words(), data()
    model[0].weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="NO NOISE"):
        step = PrivateGradient(model, cross_entropy, examples, plan(0.0), key=NoiseKey.simulation(1))
    examples.take()
    step()
    rows = [(examples.inputs[i], examples.targets[i]) for i in examples.take()]
    assert model[0].weight.grad is None
    np.testing.assert_allclose(filled(model), clipped_sum(model, rows) / 8, rtol=1e-5, atol=1e-8)
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
        examples.take()
        step()
        read = examples.take()
        sizes.add(len(read))
        rows = [(examples.inputs[i], examples.targets[i]) for i in read]
        np.testing.assert_allclose(filled(model), clipped_sum(model, rows) / 6, rtol=1e-5, atol=1e-8)
    assert len(sizes) > 2


def test_an_empty_batch_releases_noise_alone():
    rare = {"sampling": "poisson", "sampling_rate": 1e-9}
    model, key = words(), NoiseKey.simulation(5)
    PrivateGradient(model, cross_entropy, data(), plan(0.7, DPSGD(), **rare), key=key)()
    expected = 0.3 * 0.7 * noise(key, np.eye(1), [0], 39) / (24 * 1e-9)
    np.testing.assert_allclose(filled(model), expected, rtol=1e-5, atol=1e3)
