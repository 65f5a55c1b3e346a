"""The reference that federated runs are held against: what the app does, in one process, with Opacus' per-example gradients."""

import warnings
from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from opacus import GradSampleModule
from torch import Tensor, nn

from fedcgd.clipping.flat_models import flatten, layout, unflatten
from fedcgd.clipping.per_sample_gradients import clip_rows, sum_in_steps
from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Lattice
from fedcgd.plan import Plan
from fedcgd.release import NoiseSource, lattice_of
from fedcgd.release.noise_source import LatticeNormals
from fedcgd_simulations.task import Examples, Task

Report = Callable[[int, nn.Module], None]
"""(round, model after that round); rounds are counted from 0."""


def train_central(
    task: Task,
    train: Examples,
    plan: Plan,
    batches: Iterable[NDArray[np.integer]],
    *,
    key: bytes,
    learning_rate: float,
    planned_cohort: float,
    seed: int,
    physical_batch: int = 256,
    report: Report | None = None,
) -> nn.Module:
    """The model after θ ← θ + learning_rate·(Σ_i clip(−g_i) + ζσ(C⁻¹Z)_t)/planned_cohort over each batch.

    The same key, batches and numbers as in a federated run with one example per user give the same model. `batches`
    holds one array of rows of `train` per round; the privacy stated by `plan` holds if they follow its participation.
    The nonces are those of a simulation: a `key` that is used for another run gives it the same noise.
    At most `physical_batch` gradients exist at once. Raises ValueError for more batches than the plan has rounds.
    """
    model = task.model(seed)
    sampled = GradSampleModule(model, loss_reduction="sum")
    flat = flatten(model).double()
    grid = lattice_of(plan, flat.numel())
    noise = NoiseSource(plan.mechanism, plan.participation.rounds, LatticeNormals(NoiseStream(key), grid))
    for round, batch in enumerate(batches):
        total = np.zeros(flat.numel(), np.int64)
        for start in range(0, len(batch), physical_batch):
            examples = train.take(batch[start : start + physical_batch])
            total -= gradient_sum(sampled, task, examples, plan.clip_norm, grid).numpy()
        noise.add(total, [0] * (round + 1), plan.stddev)
        flat += learning_rate / planned_cohort * torch.from_numpy(grid.from_steps(total))
        load_flat(model, flat.float())
        if report is not None:
            report(round, model)
    sampled.remove_hooks()
    return model


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
    clipped, _ = clip_rows(rows, clip_norm)
    sampled.zero_grad()
    return sum_in_steps(clipped, grid)


def load_flat(model: nn.Module, flat: Tensor) -> None:
    """Write a flat vector of shape (layout(model).size,) into the trained parameters of `model`, in place."""
    parts = unflatten(flat, layout(model))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in parts:
                parameter.copy_(parts[name])
