"""Softmax regression for many mechanisms, budgets and learning rates at once, as the Opacus engine trains it."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedcgd.central.batches import parts_of
from fedcgd.central.releases import GRID_LOSS
from fedcgd.clipping.flat_models import flatten
from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.streaming import inverse_rows
from fedcgd.noise import NoiseStream
from fedcgd.noise.keys import NoiseKey
from fedcgd.noise.quantisation import DITHER, Lattice, add_values
from fedcgd.opacus.clipped_sum import MARGIN
from fedcgd.participation.batches import ExampleRounds
from fedcgd.plan import Plan
from fedcgd.release import lattice_of
from fedcgd_experiments.point import Descent
from fedcgd_simulations.task import Examples

_WORDS = 2.0**31 / DITHER
"""The standard deviation, in steps of the grid, whose smoothing is the words of the keystream themselves."""


@torch.no_grad()
def train_softmax(
    model: nn.Module, train: Examples, runs: Sequence[tuple[Plan, Descent]], *, key: NoiseKey, steps: int
) -> Tensor:
    """Flat parameters, shape (len(runs), d), float32: `model` trained by each plan in its way, all on the same batches and Z.

    Batches, Z, its correlation, its grid and its smoothing are the engine's; made otherwise are the sums of clipped gradients,
    from ‖g_i‖ = ‖onehot − softmax‖·√(‖x_i‖² + 1), in float32, and C⁻¹Z, for all rounds in one product. Up to that rounding each
    row is what the engine trains. A simulation key's Z does not depend on the sums, so that one serves them all. Raises
    ValueError for another key, and for plans of other participations.
    """
    plan = runs[0][0]
    if not key.simulated:
        raise ValueError("these runs share their noise, which a secret key forbids; use NoiseKey.simulation")
    if any(other.participation != plan.participation for other, _ in runs):
        raise ValueError("plans that are trained together must have the same participation, and so the same batches")
    linear = list(model)[1] if isinstance(model, nn.Sequential) else model
    assert isinstance(linear, nn.Linear)
    rounds, classes, weights = plan.participation.rounds, linear.out_features, linear.weight.numel()
    inputs = functional.normalize(train.inputs.flatten(1), dim=1)
    lengths = (inputs.square().sum(dim=1) + 1).sqrt()
    models = flatten(model).repeat(len(runs), 1)
    move = _moves(models, [how for _, how in runs], rounds)
    norms = torch.tensor([plan.clip_norm * (1 - MARGIN) for plan, _ in runs])
    noise = _Noise([plan for plan, _ in runs], key, models.shape[1])
    parts = parts_of(plan.participation, len(train))
    batches = ExampleRounds(plan.participation, len(train), key.choices_of(""), parts)
    expected = len(train) / steps
    for round in range(rounds):
        batch = torch.from_numpy(batches.rows(round))
        x, y = inputs[batch], train.targets[batch]
        logits = torch.addmm(models[:, weights:].reshape(-1), x, models[:, :weights].reshape(-1, x.shape[1]).T)
        residuals = logits.view(len(x), len(runs), classes).softmax(dim=2).neg_()
        residuals += functional.one_hot(y, classes)[:, None, :]
        gradients = residuals.norm(dim=2).mul_(lengths[batch][:, None])
        residuals *= (norms / gradients).clamp_(max=1.0)[:, :, None]
        flat = residuals.view(len(x), -1)
        sums = torch.cat([(flat.T @ x).view(len(runs), -1), flat.sum(0).view(len(runs), -1)], dim=1)
        move(noise.added(sums.double(), round).div_(expected).float(), round)
    return models


def _moves(models: Tensor, ways: Sequence[Descent], rounds: int) -> Callable[[Tensor, int], None]:
    """(gradients, round) → None: moves each row of `models`, in place, in its own way."""
    velocities, momenta = torch.zeros_like(models), torch.tensor([how.momentum for how in ways])[:, None]

    def descend(gradients: Tensor, round: int) -> None:
        velocities.mul_(momenta).add_(gradients)
        models.addcmul_(velocities, torch.tensor([how.rate(round, rounds) for how in ways])[:, None])

    return descend


class _Noise:
    """ζσ·C⁻¹Z of several plans under one simulation key, for sums of `size` entries, as `Releases` adds it."""

    def __init__(self, plans: Sequence[Plan], key: NoiseKey, size: int) -> None:
        rounds = plans[0].participation.rounds
        grids = {plan.clip_norm: lattice_of(plan, size, relative_loss=GRID_LOSS).step for plan in plans}
        stream = NoiseStream(key.noise_of(""))
        self._words = np.zeros((rounds, size), np.int64)
        for round in range(rounds):
            add_values(self._words[round], np.zeros(size), stream, (round, 0, 1.0), _WORDS, Lattice(1.0))
        kinds = {id(plan.mechanism): plan.mechanism for plan in plans}
        z = np.stack([stream.normal(round, 0, 0, size) for round in range(rounds)])
        self._correlated = np.stack([inverse_of(mechanism, rounds) @ z for mechanism in kinds.values()], axis=1)
        place = {name: i for i, name in enumerate(kinds)}
        triples = [(place[id(plan.mechanism)], plan.stddev, grids[plan.clip_norm]) for plan in plans]
        different = {triple: i for i, triple in enumerate(dict.fromkeys(triples))}
        self._kind = np.array([kind for kind, _, _ in different])
        self._spread = np.array([stddev / step for _, stddev, step in different])[:, None]
        self._of_row = torch.tensor([different[triple] for triple in triples])
        self._step = torch.tensor([step for _, _, step in triples], dtype=torch.float64)[:, None]

    def added(self, sums: Tensor, round: int) -> Tensor:
        """`sums` (one row a plan, float64) on the grid, plus each plan's noise of `round`."""
        smoothing = self._words[round] * (self._spread / _WORDS)
        noise = np.rint(self._correlated[round][self._kind] * self._spread + smoothing)
        return sums.div_(self._step).round_().add_(torch.from_numpy(noise)[self._of_row]).mul_(self._step)


def inverse_of(mechanism: Mechanism, rounds: int) -> NDArray[np.float32]:
    """C⁻¹, shape (n, n)."""
    inverse = np.zeros((rounds, rounds), np.float32)
    for row, (first, entries) in zip(inverse, inverse_rows(mechanism, rounds), strict=True):
        row[first : first + len(entries)] = entries
    return inverse
