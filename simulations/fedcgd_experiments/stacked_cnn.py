"""Many copies of a convolutional network, trained side by side from many seeds, by descent with correlated noise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcgd_experiments.batched_descent import Rounds, padded, participants

Note = Callable[[Tensor, Callable[[Tensor], Tensor]], None]
"""Takes the output of a layer with weights, and what makes gradients of its weights, by example, of those of that output."""
_AT_ONCE = 3072
"""Examples, over all copies, whose gradients are held at once: some 20 GB."""
_ROUNDING = 2.0**-7
"""By how much numbers with 8 bits may lengthen a gradient: clipping is to a norm as much smaller."""


@dataclass(frozen=True)
class Copy:
    """How one copy is trained: who takes part, σζ·C⁻¹ as the weights of the Z of this and of earlier rounds, rates, seed."""

    when: Rounds
    taps: tuple[float, ...]
    rates: Sequence[float]
    seed: int


@dataclass(frozen=True)
class Trainable:
    """Pictures and labels on a device, the network whose copies are trained on them, its clip norm, and the type of products."""

    inputs: Tensor
    labels: Tensor
    network: Callable[[int], nn.Module]
    clip_norm: float
    dtype: torch.dtype = torch.float32


@torch.no_grad()
def trained(data: Trainable, copies: Sequence[Copy], after: Callable[[int], None] = lambda _: None) -> Tensor:
    """The parameters of all copies, which have as many rounds: shape (copies, d). `after` hears how many are over.

    Copies of a seed share the start and Z, and those that take part alike their batches.
    """
    device, users = data.inputs.device, len(data.labels)
    seeds = list(dict.fromkeys(copy.seed for copy in copies))
    of_seed = torch.tensor([seeds.index(copy.seed) for copy in copies], device=device)
    starts = [nn.utils.parameters_to_vector(data.network(seed).parameters()) for seed in seeds]
    weights = torch.stack(starts).to(device)[of_seed]
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    drawn = list(dict.fromkeys((copy.when, copy.seed) for copy in copies))
    of_draw = torch.tensor([drawn.index((copy.when, copy.seed)) for copy in copies], device=device)
    coming = zip(*(participants(users, when, seed) for when, seed in drawn), strict=True)
    longest = max(len(copy.taps) for copy in copies)
    taps = torch.tensor([(*copy.taps, *[0.0] * (longest - len(copy.taps))) for copy in copies], device=device)
    rates = torch.tensor([tuple(copy.rates) for copy in copies], device=device)
    expected = torch.tensor([users / copy.when.steps for copy in copies], device=device)
    model, past = data.network(0).to(device), list[Tensor]()
    for t, chosen in enumerate(coming):
        z = torch.stack([torch.randn(weights.shape[1], generator=one, device=device) for one in generators])
        past = [z, *past[: longest - 1]]
        total = sum(taps[:, k, None] * earlier[of_seed] for k, earlier in enumerate(past))
        rows, present = (each[of_draw] for each in padded(chosen, str(device)))
        for part in torch.arange(rows.shape[1], device=device).tensor_split(-(-rows.numel() // _AT_ONCE)):
            here = rows[:, part]
            total = total + clipped_sums(model, weights, data, here, present[:, part])
        weights -= (rates[:, t] / expected)[:, None] * total
        after(t + 1)
    return weights


def clipped_sums(model: nn.Module, weights: Tensor, data: Trainable, rows: Tensor, present: Tensor) -> Tensor:
    """The sums of the clipped gradients of each copy's rows, shape (copies, d)."""
    outputs, by_example = list[Tensor](), list[Callable[[Tensor], Tensor]]()

    def note(output: Tensor, gradients: Callable[[Tensor], Tensor]) -> None:
        outputs.append(output if output.requires_grad else output.requires_grad_())
        by_example.append(gradients)

    with torch.enable_grad():
        logits = forward(model, weights.to(data.dtype), data.inputs[rows].to(data.dtype), note)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), data.labels[rows].flatten(), reduction="sum")
        slopes = torch.autograd.grad(loss, outputs)
    parts = [gradients(slope).flatten(2) for gradients, slope in zip(by_example, slopes, strict=True)]
    squares = torch.stack([torch.linalg.vector_norm(part, dim=2, dtype=torch.float32).square() for part in parts])
    norms = squares.sum(0).sqrt() * (1.0 if data.dtype is torch.float32 else 1 + _ROUNDING)
    scale = present * (data.clip_norm / norms).clamp(max=1)
    return torch.cat([torch.einsum("mb,mbk->mk", scale, part.float()) for part in parts], dim=1)


def forward(model: nn.Module, weights: Tensor, x: Tensor, note: Note = lambda *_: None) -> Tensor:
    """The outputs of each copy for its own rows, shape (copies, rows, classes): a layer with weights is a product for each copy.

    Args:
        model: layers in a row: convolutions of 3 × 3 with a border, GroupNorm, dense ones, and any without weights.
        weights: shape (copies, d).
        x: shape (copies, rows, channels, height, width).
        note: is told of each layer with weights.
    """
    sizes = [parameter.shape for parameter in model.parameters()]
    parts = torch.split(weights, [size.numel() for size in sizes], dim=1)
    own = iter([part.reshape(len(weights), *size) for part, size in zip(parts, sizes, strict=True)])
    for layer in model.children():
        if isinstance(layer, nn.Conv2d):
            columns, size = _columns(x), x.shape[-2:]
            x = next(own).flatten(2)[:, None] @ columns
            note(x, partial(_of_convolution, columns.detach()))
            x = x.reshape(*x.shape[:3], *size)
        elif isinstance(layer, nn.GroupNorm):
            normal = functional.group_norm(x.flatten(0, 1), layer.num_groups, eps=layer.eps).view_as(x)
            scale, shift = (next(own)[:, None, :, None, None] for _ in range(2))
            x = normal * scale + shift
            note(x, partial(_of_norm, normal.detach()))
        elif isinstance(layer, nn.Linear):
            inputs = x.detach()
            x = x @ next(own).mT + next(own)[:, None]
            note(x, partial(_of_dense, inputs))
        else:
            made = layer(x.flatten(0, 1))
            x = made.reshape(*x.shape[:2], *made.shape[1:])
    return x


def _columns(x: Tensor) -> Tensor:
    """What each pixel's 3 × 3 neighbours are, shape (copies, rows, 9·channels, pixels)."""
    near = functional.pad(x, (1, 1, 1, 1)).unfold(3, 3, 1).unfold(4, 3, 1)  # …, height, width, 3, 3
    return near.permute(0, 1, 2, 5, 6, 3, 4).reshape(*x.shape[:2], 9 * x.shape[2], -1)


def _of_convolution(columns: Tensor, slope: Tensor) -> Tensor:
    return slope @ columns.mT


def _of_norm(normal: Tensor, slope: Tensor) -> Tensor:
    return torch.cat([(slope * normal).sum((3, 4)), slope.sum((3, 4))], dim=2)


def _of_dense(inputs: Tensor, slope: Tensor) -> Tensor:
    return torch.cat([(slope[..., None] * inputs[:, :, None]).flatten(2), slope], dim=2)


@torch.no_grad()
def accuracies(data: Trainable, weights: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """The part of the labels that each copy names, shape (copies,)."""
    model, right = data.network(0), torch.zeros(len(weights), device=weights.device)
    parts = -(-len(labels) * len(weights) // (2 * _AT_ONCE))
    for x, y in zip(inputs.tensor_split(parts), labels.tensor_split(parts), strict=True):
        shared = x.to(data.dtype).expand(len(weights), *x.shape)
        right += (forward(model, weights.to(data.dtype), shared).argmax(2) == y).sum(1)
    return right / len(labels)
