"""Per-example gradients of plain stacks of layers: one pass over a batch, then each layer's own from what went in and came back.

What `torch.func.vmap` does for any model, in less time, where it is certain that no example touches another: the model is an
`nn.Sequential` (of `nn.Sequential`s) of layers in `_LAYERS` and `_PER_EXAMPLE`, each exactly of that class, with nothing hooked
into it, and no parameter twice. Those treat the rows of a batch apart. The loss, which may be anybody's code, still sees one
example.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs of a batch, targets) → one loss per example."""

_LAYERS = (nn.Linear, nn.Conv2d, nn.GroupNorm)
_CONVOLUTION = ("stride", "padding", "dilation", "groups")
_IMAGES = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
_PER_EXAMPLE = (
    nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Softplus,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten,
)  # fmt: skip


class UnusualShapeError(Exception):
    """An input without a batch's dimensions, of which a layer might take examples for channels."""


def layers_of(model: nn.Module, path: str = "") -> list[tuple[str, nn.Module]] | None:
    """The layers of `model` in the order in which they are applied, with what the names of their parameters begin with.

    None if they are not all known, or share a parameter.
    """
    if type(model) is not nn.Sequential or not _is_plain(model):
        return [(path, model)] if _is_known(model) and (path or model._parameters) else None
    layers: list[tuple[str, nn.Module]] = []
    for part, layer in model._modules.items():  # one that occurs twice is named twice
        found = layers_of(layer, f"{path}{part}.") if layer is not None else None
        if found is None:
            return None
        layers += found
    held = [p for _, layer in layers for p in layer._parameters.values() if p is not None]
    return layers if path or (held and len(set(map(id, held))) == len(held)) else None


def _is_known(layer: nn.Module) -> bool:
    match layer:
        case nn.Conv2d():
            usual = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        case nn.Flatten():
            usual = layer.start_dim == 1
        case nn.MaxPool2d():
            usual = not layer.return_indices
        case _:
            usual = not getattr(layer, "inplace", False)
    return usual and type(layer) in (*_LAYERS, *_PER_EXAMPLE) and _is_plain(layer)


def _is_plain(module: nn.Module) -> bool:
    """Whether calling the module does what its class does; one that is parametrised has another class."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and "forward" not in vars(module)


def gradients(
    layers: Sequence[tuple[str, nn.Module]], loss: Loss, trained: Mapping[str, Tensor], inputs: Tensor, targets: Tensor
) -> list[Tensor]:
    """∇ `loss` of each example at the parameters `trained`, as rows: in parts, one for each of them, (examples, its size).

    `layers` are what `layers_of` found. Raises whatever the loss raises for one of the examples, and UnusualShapeError.
    """
    rows: dict[str, Tensor] = {}
    before: dict[str, Tensor] = {}
    sources: dict[str, Tensor] = {}
    examples = len(inputs)
    with torch.enable_grad():
        x = inputs.detach()
        for path, layer in layers:
            if x.dim() < 2 or (isinstance(layer, _IMAGES) and x.dim() != 4):
                raise UnusualShapeError
            held: dict[str, Any] = {}
            for part, value in layer._parameters.items():
                held[part] = None if value is None else trained.get(path + part, value).detach()
            if isinstance(layer, nn.GroupNorm):
                for part, value in held.items():
                    held[part] = many = None if value is None else value.repeat(examples)
                    if many is not None and path + part in trained:
                        sources[path + part] = many.requires_grad_()
                # Each example's channels are channels of one example: then each has weights of its own.
                whole = x.reshape(1, -1, *x.shape[2:])
                x = functional.group_norm(whole, examples * layer.num_groups, **held, eps=layer.eps).reshape(x.shape)
            elif isinstance(layer, nn.Linear | nn.Conv2d):
                before[path] = x.detach()
                if isinstance(layer, nn.Linear):
                    x = functional.linear(x, **held)
                else:
                    held |= {name: getattr(layer, name) for name in _CONVOLUTION}
                    x = functional.conv2d(x, **held)
                if not x.requires_grad:  # nothing before it is trained
                    x.requires_grad_()
                sources[path] = x
            else:
                x = layer(x)
        losses = _losses(loss, x, targets)
    found = dict(zip(sources, torch.autograd.grad(losses.sum(), list(sources.values())), strict=True))
    for path, layer in layers:
        if path in before:
            parts = _linear if isinstance(layer, nn.Linear) else convolution_gradients
            for part, row in parts(layer, before.pop(path), found.pop(path)).items():
                rows[path + part] = row
    return [(rows if name in rows else found)[name].reshape(examples, -1) for name in trained]


def _losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Those of each example alone. Cross-entropy of classes is known to treat the rows of a batch apart."""
    if outputs.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point():
        if loss is functional.cross_entropy:
            return functional.cross_entropy(outputs, targets, reduction="none")
        if type(loss) is nn.CrossEntropyLoss and _is_plain(loss) and loss.weight is None:
            smoothing, ignored = loss.label_smoothing, loss.ignore_index
            return functional.cross_entropy(
                outputs, targets, reduction="none", label_smoothing=smoothing, ignore_index=ignored
            )
    return vmap(lambda output, target: loss(output.unsqueeze(0), target.unsqueeze(0)).sum())(outputs, targets)


def _linear(layer: nn.Module, x: Tensor, backprops: Tensor) -> dict[str, Tensor]:
    """Weight: Σ over positions of backprops ⊗ input."""
    backprops, x = backprops.reshape(len(x), -1, backprops.shape[-1]), x.reshape(len(x), -1, x.shape[-1])
    rows = {"weight": torch.bmm(backprops.transpose(1, 2), x)}
    return rows if layer.bias is None else {**rows, "bias": backprops.sum(dim=1)}


def convolution_gradients(layer: nn.Module, x: Tensor, backprops: Tensor) -> dict[str, Tensor]:
    """Of an `nn.Conv2d` that pads with zeros: each example's gradients, (examples, *shape), from inputs `x` and those of outputs.

    Weight: that of one convolution of one example, of which each of these is a group of channels.
    """
    assert isinstance(layer, nn.Conv2d)
    out, channels, *size = layer.weight.shape
    _, weight, _ = torch.ops.aten.convolution_backward(
        backprops.reshape(1, -1, *backprops.shape[2:]), x.reshape(1, -1, *x.shape[2:]),
        x.new_empty(len(x) * out, channels, *size), None,
        layer.stride, layer.padding, layer.dilation, False, [0, 0], len(x) * layer.groups, [False, True, False],
    )  # fmt: skip
    rows = {"weight": weight.view(len(x), *layer.weight.shape)}
    return rows if layer.bias is None else {**rows, "bias": backprops.sum(dim=(2, 3))}
