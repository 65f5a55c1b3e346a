"""Gradients of examples that do not add up to autograd's own are refused; those that do are those of each example by itself."""

import copy
import math

import pytest
import torch
from central_runs import Run
from opacus import GradSampleModule
from oracles_gradients import clipped_sum
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedcgd.opacus.autograd_check import beyond_rounding

SIZE = 5


class Around(nn.Module):
    """A layer between two others, used as `how` says."""

    def __init__(self, how):
        super().__init__()
        self.how, self.first, self.inner, self.last = how, nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        if "norm" in how:
            self.inner = nn.LayerNorm(4, bias=False)

    def forward(self, inputs):
        x, inner = torch.tanh(self.first(inputs)), self.inner
        match self.how:
            case "twice" | "norm twice":
                x = inner(torch.tanh(inner(x)))
            case "weight alone":
                x = functional.linear(torch.tanh(inner(x)), inner.weight)
            case "weight transposed":
                x = inner(x) @ inner.weight
            case "norm without bias":
                x = inner(x)
        return self.last(x)


def words(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6, **options), nn.Flatten(), nn.Linear(18, 3))


def private_sum(monkeypatch, model, mode, inputs, clip_norm=0.2):
    """(the sum of the round, that of autograd example by example)."""
    targets = torch.arange(SIZE) % 3
    precise = inputs.double() if inputs.is_floating_point() else inputs
    expected = clipped_sum(copy.deepcopy(model).double(), zip(precise, targets, strict=True), clip_norm)
    data = TensorDataset(inputs, targets)
    run = Run(monkeypatch, data=data, batch=SIZE, epochs=1, model=model, mode=mode, clip_norm=clip_norm)
    run.train()
    return run.sums[0], expected


def agrees(found, expected):
    return float((found - expected).norm()) < 1e-3 * float(expected.norm())


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("how", ["twice", "norm without bias", "norm twice"])
def test_a_layer_that_is_used_twice_is_right(how, mode, monkeypatch):
    torch.manual_seed(0)
    assert agrees(*private_sum(monkeypatch, Around(how), mode, torch.randn(SIZE, 6)))


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("how", ["weight alone", "weight transposed"])
def test_a_weight_that_is_taken_from_its_layer_is_refused(how, mode, monkeypatch):
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match=r"inner\.weight"):
        private_sum(monkeypatch, Around(how), mode, torch.randn(SIZE, 6))


def test_a_penalty_in_the_loss_is_refused_and_gradients_are_compared_once(monkeypatch):
    run = Run(monkeypatch, epochs=1)

    def step(penalty):
        def with_penalty(batch):
            loss = functional.cross_entropy(run.module(batch[0]), batch[1])
            (loss + penalty * run.model.weight.square().sum()).backward()
            run.optimizer.step()

        return with_penalty

    with pytest.raises(RuntimeError, match="penalty in"):
        run.train(step(100.0))
    assert run.sums == []
    run.train(step(0.0))
    assert run.released == 3


@pytest.mark.parametrize("forget", ["optimizer", "model"])
def test_gradients_are_compared_after_other_backward_passes(forget, monkeypatch):
    """As in adversarial training, where the attack goes backward through the model first."""
    torch.manual_seed(0)
    run = Run(monkeypatch, model=Around("weight alone"), epochs=1)

    def step(batch):
        run.loss(run.module(batch[0]), batch[1]).backward()
        (run.optimizer if forget == "optimizer" else run.module).zero_grad()
        run.loss(run.module(batch[0]), batch[1]).backward()
        run.optimizer.step()

    with pytest.raises(RuntimeError, match=r"inner\.weight"):
        run.train(step)


@pytest.mark.parametrize("first", [0.0, math.inf])
def test_gradients_are_compared_as_soon_as_there_are_some(first, monkeypatch):
    torch.manual_seed(0)
    run = Run(monkeypatch, model=Around("twice"), epochs=1)

    def step(batch):
        loss = run.loss(run.module(batch[0]), batch[1]) + run.model.inner.weight.square().sum()
        (loss if run.released else loss * first).backward()
        run.optimizer.step()

    with pytest.raises(RuntimeError, match=r"inner\.weight"):
        run.train(step)
    assert run.released == 1


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_the_row_for_padding_is_not_trained(mode, monkeypatch):
    inputs = torch.arange(3 * SIZE).reshape(SIZE, 3) % 7
    found, expected = private_sum(monkeypatch, words(padding_idx=2), mode, inputs)
    assert agrees(found, expected)
    assert not found[2 * 6 : 3 * 6].any()


@pytest.mark.parametrize(
    ("off", "sizes", "halves", "odd"),
    [
        ((0.0, 0.0), (1.0, 0.0), False, []),
        ((0.0109, 0.0009), (1.0, 0.0), False, []),
        ((0.0111, 0.0011), (1.0, 0.0), False, [0, 1]),
        ((0.149, 0.049), (1.0, 0.0), True, []),
        ((0.151, 0.051), (1.0, 0.0), True, [0, 1]),
        ((0.0, 0.0), (0.0, 0.0), False, None),
        ((1.0, math.inf), (1.0, 1.0), False, None),
    ],
)
def test_what_is_more_than_rounding(off, sizes, halves, odd):
    """A hundredth of a parameter's gradients and a thousandth of all; in 16 bits a tenth and a twentieth."""
    assert beyond_rounding(off, sizes, halves) == odd


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_halves_round_and_are_not_refused(mode, monkeypatch):
    torch.manual_seed(0)
    run = Run(monkeypatch, model=nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 3)).bfloat16(), mode=mode)

    def step(batch):
        run.loss(run.module(batch[0].bfloat16()), batch[1]).backward()
        run.optimizer.step()

    run.train(step)
    assert run.released == 3


class Positive(nn.PReLU):
    """A layer of the program's own, of whose input autograd keeps another tensor."""

    def forward(self, inputs):
        return torch.relu(inputs) * self.weight


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize(
    "what", ["input of a pass back", "input of a pass forward", "input of a pass forward, wrapped", "slopes"]
)
def test_what_is_overwritten_before_the_step_counts_as_it_was(what, mode, monkeypatch):
    """Else the row of an example would hold another's numbers, and one example would count twice."""
    sums, criterion = [], nn.CrossEntropyLoss(reduction="sum")
    for overwrites in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Positive(6), nn.Linear(6, 3)) if what.startswith("input of a pass forward") else None
        if "wrapped" in what:
            model = GradSampleModule(model)
        run = Run(monkeypatch, epochs=1, mode=mode, model=model, loss_reduction="sum", criterion=criterion)
        for inputs, targets in run.loader:
            outputs, slopes = run.module(inputs), functional.one_hot(targets, 3).float()
            if overwrites and what.startswith("input of a pass forward"):
                inputs.numpy()[:] = inputs[0]
            outputs.backward(slopes)
            if overwrites:
                (slopes if what == "slopes" else inputs).numpy()[:] = 0
            run.optimizer.step()
        sums.append(run.sums)
    assert len(sums[0]) > 1
    assert all(torch.equal(*pair) for pair in zip(*sums, strict=True))
