"""The node's part, a module of its own: a deployed node is a new process for each message, and imports it each time."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp

from fedcgd.clipping.per_sample_gradients import example_loss
from fedcgd_flower import host_users, one_gradient_step
from fedcgd_load.network import CLASSES, FEATURES, network

client = ClientApp()


@cache
def _material(users: int) -> tuple[torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(users, FEATURES, generator=generator)
    targets = torch.randint(CLASSES, (users,), generator=generator)
    return inputs, targets, example_loss(network(), torch.nn.CrossEntropyLoss(reduction="none"))


def _hosted(context: Context) -> Sequence[str]:
    """Node p of P hosts the users p, p + P, …"""
    users, nodes = int(context.run_config["users"]), int(context.run_config["nodes"])
    return [f"user-{i:06d}" for i in range(int(context.node_config["partition-id"]), users, nodes)]


def _clipped_sum(work: Any, context: Context) -> Any:
    inputs, targets, loss = _material(int(context.run_config["users"]))

    def data(users: Sequence[str], context: Context) -> tuple[torch.Tensor, ...]:
        rows = torch.tensor([int(user.removeprefix("user-")) for user in users], dtype=torch.long)
        return inputs[rows], targets[rows]

    return one_gradient_step(loss, data)(work, context)


host_users(client, _hosted, _clipped_sum)
