"""Per-example gradients of convolutions: those of each example by itself, from one grouped convolution where that pays."""

import math

import pytest
import torch
from central_runs import Run
from opacus import GradSampleModule
from opacus.grad_sample.conv import compute_conv_grad_sample
from oracles_gradients import clipped_sum
from torch import nn

from fedcgd.opacus import ghost
from fedcgd.opacus.ghost import convolution, with_sample_gradients

LARGE = {
    "plain": (nn.Conv2d(2, 3, 3, padding=1), (7, 8)),
    "all options": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2, bias=False), (9, 8)),
    "one channel a group": (nn.Conv2d(8, 8, 3, groups=8), (6, 6)),
}  # fmt: skip
SMALL = {
    "few pixels": (nn.Conv2d(2, 30, 3), (5, 5)),
    "named padding": (nn.Conv2d(2, 3, 3, padding="same"), (7, 8)),
    "reflected padding": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (7, 8)),
    "float64": (nn.Conv2d(2, 3, 3).double(), (7, 8)),
    "frozen weight": (nn.Conv2d(2, 3, 3), (7, 8)),
}
SMALL["frozen weight"][0].weight.requires_grad = False


def setting(layer, pixels, examples=5):
    torch.manual_seed(3)
    inputs = torch.randn(examples, layer.in_channels, *pixels, dtype=layer.weight.dtype)
    outputs = layer(inputs)
    return inputs, torch.randn_like(outputs)


@pytest.fixture
def grouped(monkeypatch):
    """How often a grouped convolution was made."""
    calls, made = [], ghost.convolution_gradients

    def counted(*given):
        calls.append(given)
        return made(*given)

    monkeypatch.setattr(ghost, "convolution_gradients", counted)
    return calls


@pytest.mark.parametrize("name", LARGE)
def test_rows_are_the_gradients_of_each_example_by_itself(name, grouped):
    layer, pixels = LARGE[name]
    inputs, slopes = setting(layer, pixels)
    rows = convolution(layer, [inputs], slopes)
    assert set(rows) == set(layer.parameters())
    assert len(grouped) == 1
    for i in range(len(inputs)):
        layer.zero_grad()
        layer(inputs[i : i + 1]).backward(slopes[i : i + 1])
        for parameter, found in rows.items():
            assert torch.allclose(found[i], parameter.grad, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_where_a_grouped_convolution_does_not_pay_or_fit_it_is_opacus_that_makes_them(name, grouped):
    layer, pixels = SMALL[name]
    inputs, slopes = setting(layer, pixels)
    rows, expected = (sampler(layer, [inputs], slopes) for sampler in (convolution, compute_conv_grad_sample))
    assert not grouped
    assert set(rows) == set(expected)
    assert all(torch.equal(rows[parameter], expected[parameter]) for parameter in rows)


def test_no_examples_have_the_rows_that_opacus_gives_them(grouped):
    layer, pixels = LARGE["plain"]
    inputs, slopes = setting(layer, pixels, examples=0)
    assert convolution(layer, [inputs], slopes).keys() == compute_conv_grad_sample(layer, [inputs], slopes).keys()
    assert not grouped


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", LARGE)
def test_no_example_touches_the_row_of_another(name, spoilt, grouped):
    layer, pixels = LARGE[name]
    inputs, slopes = setting(layer, pixels)
    before = convolution(layer, [inputs], slopes)
    inputs[2], slopes[2] = spoilt, spoilt
    after = convolution(layer, [inputs], slopes)
    others = [0, 1, 3, 4]
    assert all(torch.equal(before[parameter][others], after[parameter][others]) for parameter in before)
    assert not any(torch.equal(before[parameter][2], after[parameter][2]) for parameter in before)
    assert len(grouped) == 2


def test_a_sampler_that_the_program_registered_is_used(monkeypatch, grouped):
    layer, pixels = LARGE["plain"]
    monkeypatch.setitem(GradSampleModule.GRAD_SAMPLERS, nn.Conv2d, lambda *_: {})
    inputs, slopes = setting(layer, pixels)
    assert convolution(layer, [inputs], slopes) == {}
    assert not grouped


class Twice(nn.Module):
    """A convolution by itself, and one that is used two times."""

    def __init__(self):
        super().__init__()
        self.once, self.twice, self.last = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1), nn.Linear(2, 3)

    def forward(self, x):
        return self.last(self.twice(torch.tanh(self.twice(self.once(x)))).mean((2, 3)))


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_private_step_uses_them(mode, wrap, monkeypatch, grouped):
    torch.manual_seed(5)
    data = torch.utils.data.TensorDataset(torch.randn(4, 1, 6, 6), torch.tensor([0, 1, 2, 0]))
    model = Twice()
    run = Run(monkeypatch, data=data, batch=4, epochs=1, model=model, mode=mode, clip_norm=0.3, wrap_model=wrap)
    module = run.module if wrap else model
    (inputs, targets), *_ = run.loader
    outputs = module(inputs)  # which looks at the batch first
    grouped.clear()
    run.loss(outputs, targets).backward()
    assert len(grouped) == 3
    alone = Twice()
    alone.load_state_dict(model.state_dict())
    expected = clipped_sum(alone, zip(inputs, targets, strict=True), 0.3)
    run.optimizer.step()
    assert float((run.sums[0] - expected).norm()) < 1e-3 * float(expected.norm())


def test_a_frozen_bias_has_no_rows(grouped):
    layer, pixels = nn.Conv2d(2, 3, 3, padding=1), (7, 8)
    layer.bias.requires_grad = False
    module = with_sample_gradients(layer, "hooks", batch_first=True, loss_reduction="mean", wrap_model=True)
    module(torch.randn(5, 2, *pixels, requires_grad=True)).sum().backward()
    assert len(grouped) == 1
    assert layer.weight.grad_sample.shape == (5, 3, 2, 3, 3)
    assert getattr(layer.bias, "grad_sample", None) is None
