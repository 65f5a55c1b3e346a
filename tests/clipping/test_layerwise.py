"""Gradients layer by layer are those of vmap, for the models that qualify; others do not qualify."""

import math

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional

from fedcgd.clipping import layerwise
from fedcgd.clipping import per_sample_gradients as module
from fedcgd.clipping.flat_models import flatten, layout, unflatten
from fedcgd.clipping.per_sample_gradients import clipped_gradient_sum, example_loss
from fedcgd.noise.quantisation import Lattice


def cross_entropy(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")


def pictures():
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=(1, 2), dilation=(1, 2), groups=2),
        nn.GroupNorm(3, 6, eps=0.1),
        nn.Sequential(nn.ReLU(), nn.Conv2d(6, 5, (1, 2), bias=False), nn.GroupNorm(1, 5, affine=False), nn.GELU()),
        nn.MaxPool2d(2),
        nn.AvgPool2d(1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(20, 7, bias=False),
        nn.GroupNorm(1, 7),
        nn.Linear(7, 3),
    )


def words():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Flatten(), nn.Linear(54, 3))


def the_same_twice():
    """A layer without parameters may be."""
    tanh = nn.Tanh()
    return nn.Sequential(nn.Flatten(), nn.Linear(324, 5), tanh, nn.Linear(5, 5), tanh, nn.Linear(5, 3))


def normalised_first():
    return nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(324, 3))


def frozen_below():
    model = pictures()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name in ("1.weight", "9.bias", "2.1.weight")
    return model


def setting(make, examples=11):
    torch.manual_seed(3)
    model = make()
    shape = (9, 4) if make is words else (4, 9, 9)
    return model, torch.randn(examples, *shape), torch.randint(0, 3, (examples,))


def trained(model):
    return unflatten(flatten(model), layout(model))


def both(model, inputs, targets):
    loss = example_loss(model, cross_entropy)
    layers = layerwise.layers_of(model)
    assert layers is not None
    flat = flatten(model)
    flat += 0.2 * torch.randn(len(flat), generator=torch.Generator().manual_seed(1))  # a server's, not the module's own
    ours = torch.cat(layerwise.gradients(layers, cross_entropy, unflatten(flat, layout(model)), inputs, targets), dim=1)
    return ours, vmap(grad(loss), in_dims=(None, 0, 0))(flat, inputs, targets)


@pytest.mark.parametrize(
    "make", [pictures, words, the_same_twice, normalised_first, frozen_below, lambda: nn.Sequential(*pictures())]
)
def test_they_are_the_gradients_of_vmap(make) -> None:
    ours, expected = both(*setting(make))
    assert ours.shape == (11, expected.shape[1])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    assert float(expected.abs().max()) > 0.01


def test_a_single_layer_is_a_model_too() -> None:
    ours, expected = both(nn.Linear(4, 3), torch.randn(5, 4), torch.randint(0, 3, (5,)))
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("make", [pictures, words])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 0.0])
def test_what_one_example_holds_leaves_the_other_rows_bit_by_bit(make, value) -> None:
    model, inputs, targets = setting(make)
    before, _ = both(model, inputs, targets)
    inputs[4], targets[4] = value, 2 - targets[4]
    after, _ = both(model, inputs, targets)
    others = [i for i in range(11) if i != 4]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[4], after[4])


class Loud(nn.Tanh):
    """Mixes the examples."""

    def forward(self, x):
        return super().forward(x) - x.mean(0)


class Mixing(nn.Sequential):
    def forward(self, x):
        return super().forward(x - x.mean(0))


def hooked(kind: str) -> nn.Module:
    model = words()
    getattr(model[1], kind)(lambda *arguments: None)
    return model


def patched() -> nn.Module:
    model = words()
    model[1].forward = lambda x: x - x.mean(0)
    return model


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, layer, nn.Flatten(), nn.Linear(36, 3))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), Loud()),
        lambda: Mixing(nn.Linear(4, 4)),
        lambda: nn.Sequential(nn.Sequential(Mixing(nn.Linear(4, 4)))),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=0)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding="same")),
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")),
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.MaxPool2d(2, return_indices=True)),
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        lambda: nn.Sequential(nn.Tanh()),
        lambda: nn.LSTM(4, 4),
        lambda: hooked("register_forward_hook"),
        lambda: hooked("register_forward_pre_hook"),
        lambda: hooked("register_full_backward_hook"),
        lambda: hooked("register_full_backward_pre_hook"),
        patched,
        shared,
        tied,
    ],
)
def test_a_model_that_might_do_something_else_is_left_to_vmap(make) -> None:
    assert layerwise.layers_of(make()) is None


def test_the_loss_sees_one_example_at_a_time() -> None:
    def mixing(outputs, targets):
        return cross_entropy(outputs - outputs.mean(0), targets)

    model, inputs, targets = setting(words)
    parts = layerwise.gradients(layerwise.layers_of(model), mixing, trained(model), inputs, targets)
    assert max(float(part.abs().max()) for part in parts) < 1e-7  # alone, an example is its own mean


@pytest.mark.parametrize(
    "loss",
    [
        functional.cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum"),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), reduction="sum"),
    ],
)
def test_known_losses_are_those_of_examples_alone(loss) -> None:
    model, inputs, targets = setting(words)
    found, alone = (
        layerwise.gradients(layerwise.layers_of(model), one, trained(model), inputs, targets)
        for one in (loss, lambda outputs, targets: loss(outputs, targets))  # the second is one that nobody knows
    )
    # An example without a label that counts has no loss: NaN, or zeros.
    torch.testing.assert_close([part.nan_to_num(0) for part in found], [part.nan_to_num(0) for part in alone])


def test_a_loss_of_several_numbers_for_an_example_is_their_sum() -> None:
    def squares(outputs, targets):
        return outputs**2

    model, inputs, targets = setting(words)
    found = []
    for loss in (squares, lambda outputs, targets: squares(outputs, targets).sum(1)):
        layers = layerwise.layers_of(model)
        found.append(layerwise.gradients(layers, loss, trained(model), inputs, targets))
    torch.testing.assert_close(*found)


def test_examples_of_one_number_are_never_taken_for_features() -> None:
    """Three examples, and a layer that wants three features."""
    model = nn.Linear(3, 3)
    with pytest.raises(layerwise.UnusualShapeError):
        layerwise.gradients(layerwise.layers_of(model), cross_entropy, trained(model), torch.randn(3), torch.zeros(3))


def test_examples_are_never_taken_for_channels() -> None:
    """Three pictures without a channel's dimension, and a convolution that wants three channels."""
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(0))
    assert layerwise.layers_of(model) is None
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 3))
    examples = (torch.randn(3, 8, 8), torch.zeros(3, dtype=torch.long))
    with pytest.raises(layerwise.UnusualShapeError):
        layerwise.gradients(layerwise.layers_of(model), cross_entropy, trained(model), *examples)
    with pytest.raises(RuntimeError, match="expected input"):
        clipped_gradient_sum(
            example_loss(model, cross_entropy), flatten(model), examples, clip_norm=1.0, grid=Lattice(2.0**-20)
        )
    one = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(1), nn.Linear(36, 3))  # vmap's pictures have one channel
    with pytest.raises(layerwise.UnusualShapeError):
        layerwise.gradients(layerwise.layers_of(one), cross_entropy, trained(one), *examples)


@pytest.mark.parametrize("indicator", [0, 5])
@pytest.mark.parametrize("unit", [1.0, 0.125])
@pytest.mark.parametrize("clip_norm", [0.5, 1e3])
def test_rows_are_clipped_where_they_lie_as_elsewhere(clip_norm, unit, indicator, monkeypatch) -> None:
    model, inputs, targets = setting(pictures)
    inputs[3] = math.nan
    monkeypatch.setattr(module, "rows_at_once", lambda size, device: 4)
    sums = []
    for form in (module._BY_MACHINE_CODE, module._BY_TORCH):
        monkeypatch.setattr(module, "_form_for", lambda parts, form=form: form)
        total, finite = clipped_gradient_sum(
            example_loss(model, cross_entropy),
            flatten(model),
            (inputs, targets),
            clip_norm=clip_norm,
            grid=Lattice(2.0**-20),
            counted=[i != 7 for i in range(11)],
            unit=unit,
            indicator=indicator,
        )
        assert finite == 9
        sums.append(total)
    assert (sums[0] - sums[1]).abs().max() <= 1
    if indicator:
        assert sums[0][-1] == sums[1][-1] == (-45 if clip_norm == 0.5 else 45)
