"""The node: hosts its share of the users, and answers with the sum of their clipped updates."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp

from fedcgd.gradients import ExampleLoss, example_loss
from fedcgd.noise.quantisation import Integers
from fedcgd_flower import LocalTask, arrays_of, host_users, load_arrays, one_by_one, one_gradient_step
from fedcgd_simulations.partitions import Indices, partition
from fedcgd_simulations.task import Examples, Task
from fedcgd_simulations.tasks import get_task

app = ClientApp()

Material = tuple[Task, Examples, ExampleLoss]


@lru_cache(maxsize=2)  # a simulated node answers many rounds in one process
def _material(task_name: str, model: str, data_dir: str) -> Material:
    torch.set_num_threads(1)  # one actor per core: more threads would fight for it
    task = get_task(task_name, model=model or None, data_dir=data_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = task.load().train
    moved = Examples(train.inputs.to(device), train.targets.to(device), train.users)
    return task, moved, example_loss(task.model(0).to(device), task.loss)


@lru_cache(maxsize=2)
def _parts(task_name: str, model: str, data_dir: str, users: str, seed: int) -> list[Indices]:
    examples = _material(task_name, model, data_dir)[1]
    return partition(users, Examples(examples.inputs, examples.targets.cpu(), examples.users), seed=seed)


def _named(context: Context) -> tuple[str, str, str]:
    config = context.run_config
    return str(config["task"]), str(config["model"]), str(config["data-dir"])


def _parts_of(context: Context) -> list[Indices]:
    config = context.run_config
    return _parts(*_named(context), str(config["users"]), int(config["seed"]))


def _hosted(context: Context) -> Sequence[str]:
    """User i owns part i of the training examples; node p of P hosts the users p, p + P, …"""
    first, step = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    return [str(user) for user in range(first, len(_parts_of(context)), step)]


def _data(users: Sequence[str], context: Context) -> tuple[torch.Tensor, ...]:
    _, examples, _ = _material(*_named(context))
    rows = torch.tensor([int(user) for user in users], dtype=torch.long, device=examples.inputs.device)
    return examples.inputs[rows], examples.targets[rows]


def _local_training(model: ArrayRecord, user: str, config: ConfigRecord, context: Context) -> ArrayRecord:
    """The model after `local-epochs` passes of SGD over the user's own examples, in batches of `local-batch`."""
    task, examples, _ = _material(*_named(context))
    settings = context.run_config
    mine = examples.take(_parts_of(context)[int(user)])
    local = task.model(0).to(mine.inputs.device)
    load_arrays(local, model)
    rate = float(settings["local-learning-rate"])
    optimizer = torch.optim.SGD((p for p in local.parameters() if p.requires_grad), lr=rate)
    for _ in range(int(settings["local-epochs"])):
        for rows in torch.split(torch.randperm(len(mine)), int(settings["local-batch"])):
            optimizer.zero_grad()
            task.loss(local(mine.inputs[rows]), mine.targets[rows]).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return arrays_of(local)


def _clipped_sum(work: LocalTask, context: Context) -> tuple[Integers, int]:
    if int(context.run_config["local-epochs"]):
        return one_by_one(_local_training)(work, context)
    return one_gradient_step(_material(*_named(context))[2], _data)(work, context)


host_users(app, _hosted, _clipped_sum)
