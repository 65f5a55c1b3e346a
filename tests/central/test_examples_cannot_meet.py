"""Whatever a model does with a batch, one example moves the round's sum by at most the clip norm, and nothing else."""

import copy
import math

import numpy as np
import pytest
import torch
from oracles_gradients import clipped_sum
from plans import make_plan
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fedcgd import DPSGD, NoiseKey, Participation
from fedcgd.central import PrivateGradient, gradients

EXAMPLES, CLIP_NORM = 12, 0.3


def plan(sigma=0.0):
    return make_plan(DPSGD(), Participation(rounds=4), clip_norm=CLIP_NORM, noise_multiplier=sigma, delta=1e-3)


class Wrapped(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class BatchMean(Wrapped):
    """Looks at the batch."""

    def forward(self, x):
        return self.layers[0]((x - x.mean(0)).square() + x.sum() + len(x))


class LongestRow(Wrapped):
    """Cuts the batch to its longest row, and divides by that length."""

    def forward(self, x):
        longest = (x > 0).sum(1).max()
        return self.layers[0](x / longest)


class AcrossTheBatch(Wrapped):
    """Attends to other rows."""

    def forward(self, x):
        return self.layers[0](torch.softmax(x @ x.T, dim=1) @ x)


class Branches(Wrapped):
    """Decides by the values."""

    def forward(self, x):
        return self.layers[0](x) * (2 if x.sum() > 0 else -3)


class Overwrites(Wrapped):
    """Keeps what it saw in a buffer, in the place of the one before."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x):
        self.seen = 0.5 * self.seen + x.detach().sum(0)
        return self.layers[0](x + self.seen)


class WritesTo(Overwrites):
    """The same, into the buffer itself."""

    def forward(self, x):
        self.seen.mul_(0.5).add_(x.detach().sum(0))
        return self.layers[0](x + self.seen)


class Counts(Overwrites):
    """A counter that no example changes."""

    def forward(self, x):
        self.seen.add_(1)
        return self.layers[0](x + self.seen)


class HidesInData(Wrapped):
    """Keeps what it saw in a frozen parameter, past what counts writes."""

    def forward(self, x):
        self.layers[0].weight.data.add_(x.detach().sum())
        return super().forward(x)


def same_layer_twice():
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, 3))


def one_weight_in_two_layers():
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Linear(5, 3))


class Recurrent(Wrapped):
    def forward(self, x):
        return self.layers[1](self.layers[0](x[:, :, None])[0][:, -1])


class LowRank(Wrapped):
    """Frozen weights, and a correction of rank 2 that is trained."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.down, self.up = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        return self.layers[0](x) + x @ self.down.T @ self.up.T


MODELS = {
    "layers in a row": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
    "the batch's mean": lambda: BatchMean(nn.Linear(5, 3)),
    "the longest row": lambda: LongestRow(nn.Linear(5, 3)),
    "attention over the batch": lambda: AcrossTheBatch(nn.Linear(5, 3)),
    "branches": lambda: Branches(nn.Linear(5, 3)),
    "a layer with two names": same_layer_twice,
    "a weight of two layers": one_weight_in_two_layers,
    "a frozen layer that is written to": lambda: HidesInData(nn.Linear(5, 4).requires_grad_(False), nn.Linear(4, 3)),
    "low-rank adapters": lambda: LowRank(nn.Linear(5, 3).requires_grad_(False)),
    "an overwritten buffer": lambda: Overwrites(nn.Linear(5, 3)),
    "GRU": lambda: Recurrent(nn.GRU(1, 4, batch_first=True), nn.Linear(4, 3)),
    "LSTM": lambda: Recurrent(nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 3)),
    "BatchNorm that is kept": lambda: Wrapped(nn.Linear(5, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 3)),
}  # fmt: skip


def examples(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(EXAMPLES, 5, generator=generator), torch.randint(0, 3, (EXAMPLES,), generator=generator)


def summed(model, inputs, targets, loss=cross_entropy, sigma=0.0, micro_batch=None):
    """What a step fills in, times the batch size."""
    step = PrivateGradient(
        model, loss, TensorDataset(inputs, targets), plan(sigma), key=NoiseKey.simulation(1), micro_batch=micro_batch
    )
    step()
    return EXAMPLES * np.concatenate([p.grad.double().numpy().ravel() for p in model.parameters() if p.requires_grad])


def sum_of_all(model, inputs, targets, loss=cross_entropy):
    """The clipped gradients of the examples, each by autograd on a copy of the model."""
    examples = zip(inputs, targets, strict=True)
    return sum(clipped_sum(copy.deepcopy(model), [example], CLIP_NORM, loss) for example in examples)


@pytest.mark.filterwarnings("ignore:.*NO NOISE", "ignore:.*vmap", "ignore:There is a performance drop")
@pytest.mark.parametrize("kind", MODELS)
def test_the_sum_is_of_gradients_of_examples_that_are_alone(kind):
    torch.manual_seed(0)
    model = MODELS[kind]()
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    inputs, targets = examples()
    for micro_batch in (None, 5, 1):
        total = summed(model, inputs, targets, micro_batch=micro_batch)
        np.testing.assert_allclose(total, sum_of_all(model, inputs, targets), rtol=1e-4, atol=1e-5)
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.filterwarnings("ignore:.*NO NOISE", "ignore:.*vmap", "ignore:There is a performance drop")
@pytest.mark.parametrize("kind", MODELS)
def test_an_example_that_is_taken_out_moves_the_sum_by_the_clip_norm_at_most(kind):
    torch.manual_seed(0)
    model = MODELS[kind]()
    inputs, targets = examples()
    total = summed(model, inputs, targets)
    for i in (0, 7):
        without = inputs.clone()
        without[i] = math.nan  # so that its gradient is zero
        moved = float(np.linalg.norm(total - summed(model, without, targets)))
        assert moved <= CLIP_NORM * (1 + 1e-5)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [(kind, bad) for kind in ("layers in a row", "the batch's mean") for bad in (math.inf, 3e38)] + [("GRU", math.inf)],
)
@pytest.mark.filterwarnings("ignore:.*vmap")
def test_one_that_is_not_finite_adds_nothing_and_leaves_the_others_their_bits(kind, bad):
    torch.manual_seed(0)
    model = MODELS[kind]()
    inputs, targets = examples()
    inputs[3] = math.nan
    expected = summed(model, inputs, targets, sigma=0.5)
    inputs[3, 1:] = bad
    found = summed(model, inputs, targets, sigma=0.5)
    np.testing.assert_array_equal(found, expected)


class ClampsItsWeights(Wrapped):
    """Writes to what is trained, by its own values."""

    def forward(self, x):
        self.layers[0].weight.detach().clamp_(-0.1, 0.1)
        return super().forward(x)


class Renormalises(Wrapped):
    """Writes to the rows of an embedding that an example looks up."""

    def __init__(self):
        super().__init__(nn.Embedding(9, 4, max_norm=0.1), nn.Linear(4, 3))

    def forward(self, x):
        return self.layers[1](self.layers[0](x.abs().clamp(max=8).long()).mean(1))


WRITERS = {
    "seen": lambda: WritesTo(nn.Linear(5, 3)),
    "a counter": lambda: Counts(nn.Linear(5, 3)),
    "what is trained": lambda: ClampsItsWeights(nn.Linear(5, 3)),
    "what is frozen": lambda: ClampsItsWeights(nn.Linear(5, 4).requires_grad_(False), nn.Linear(4, 3)),
    "an embedding": Renormalises,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", WRITERS)
def test_a_model_that_writes_to_what_it_keeps_is_refused(kind):
    model = WRITERS[kind]()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="writes to"):
        summed(model, *examples(), sigma=0.5)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) or kind == "what is frozen", name  # of which there is no copy


def test_batch_norm_in_training_is_refused_at_once_and_later():
    with pytest.raises(ValueError, match=r"'layers\.1' .*GroupNorm"):
        summed(Wrapped(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), *examples())
    model = Wrapped(nn.Linear(5, 4), nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2).eval(), nn.Flatten(), nn.Linear(4, 3))
    inputs, targets = examples()
    step = PrivateGradient(model, cross_entropy, TensorDataset(inputs, targets), plan(0.5), key=NoiseKey.simulation(1))
    model.train()
    with pytest.raises(ValueError, match=r"'layers\.2\.num_batches_tracked'"):
        step()


@pytest.mark.filterwarnings("ignore:.*NO NOISE")
def test_a_loss_that_branches_is_computed_example_by_example():
    def branching(outputs, targets):
        return cross_entropy(outputs, targets) * (0.1 if targets.item() else 0.2)

    torch.manual_seed(0)
    model = MODELS["attention over the batch"]()
    inputs, targets = examples()
    with pytest.warns(UserWarning, match="vmap refuses"):
        total = summed(model, inputs, targets, loss=branching)
    np.testing.assert_allclose(total, sum_of_all(model, inputs, targets, branching), rtol=1e-4, atol=1e-5)


def test_a_loss_that_looks_at_the_batch_sees_one_example():
    def mixing(outputs, targets):
        return cross_entropy(outputs - outputs.mean(0), targets)

    with pytest.warns(UserWarning, match="NO NOISE"):
        assert np.abs(summed(MODELS["layers in a row"](), *examples(), loss=mixing)).max() < 1e-6


def test_out_of_memory_is_not_taken_for_a_loss_that_branches(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(gradients, "grad", lambda _: full)
    with pytest.raises(torch.OutOfMemoryError):
        summed(MODELS["layers in a row"](), *examples(), sigma=0.5)


class Remembers(Wrapped):
    """Keeps an example in a buffer that was None, where the next would find it."""

    def __init__(self, *layers, looped):
        super().__init__(*layers)
        self.looped = looped
        self.register_buffer("seen", None)

    def forward(self, x):
        if self.looped:
            x.sum().item()
        x, self.seen = x if self.seen is None else x + self.seen, x.detach()
        return self.layers[0](x)


@pytest.mark.filterwarnings("ignore:torch.func.vmap refuses", "ignore:.*NO NOISE")
@pytest.mark.parametrize("looped", [True, False])
def test_a_buffer_that_was_not_there_is_not_there_for_the_next_example(looped):
    torch.manual_seed(3)
    layer, (inputs, targets) = nn.Linear(5, 3), examples()
    model = Remembers(copy.deepcopy(layer), looped=looped)
    for _ in range(2):
        torch.testing.assert_close(summed(model, inputs, targets), summed(Wrapped(layer), inputs, targets))
        assert model.seen is None
