"""Low-rank adaptation (LoRA, arXiv:2106.09685): a big layer stays as it is, and a small product is trained next to it."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


class LoRALinear(nn.Module):
    """x ↦ linear(x) + up(down(x))·(alpha/rank), with `linear` frozen and `up` starting at zero."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.linear = linear
        for parameter in linear.parameters():
            parameter.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        with torch.no_grad():
            self.up.weight.zero_()
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.linear(x) + self.scale * self.up(self.down(x))
        return adapted


def add_lora(
    model: nn.Module, *, rank: int, adapt: Callable[[str], bool], train: Callable[[str], bool], alpha: float = 16.0
) -> nn.Module:
    """`model` with everything frozen but LoRA of `rank` on linear layers that `adapt` names, and what `train` names.

    Changes `model` in place. At the start its outputs are what they were. Raises ValueError if no layer is adapted.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(train(name))
    chosen = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear) and adapt(name)]
    if not chosen:
        raise ValueError("no linear layer of the model was chosen for LoRA")
    for name, linear in chosen:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LoRALinear(linear, rank, alpha))
    return model
