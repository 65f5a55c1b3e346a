"""Softmax regression for many mechanisms, budgets and learning rates at once, as the Opacus engine trains it."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedcgd.keys import NoiseKey
from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.streaming import inverse_rows
from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import SMOOTHING, Grid, add_values
from fedcgd.opacus.batches import RoundBatches
from fedcgd.opacus.clipping import MARGIN
from fedcgd.opacus.optimizer import RoundNoise
from fedcgd.opacus.rounds import Rounds
from fedcgd.parameters import flatten
from fedcgd.plan import Plan
from fedcgd_experiments.descent import Descent, descent
from fedcgd_simulations.task import Examples

_WORDS = 2.0**31 / SMOOTHING
"""The standard deviation, in steps of the grid, whose smoothing is the words of the keystream themselves."""


def train_softmax(
    model: nn.Module, train: Examples, runs: Sequence[tuple[Plan, Descent]], *, key: NoiseKey, steps: int
) -> Tensor:
    """Flat parameters, shape (len(runs), d), float32: `model` trained by each plan in its way, all on the same batches and Z.

    Batches, Z, its correlation, its grid and its smoothing are the engine's; made otherwise are the sums of clipped gradients,
    from ‖g_i‖ = ‖onehot − softmax‖·√(‖x_i‖² + 1), in float32, and C⁻¹Z, for all rounds in one product. Up to that rounding each
    row is what the engine trains. A simulation key's Z does not depend on the sums, so that one serves them all. Raises
    ValueError for another key, and for plans of other rounds or another clip norm.
    """
    plan = runs[0][0]
    if not key.simulated:
        raise ValueError("these runs share their noise, which a secret key forbids; use NoiseKey.simulation")
    if any((other.participation, other.clip_norm) != (plan.participation, plan.clip_norm) for other, _ in runs):
        raise ValueError("plans that are trained together may differ by mechanism and noise multiplier alone")
    linear = list(model)[1] if isinstance(model, nn.Sequential) else model
    assert isinstance(linear, nn.Linear)
    rounds, classes, weights = plan.participation.rounds, linear.out_features, linear.weight.numel()
    inputs = functional.normalize(train.inputs.flatten(1), dim=1)
    lengths = (inputs.square().sum(dim=1) + 1).sqrt()

    # Rows in the order of their learning rates, so that the optimiser has one parameter for each rate.
    rates = [how.learning_rate for _, how in runs]
    order = sorted(range(len(runs)), key=rates.__getitem__)
    ways = {runs[i][1].learning_rate: runs[i][1] for i in order}
    models = flatten(model).repeat(len(runs), 1)
    parts = [nn.Parameter(part) for part in torch.split(models, [rates.count(rate) for rate in ways])]  # views
    optimizer, scheduler = descent(list(ways.values()), [[part] for part in parts], rounds)

    noise = _Noise([runs[i][0] for i in order], key, models.shape[1])
    choices, none = (lambda: key.choices_of("")), Rounds(plan, "", 1 / steps)
    batches = RoundBatches(plan.participation, len(train), steps, choices, none)
    aim, expected = plan.clip_norm * (1 - MARGIN), len(train) / steps
    for round in range(rounds):
        batch = torch.from_numpy(batches.batch(round))
        x, y = inputs[batch], train.targets[batch]
        with torch.no_grad():
            logits = torch.addmm(models[:, weights:].reshape(-1), x, models[:, :weights].reshape(-1, x.shape[1]).T)
            residuals = logits.view(len(x), len(runs), classes).softmax(dim=2).neg_()
            residuals += functional.one_hot(y, classes)[:, None, :]
            norms = residuals.norm(dim=2).mul_(lengths[batch][:, None])
            residuals *= (aim / norms).clamp_(max=1.0)[:, :, None]
            flat = residuals.view(len(x), -1)
            sums = torch.cat([(flat.T @ x).view(len(runs), -1), flat.sum(0).view(len(runs), -1)], dim=1)
            gradients = noise.added(sums.double(), round).div_(expected).float()
        for part, gradient in zip(parts, torch.split(gradients, [len(part) for part in parts]), strict=True):
            part.grad = gradient
        optimizer.step()
        scheduler.step()
    trained = torch.empty_like(models)
    trained[torch.tensor(order)] = models
    return trained


class _Noise:
    """ζσ·C⁻¹Z of several plans under one simulation key, for sums of `size` entries, as `RoundNoise` adds it."""

    def __init__(self, plans: Sequence[Plan], key: NoiseKey, size: int) -> None:
        rounds = plans[0].participation.rounds
        self._step = RoundNoise(plans[0], key, size, None).grid.step
        stream = NoiseStream(key.noise_of(""))
        z = np.stack([stream.normal(round, 0, 0, size) for round in range(rounds)])
        self._words = np.zeros((rounds, size), np.int64)
        for round in range(rounds):
            add_values(self._words[round], np.zeros(size), stream, (round, 0, 1.0), _WORDS, Grid(1.0))
        kinds: dict[str, Mechanism] = {repr(_described(plan)): plan.mechanism for plan in plans}
        self._correlated = np.stack([inverse_of(mechanism, rounds) @ z for mechanism in kinds.values()], axis=1)
        pairs = [(list(kinds).index(repr(_described(plan))), plan.stddev) for plan in plans]
        different = list(dict.fromkeys(pairs))
        self._kind = np.array([kind for kind, _ in different])
        self._stddev = np.array([stddev for _, stddev in different])[:, None]
        self._of_row = torch.tensor([different.index(pair) for pair in pairs])

    def added(self, sums: Tensor, round: int) -> Tensor:
        """`sums` (one row a plan, float64) on the grid, plus each plan's noise of `round`."""
        spread = self._stddev / self._step
        noise = np.rint(self._correlated[round][self._kind] * spread + self._words[round] * (spread / _WORDS))
        return sums.div_(self._step).round_().add_(torch.from_numpy(noise)[self._of_row]).mul_(self._step)


def _described(plan: Plan) -> object:
    return plan.to_description()["mechanism"]


def inverse_of(mechanism: Mechanism, rounds: int) -> NDArray[np.float32]:
    """C⁻¹, shape (n, n)."""
    inverse = np.zeros((rounds, rounds), np.float32)
    for row, (first, entries) in zip(inverse, inverse_rows(mechanism, rounds), strict=True):
        row[first : first + len(entries)] = entries
    return inverse
