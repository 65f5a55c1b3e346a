"""Softmax regression at many learning rates at once: what the Opacus engine trains, in a tenth of its time."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcgd.keys import NoiseKey
from fedcgd.opacus.batches import RoundBatches
from fedcgd.opacus.clipping import MARGIN
from fedcgd.opacus.optimizer import RoundNoise
from fedcgd.opacus.rounds import Rounds
from fedcgd.parameters import flatten
from fedcgd.plan import Plan
from fedcgd_experiments.descent import Descent, descent
from fedcgd_simulations.models.softmax import UnitNorm
from fedcgd_simulations.task import Examples, cross_entropy


def is_softmax(model: nn.Module, loss: object) -> bool:
    """Whether `train_softmax` can train `model`: `softmax_regression` with cross-entropy."""
    return (
        loss is cross_entropy
        and isinstance(model, nn.Sequential)
        and [type(layer) for layer in model] == [UnitNorm, nn.Linear]
    )


def train_softmax(
    model: nn.Module, train: Examples, plan: Plan, how: Sequence[Descent], *, key: NoiseKey, steps: int
) -> Tensor:
    """Flat parameters, shape (len(how), d), float32: `model` trained once in each way of `how`, all on the same rounds.

    The batches, the noise and its grid are the engine's: only the sums of the clipped gradients are made otherwise, from
    ‖g_i‖ = ‖onehot − softmax‖·√(‖x_i‖² + 1), in float32. Up to that rounding each row is what the engine trains. As the key is a
    simulation's, its noise does not depend on the sum, so that one round's noise serves them all. Raises ValueError for another
    key.
    """
    if not key.simulated:
        raise ValueError("these runs share their noise, which a secret key forbids; use NoiseKey.simulation")
    linear = list(model)[1] if isinstance(model, nn.Sequential) else model
    assert isinstance(linear, nn.Linear)
    classes, weights = linear.out_features, linear.out_features * linear.in_features
    inputs = functional.normalize(train.inputs.flatten(1), dim=1)
    lengths = (inputs.square().sum(dim=1) + 1).sqrt()
    models = flatten(model).repeat(len(how), 1)
    rows = [nn.Parameter(row) for row in models]  # views: what moves a row moves `models`
    optimizer, scheduler = descent(how, [[row] for row in rows], plan.participation.rounds)
    noise = RoundNoise(plan, key, models.shape[1], None)
    batches = RoundBatches(
        plan.participation, len(train), steps, lambda: key.choices_of(""), Rounds(plan, "", 1 / steps)
    )
    aim, expected = plan.clip_norm * (1 - MARGIN), len(train) / steps
    nonces: list[int] = []
    for round in range(plan.participation.rounds):
        batch = torch.from_numpy(batches.batch(round))
        x, y = inputs[batch], train.targets[batch]
        with torch.no_grad():
            logits = torch.addmm(models[:, weights:].reshape(-1), x, models[:, :weights].reshape(-1, x.shape[1]).T)
            residuals = -logits.view(len(x), len(how), classes).softmax(dim=2)
            residuals += functional.one_hot(y, classes)[:, None, :]
            norms = residuals.norm(dim=2) * lengths[batch][:, None]
            residuals *= (aim / norms).clamp(max=1.0)[:, :, None]
            flat = residuals.view(len(x), -1)
            sums = torch.cat([(flat.T @ x).view(len(how), weights), flat.sum(0).view(len(how), classes)], dim=1)
            released = torch.zeros(models.shape[1], dtype=torch.float64)
            nonces.append(noise.add(released, "", nonces))
            released = (sums.double() / noise.grid.step).round_() * noise.grid.step + released
            gradients = (released / expected).float()
        for row, gradient in zip(rows, gradients, strict=True):
            row.grad = gradient
        optimizer.step()
        scheduler.step()
    return models
