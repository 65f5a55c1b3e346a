"""Quicker forms of layers give the numbers and slopes of torch's."""

import math

import pytest
import torch
from torch import nn

from fedcgd.activations import QuickTanh, max_pool2d, quick, tanh


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_tanh_and_its_slope(memory: torch.memory_format) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4000), torch.logspace(-9, 1, 96)]).reshape(4, 4, 16, 16)
    x = x.contiguous(memory_format=memory).requires_grad_()
    exact = torch.tanh(x.detach().double())
    y = tanh(x)
    assert float((y.detach() - exact).abs().max()) < 2**-22
    assert y.is_contiguous(memory_format=memory)
    (slope,) = torch.autograd.grad(y, x, torch.full_like(y, 3.0))
    assert float((slope - 3 * (1 - exact**2)).abs().max()) < 3 * 2**-21


def test_tanh_of_what_is_not_a_number_and_of_what_is_infinite() -> None:
    found = tanh(torch.tensor([math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0]))
    assert found[0].isnan()
    assert found[1:].tolist() == [1, -1, 1, -1, 0]


@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(3, 2, padding=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [(10, 8), (11, 8), (10, 9)])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_pooling_is_torch_s(layer: nn.MaxPool2d, size: tuple[int, int], memory: torch.memory_format) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 5, *size)
    x[0, 1], x[0, 2, 3, 4], x[1, 0] = math.nan, math.nan, -math.inf
    x = x.contiguous(memory_format=memory).requires_grad_()
    expected, found = layer(x), max_pool2d(layer, x)
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert torch.equal(found.isnan(), expected.isnan())
    slope = torch.randn_like(found)
    given, wanted = (torch.autograd.grad(y, x, slope)[0] for y in (found, expected))
    unique = torch.ones(3, 5, dtype=torch.bool)
    unique[0, 1], unique[0, 2], unique[1, 0] = False, False, False
    torch.testing.assert_close(given[unique], wanted[unique])


def test_one_picture_without_a_batch_is_pooled_too() -> None:
    x = torch.randn(3, 4, 6)
    assert torch.equal(max_pool2d(nn.MaxPool2d(2), x), nn.MaxPool2d(2)(x))


def test_of_equal_numbers_one_has_the_slope() -> None:
    x = torch.zeros(1, 1, 2, 4).requires_grad_()
    (found,) = torch.autograd.grad(max_pool2d(nn.MaxPool2d(2), x), x, torch.tensor([[[[3.0, 5.0]]]]))
    assert sorted(found[..., :2].flatten().tolist()) == [0, 0, 0, 3]
    assert sorted(found[..., 2:].flatten().tolist()) == [0, 0, 0, 5]


def test_quick_changes_layers_of_that_very_class() -> None:
    class Other(nn.Tanh):
        pass

    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Sequential(Other(), nn.Tanh(), nn.ReLU()))
    names = dict(model.named_parameters()).keys()
    made = quick(model)
    assert [type(layer) for layer in made.modules() if not isinstance(layer, nn.Sequential)] == [
        nn.Linear, QuickTanh, Other, QuickTanh, nn.ReLU,
    ]  # fmt: skip
    assert dict(made.named_parameters()).keys() == names
