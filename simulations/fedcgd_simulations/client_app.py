"""The node: hosts users, and answers with the sum of the clipped updates of those that it is asked for."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp

from fedcgd.clipping.per_sample_gradients import ExampleLoss, example_loss
from fedcgd.noise.quantisation import Integers
from fedcgd_flower import LocalTask, host_users, one_gradient_step, sequential_training
from fedcgd_simulations.local_training import LocalTraining, Part, train_many, train_one, vectorises
from fedcgd_simulations.partitions import Indices, partition
from fedcgd_simulations.process import settle
from fedcgd_simulations.settings import Settings
from fedcgd_simulations.task import Examples, Task
from fedcgd_simulations.tasks import get_task

app = ClientApp()

Material = tuple[Task, Examples, ExampleLoss]


@lru_cache(maxsize=2)  # a simulated node answers many rounds in one process
def _material(task_name: str, model: str, data_dir: str) -> Material:
    settle()
    task = get_task(task_name, model=model or None, data_dir=data_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = task.load().train
    moved = Examples(train.inputs.to(device), train.targets.to(device), train.users)
    return task, moved, example_loss(task.model(0).to(device), task.loss)


@lru_cache(maxsize=2)
def _parts(task_name: str, model: str, data_dir: str, users: str, seed: int) -> list[Indices]:
    examples = _material(task_name, model, data_dir)[1]
    return partition(users, Examples(examples.inputs, examples.targets.cpu(), examples.users), seed=seed)


def _named(config: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(config["task"]), str(config["model"]), str(config["data-dir"])


def _parts_of(config: Mapping[str, Any]) -> list[Indices]:
    return _parts(*_named(config), str(config["users"]), int(config["seed"]))


def examples_of(config: Mapping[str, Any]) -> tuple[Examples, Part]:
    """All training examples under a run configuration, and the rows of each user."""
    parts = _parts_of(config)
    return _material(*_named(config))[1], lambda user: parts[int(user)]


@lru_cache(maxsize=2)
def _names(first: int, users: int, step: int) -> AbstractSet[str]:
    return dict.fromkeys(map(str, range(first, users, step))).keys()


def _hosted(context: Context) -> AbstractSet[str]:
    """User i owns part i of the training examples. A simulated node can read them all, and hosts all users.

    A deployed node that is silo p of P, as its configuration says, hosts the users p, p + P, …
    """
    silo, silos = (int(context.node_config.get(name, default)) for name, default in (("silo", 0), ("silos", 1)))
    return _names(silo, len(_parts_of(context.run_config)), silos)


def _data(users: Sequence[str], context: Context) -> tuple[torch.Tensor, ...]:
    task, examples, _ = _material(*_named(context.run_config))
    row, copies = int(users[0]), int(context.run_config["augmentations"])
    inputs = task.augmented(examples.inputs[row : row + 1], copies)
    return inputs[None] if copies else inputs, examples.targets[row : row + 1]


def _mean_of_copies(loss: ExampleLoss) -> ExampleLoss:
    """The mean loss of an example's copies, whose gradient is clipped."""

    def mean(flat: torch.Tensor, copies: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.stack([loss(flat, copy, target) for copy in copies]).mean()

    return mean


def _local(context: Context) -> LocalTraining:
    return Settings.read(context.run_config).local


def _local_training(model: ArrayRecord, user: str, config: ConfigRecord, context: Context) -> ArrayRecord:
    task, (examples, part) = _material(*_named(context.run_config))[0], examples_of(context.run_config)
    return train_one(task, model, examples.take(part(user)), _local(context))


def _clipped_sum(work: LocalTask, context: Context) -> tuple[Integers, int]:
    """With local epochs all users at once where the model allows, else one by one; without, one gradient step of each."""
    task, _, loss = _material(*_named(context.run_config))
    if not int(context.run_config["local-epochs"]):
        augmented = int(context.run_config["augmentations"]) > 0
        return one_gradient_step(_mean_of_copies(loss) if augmented else loss, _data)(work, context)
    if vectorises(task.model(0)):
        return train_many(task, work, *examples_of(context.run_config), _local(context))
    return sequential_training(_local_training)(work, context)


host_users(app, _hosted, _clipped_sum, shared=True)
