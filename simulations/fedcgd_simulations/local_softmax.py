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


def with_bias(inputs: Tensor) -> Tensor:
    """What the linear layer sees of `inputs`, shape (…, users, examples, features), and a one for its bias."""
    return functional.pad(functional.normalize(inputs, dim=-1), (0, 1), value=1.0)


def coefficients(
    first: Tensor,
    products: Tensor,
    targets: Tensor,
    counts: Tensor,
    orders: Sequence[Tensor],
    *,
    batch: int,
    learning_rate: float,
    proximal: float,
) -> Tensor:
    """The a of each example after SGD in steps of `batch` examples, with FedProx' µ, shape (users, examples, classes).

    `first` has the outputs that all examples have before training, in that shape, and `products` the inner products of each
    user's inputs, shape (users, examples, examples). `targets` has shape (users, examples); a user has `counts` of them, and what
    comes after those may be anything finite. An epoch of user u goes through its examples in the order that the first of row u of
    one of `orders` are, shape (users, examples).
    """
    device = first.device
    marks = functional.one_hot(targets, first.shape[2]).to(first.dtype)
    there = (torch.arange(first.shape[1]) < counts[:, None]).to(first.dtype)
    changes = torch.zeros_like(first)
    users = torch.arange(len(first), device=device)[:, None]
    for order in orders:
        for chosen, real in zip(torch.split(order, batch, dim=1), torch.split(there, batch, dim=1), strict=True):
            rows, taken = (users, chosen.to(device)), real.sum(1).to(device)
            shares = learning_rate * real.to(device) / taken.clamp(min=1)[:, None]
            outputs = first[rows] - products[rows] @ changes
            residuals = (outputs.softmax(2) - marks[rows]) * shares[:, :, None]
            if proximal:  # who has no batch left stays where it is
                changes *= 1 - learning_rate * proximal * (taken > 0)[:, None, None]
            changes.index_put_(rows, residuals, accumulate=True)  # places without an example may come twice
    return changes
