"""What people train with: augmentation, low-rank adapters, averages of weights, half precision, compiled models, many inputs."""

import numpy as np
import pytest
import torch
from plans import make_plan
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from fedcgd import DPSGD, NoiseKey, Participation
from fedcgd.central import PrivateGradient

EXAMPLES, CLIP_NORM = 12, 0.3


def plan(sigma=0.0):
    return make_plan(DPSGD(), Participation(rounds=4), clip_norm=CLIP_NORM, noise_multiplier=sigma, delta=1e-3)


def examples(shape=(5,)):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(EXAMPLES, *shape, generator=generator), torch.randint(0, 3, (EXAMPLES,), generator=generator)


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def filled(module):
    return np.concatenate([p.grad.double().numpy().ravel() for p in module.parameters() if p.requires_grad])


def clipped(gradients):
    flat = np.concatenate([g.double().numpy().ravel() for g in gradients])
    return flat * min(1, CLIP_NORM / np.linalg.norm(flat))


pytestmark = pytest.mark.filterwarnings("ignore:.*NO NOISE")


def test_the_gradients_of_copies_are_averaged_before_they_are_clipped():
    """Four copies that the transform made, of each example its own, whatever the order of anything."""
    network, (inputs, targets), made, drawn = model(), examples(), [], []

    def noisy(x, y):
        drawn.append(torch.randn(5))
        made.append((x + drawn[-1], y))
        return made[-1]

    step = PrivateGradient(
        network, cross_entropy, TensorDataset(inputs, targets), plan(), key=NoiseKey.simulation(1), transform=noisy,
        augmentation_multiplicity=4,
    )  # fmt: skip
    step()
    assert len(made) == 4 * EXAMPLES
    expected = 0
    for i in range(EXAMPLES):
        own = made[4 * i : 4 * i + 4]
        batch, labels = torch.stack([x for x, _ in own]), torch.stack([y for _, y in own])
        assert (labels == targets[i]).all()
        expected = expected + clipped(
            torch.autograd.grad(cross_entropy(network(batch), labels), list(network.parameters()))
        )
    np.testing.assert_allclose(filled(network) * EXAMPLES, expected, rtol=1e-4, atol=1e-6)
    step()
    assert len({tuple(one.tolist()) for one in drawn}) == len(drawn) == 2 * 4 * EXAMPLES


def test_randomness_follows_from_the_key_and_leaves_the_programs_own_alone():
    found = []
    for seed in (1, 2):
        network = nn.Sequential(*model(), nn.Dropout(0.5))
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        step = PrivateGradient(
            network, cross_entropy, TensorDataset(*examples()), plan(0.5), key=NoiseKey.simulation(1),
            transform=lambda x, y: (x + torch.randn(5), y), augmentation_multiplicity=2,
        )  # fmt: skip
        step()
        assert torch.equal(torch.get_rng_state(), before)
        found.append(filled(network))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("micro_batch", [1, 12])
def test_dropout_draws_for_each_example_its_own(micro_batch):
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3))
    same = torch.ones(EXAMPLES, 5), torch.zeros(EXAMPLES, dtype=torch.long)
    step = PrivateGradient(
        network, cross_entropy, TensorDataset(*same), plan(), key=NoiseKey.simulation(1), micro_batch=micro_batch
    )
    step()
    first = network[1].weight.grad
    assert len(set(first[0].tolist())) > 2  # with one mask for all: zeros, and one number
    step()
    assert not torch.equal(network[1].weight.grad, first)  # and in each round


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(autocast):
    """In bfloat16 the clip norm holds to the last bit of the sum, and gradients are near those of float32."""
    network, (inputs, targets) = model(), examples()
    step = PrivateGradient(network, cross_entropy, TensorDataset(inputs, targets), plan(), key=NoiseKey.simulation(1))
    step()
    expected = filled(network)
    if autocast:
        with torch.autocast("cpu", torch.bfloat16):
            step()
    else:
        network = network.to(torch.bfloat16)
        PrivateGradient(
            network, cross_entropy, TensorDataset(inputs.bfloat16(), targets), plan(), key=NoiseKey.simulation(1)
        )()
    assert np.linalg.norm(filled(network) - expected) < 0.02 * np.linalg.norm(expected)
    assert network[0].weight.grad.dtype == network[0].weight.dtype


def test_double_precision():
    network, (inputs, targets) = model().double(), examples()
    data = TensorDataset(inputs.double(), targets)
    PrivateGradient(network, cross_entropy, data, plan(0.5), key=NoiseKey.simulation(1))()
    single = model()
    PrivateGradient(single, cross_entropy, TensorDataset(inputs, targets), plan(0.5), key=NoiseKey.simulation(1))()
    np.testing.assert_allclose(filled(network), filled(single), atol=1e-5)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, words, mask):
        return self.last((self.words(words) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1))


class Texts(Dataset):
    def __len__(self):
        return EXAMPLES

    def __getitem__(self, i):
        return np.arange(4) % (i % 7 + 1), torch.arange(4) < i % 5, i % 3


def test_several_inputs_of_several_kinds():
    network = TwoInputs()
    PrivateGradient(network, cross_entropy, Texts(), plan(), key=NoiseKey.simulation(1))()
    expected = 0
    for i in range(EXAMPLES):
        words, mask, target = Texts()[i]
        output = network(torch.from_numpy(words)[None], mask[None])
        loss = cross_entropy(output, torch.tensor([target]))
        expected = expected + clipped(torch.autograd.grad(loss, list(network.parameters())))
    np.testing.assert_allclose(filled(network) * EXAMPLES, expected, rtol=1e-4, atol=1e-6)


def test_what_cannot_be_is_refused_before_anything_begins():
    data = TensorDataset(*examples())
    frozen = model().requires_grad_(False)
    for network, given, more, error in (
        (frozen, data, {}, "no parameter"),
        (model(), TensorDataset(data.tensors[0]), {}, "a tuple"),
        (model(), TensorDataset(*(part[:0] for part in data.tensors)), {}, "no examples"),
        (model(), DataLoader(data), {}, "not its loader"),
        (model(), (row for row in data), {}, "got generator"),
        (model(), data, {"augmentation_multiplicity": 2}, "needs a transform"),
        (model(), data, {"micro_batch": 0}, "got 0"),
        (model(), ConcatDataset([data, Subset(data, [-1])]), {}, "once in its round"),
        (model(), data, {"key": bytes(32)}, "NoiseKey"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            PrivateGradient(network, cross_entropy, given, plan(0.5), **{"key": NoiseKey.simulation(1), **more})
    with pytest.raises(TypeError, match=r"fedcgd\.Plan"):
        PrivateGradient(model(), cross_entropy, data, "dp-sgd", key=NoiseKey.simulation(1))


def test_examples_that_cannot_be_stacked_say_what_to_do():
    ragged = [(torch.ones(2 + i % 2, 5), i % 3) for i in range(EXAMPLES)]

    class Averages(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            return self.layer(x.mean(1))

    def step(data, **options):
        PrivateGradient(Averages(), cross_entropy, data, plan(0.5), key=NoiseKey.simulation(1), **options)()

    with pytest.raises(ValueError, match=r"\([23], 5\).*micro_batch=1"):
        step(ragged)
    step(ragged, micro_batch=1)
    for transform, odd in ((lambda x, y: x, "got Tensor"), (lambda x, y: ({"x": x}, y), "a dict")):
        with pytest.raises(TypeError, match=odd):
            step([(x[:2], y) for x, y in ragged], transform=transform)
