"""The sum of clipped gradients by its definition: one backward pass for each example."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def clipped_sum(
    model: nn.Module,
    examples: Iterable[tuple[Tensor, Tensor]],
    clip_norm: float,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> Tensor:
    """Σ_i min(1, ζ/‖g_i‖)·g_i of what `model` trains, shape (d,), float64."""
    trained = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in trained), dtype=torch.float64)
    for inputs, target in examples:
        model.zero_grad()
        loss(model(inputs[None]), target[None]).sum().backward()
        gradient = torch.cat([p.grad.reshape(-1).double() for p in trained])
        total += gradient * min(1.0, clip_norm / float(gradient.norm()))
    return total
