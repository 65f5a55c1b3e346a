"""A sampler of one's own that gives an example another one's gradient is refused, though the sum may be right."""

import pytest
import torch
from central_runs import Run
from opacus.grad_sample import GradSampleModule
from torch import nn
from torch.utils.data import TensorDataset

from fedcgd.opacus import CrossExampleLeakError


class Scale(nn.Module):
    """A layer that Opacus does not know: a factor for each number, and a bias."""

    def __init__(self, size):
        super().__init__()
        self.factor, self.bias = nn.Parameter(torch.linspace(0.5, 1.5, size)), nn.Parameter(torch.zeros(size))

    def forward(self, inputs):
        return self.factor * inputs + self.bias


def right(layer, activations, backprops):
    return {layer.factor: activations[0] * backprops, layer.bias: backprops}


def changed(rows):
    """The right sampler with `rows` of what it returns."""

    def sampler(layer, activations, backprops):
        return {p: rows(found) for p, found in right(layer, activations, backprops).items()}

    return sampler


def one_parameter(layer, activations, backprops):
    found = right(layer, activations, backprops)
    return {**found, layer.bias: found[layer.bias].flip(0)}


def everything_in_one(rows):
    """The sum in the first row, and nothing in the others."""
    return torch.cat([rows.sum(0, keepdim=True), torch.zeros_like(rows[1:])])


WRONG = {
    "other order": changed(lambda rows: rows.flip(0)),
    "rolled": changed(lambda rows: rows.roll(1, 0)),
    "averaged": changed(lambda rows: rows.mean(0, keepdim=True).expand_as(rows).contiguous()),
    "averaged in pairs": changed(lambda rows: rows.view(-1, 2, *rows.shape[1:]).mean(1).repeat_interleave(2, 0)),
    "one row": changed(everything_in_one),
    "one parameter": one_parameter,
    "centred twice": changed(lambda rows: 2 * rows - rows.mean(0)),
}


@pytest.fixture
def registered(monkeypatch):
    def register(sampler):
        monkeypatch.setitem(GradSampleModule.GRAD_SAMPLERS, Scale, sampler)

    return register


def run_with(monkeypatch, mode, **options):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 6), torch.arange(16) % 3)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Scale(6), nn.Linear(6, 3))
    return Run(monkeypatch, data=data, batch=8, model=model, mode=mode, **options)


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("wrong", WRONG)
def test_rows_of_other_examples_are_refused_in_the_first_batch(wrong, mode, wrap, registered, monkeypatch):
    registered(WRONG[wrong])
    run = run_with(monkeypatch, mode, wrap_model=wrap)
    if not wrap:
        run.module = run.model
    name = r"2\.bias'" if wrong == "one parameter" else r"2\.factor"
    with pytest.raises(CrossExampleLeakError, match=name):
        run.train()
    assert run.sums == []


@pytest.mark.parametrize("mode", ["hooks", "ghost", "functorch"])
def test_the_right_sampler_is_used_and_leaves_the_run_alone(mode, registered, monkeypatch):
    """The sums are those of a run that makes them by functorch; what the look has done is not in them."""
    registered(WRONG["other order"] if mode == "functorch" else right)
    run = run_with(monkeypatch, mode)
    run.train()
    other = run_with(monkeypatch, "functorch")
    other.train()
    assert run.released == 2
    assert torch.allclose(torch.stack(run.sums), torch.stack(other.sums), atol=1e-5)
