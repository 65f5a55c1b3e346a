"""The node: hosts its share of the training examples, one user each, and answers with their clipped sum."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp

from fedcgd.gradients import ExampleLoss, example_loss
from fedcgd.noise.quantisation import Integers
from fedcgd_flower import LocalTask, host_users, one_gradient_step
from fedcgd_simulations.task import Examples
from fedcgd_simulations.tasks import get_task

app = ClientApp()


@lru_cache(maxsize=2)  # a simulated node answers many rounds in one process
def _material(task_name: str, model: str, data_dir: str) -> tuple[Examples, ExampleLoss]:
    torch.set_num_threads(1)  # one actor per core: more threads would fight for it
    task = get_task(task_name, model=model or None, data_dir=data_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = task.load().train
    return Examples(train.inputs.to(device), train.targets.to(device)), example_loss(
        task.model(0).to(device), task.loss
    )


def _of(context: Context) -> tuple[Examples, ExampleLoss]:
    config = context.run_config
    return _material(str(config["task"]), str(config["model"]), str(config["data-dir"]))


def _hosted(context: Context) -> Sequence[str]:
    """User i is training example i; node p of P hosts the users p, p + P, …"""
    examples, _ = _of(context)
    first, step = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    return [str(user) for user in range(first, len(examples), step)]


def _data(users: Sequence[str], context: Context) -> tuple[torch.Tensor, ...]:
    examples, _ = _of(context)
    rows = torch.tensor([int(user) for user in users], dtype=torch.long, device=examples.inputs.device)
    return examples.inputs[rows], examples.targets[rows]


def _clipped_sum(work: LocalTask, context: Context) -> tuple[Integers, int]:
    return one_gradient_step(_of(context)[1], _data)(work, context)


host_users(app, _hosted, _clipped_sum)
