"""Local training of softmax regression for many users at once, without a model for each of them.

Under SGD the change of a linear model is a combination of the user's own inputs, W − W₀ = −Σ aᵢxᵢᵀ, so that all there is to
follow are the numbers aᵢ (one for each class): the outputs of a batch are those of W₀ minus inner products of inputs times a.
A cohort's weights, which a step would read and write again and again, are then made once, at the end.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcgd_simulations.models.softmax import UnitNorm
from fedcgd_simulations.task import cross_entropy

MOST_EXAMPLES = 128
"""Of one user: their inner products grow as the square of it."""


def is_softmax(model: nn.Module, loss: object) -> bool:
    """Whether `model` is `softmax_regression` and `loss` cross-entropy."""
    return (
        loss is cross_entropy
        and isinstance(model, nn.Sequential)
        and [type(layer) for layer in model] == [UnitNorm, nn.Linear]
    )


def trained_softmax(
    weight: Tensor,
    bias: Tensor,
    inputs: Tensor,
    targets: Tensor,
    counts: Tensor,
    orders: Sequence[Tensor],
    *,
    batch: int,
    learning_rate: float,
    proximal: float,
) -> tuple[Tensor, Tensor]:
    """(weights, biases) of each user after SGD from (`weight`, `bias`), shapes (users, classes, features) and (users, classes).

    Row j of `inputs` and `targets`, shapes (users, examples, …) and (users, examples), is example j of a user, who has `counts`
    of them; what comes after those may be anything finite. An epoch of user u goes through its examples in the order that the
    first of row u of one of `orders` are, shape (users, examples).
    """
    device, places = inputs.device, torch.arange(inputs.shape[1])
    rows = functional.pad(functional.normalize(inputs.flatten(2), dim=2), (0, 1), value=1.0)  # with a one for the bias
    first = rows @ torch.cat([weight, bias[:, None]], dim=1).T
    products = rows @ rows.mT
    marks = functional.one_hot(targets, len(bias)).to(rows.dtype)
    there = (places < counts[:, None]).to(rows.dtype)
    changes = torch.zeros_like(first)
    for order in orders:
        for places_now, there_now in zip(
            torch.split(order, batch, dim=1), torch.split(there, batch, dim=1), strict=True
        ):
            taken, now = there_now.sum(1).to(device), places_now.to(device)[:, :, None]
            shares = there_now.to(device) / taken.clamp(min=1)[:, None]
            near = products.gather(1, now.expand(-1, -1, rows.shape[1]))
            now = now.expand(-1, -1, len(bias))
            outputs = first.gather(1, now) - near @ changes
            residuals = (outputs.softmax(dim=2) - marks.gather(1, now)) * shares[:, :, None]
            if proximal:  # who has no batch left stays where it is
                changes *= (1 - learning_rate * proximal * (taken > 0))[:, None, None]
            changes.scatter_add_(1, now, learning_rate * residuals)
    moved = changes.mT @ rows
    return weight - moved[:, :, :-1], bias - moved[:, :, -1]
