"""Per-example gradients of plain stacks of layers: one pass over a batch, then each layer's own from what went in and came back.

What `torch.func.vmap` does for any model, in less time, where it is certain that no example touches another: the model is an
`nn.Sequential` (of `nn.Sequential`s) of layers in `_LAYERS` and `_PER_EXAMPLE`, each exactly of that class, with nothing hooked
into it, and no parameter twice. Those treat the rows of a batch apart. The loss, which may be anybody's code, still sees one
example.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs of a batch, targets) → one loss per example."""

_LAYERS = (nn.Linear, nn.Conv2d, nn.GroupNorm)
_IMAGES = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
_PER_EXAMPLE = (
    nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Softplus,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten,
)  # fmt: skip


def layers_of(model: nn.Module) -> tuple[tuple[str, nn.Module], ...] | None:
    """The layers of `model` in the order in which they are applied, with their names; None if they are not all known."""
    layers = tuple(_layers(model, ""))
    known = all(_is_known(layer) for _, layer in layers)
    held = [tensor for _, layer in layers for tensor in layer.parameters()]
    apart = len({id(tensor) for tensor in held}) == len(held)
    return layers if known and apart and held else None


class UnusualShapeError(Exception):
    """An input without a batch's dimensions, of which a layer might take examples for channels."""


def _layers(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if type(module) is nn.Sequential and _is_plain(module):
        for part, layer in module._modules.items():  # one that occurs twice is named twice
            assert layer is not None
            yield from _layers(layer, f"{name}.{part}" if name else part)
        return
    yield name, module


def _is_known(layer: nn.Module) -> bool:
    if not _is_plain(layer) or getattr(layer, "inplace", False):
        return False
    match layer:
        case nn.Conv2d():
            return type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        case nn.Flatten():
            return type(layer) is nn.Flatten and layer.start_dim == 1
        case nn.MaxPool2d():
            return type(layer) is nn.MaxPool2d and not layer.return_indices
    return type(layer) in (*_LAYERS, *_PER_EXAMPLE)


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
        for name, layer in layers:
            if x.dim() < 2 or (isinstance(layer, _IMAGES) and x.dim() != 4):
                raise UnusualShapeError
            held = {part: trained.get(_full(name, part), value).detach() for part, value in layer.named_parameters()}
            if isinstance(layer, nn.GroupNorm):
                many = {part: value.repeat(examples) for part, value in held.items()}
                for part in held:
                    if _full(name, part) in trained:
                        sources[_full(name, part)] = many[part].requires_grad_()
                # Each example's channels are channels of one example: then each has weights of its own.
                whole = x.reshape(1, -1, *x.shape[2:])
                x = functional.group_norm(whole, examples * layer.num_groups, **many, eps=layer.eps).reshape(x.shape)
            elif isinstance(layer, nn.Linear | nn.Conv2d):
                before[name] = x.detach()
                x = _applied(layer, x, **held)
                if not x.requires_grad:  # nothing before it is trained
                    x.requires_grad_()
                sources[name] = x
            else:
                x = layer(x)
        losses = _losses(loss, x, targets)
    found = dict(zip(sources, torch.autograd.grad(losses.sum(), list(sources.values())), strict=True))
    for name, layer in layers:
        if name in before:
            parts = _linear if isinstance(layer, nn.Linear) else convolution_gradients
            rows |= {_full(name, part): row for part, row in parts(layer, before[name], found[name]).items()}
    return [(rows | found)[name].reshape(examples, -1) for name in trained]


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


def _full(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _applied(layer: nn.Linear | nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(layer, nn.Linear):
        return functional.linear(x, weight, bias)
    return functional.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)


def _linear(layer: nn.Module, x: Tensor, backprops: Tensor) -> dict[str, Tensor]:
    """Weight: Σ over positions of backprops ⊗ input."""
    backprops, x = (part.reshape(len(part), -1, part.shape[-1]) for part in (backprops, x))
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
