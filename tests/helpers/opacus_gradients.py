"""Sums of clipped gradients by Opacus' per-example gradients, and models that are loaded from flat vectors."""

import warnings

import torch
from opacus import GradSampleModule
from torch import Tensor, nn

from fedcgd.clipping.flat_models import layout, unflatten
from fedcgd.clipping.per_sample_gradients import add_clipped_rows
from fedcgd.noise.quantisation import Lattice
from fedcgd_simulations.task import Examples, Task


def gradient_sum(sampled: GradSampleModule, task: Task, examples: Examples, clip_norm: float, grid: Lattice) -> Tensor:
    """Σ_i clip(g_i) over `examples` in steps of `grid`, each rounded towards zero, shape (d,), int64.

    An example whose gradient is not finite adds zero.
    """
    sampled.zero_grad()
    with warnings.catch_warnings():
        # The hooks of Opacus sit on layers whose input is data and needs no gradient; torch tells at every step.
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        task.loss(sampled(examples.inputs), examples.targets).sum().backward()  # type: ignore[no-untyped-call]
    rows = torch.cat([p.grad_sample.reshape(len(examples), -1) for p in sampled.parameters() if p.requires_grad], dim=1)
    sampled.zero_grad()
    total = torch.zeros(rows.shape[1], dtype=torch.int64)
    add_clipped_rows(total, [rows], torch.ones(len(rows), dtype=torch.bool), clip_norm, grid)
    return total


def load_flat(model: nn.Module, flat: Tensor) -> None:
    """Write a flat vector of shape (layout(model).size,) into the trained parameters of `model`, in place."""
    parts = unflatten(flat, layout(model))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in parts:
                parameter.copy_(parts[name])
