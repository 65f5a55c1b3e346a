"""What a task is: data, a model, a loss and a metric."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

DATA_VARIABLE = "FEDCGD_DATA"


@dataclass(frozen=True)
class Examples:
    """Row i of `inputs` with `targets[i]`; `users[i]` is who it belongs to, where the data says so."""

    inputs: Tensor
    targets: Tensor
    users: NDArray[np.str_] | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: NDArray[np.integer]) -> "Examples":
        """The examples at `indices`, in that order."""
        rows = torch.as_tensor(np.ascontiguousarray(indices), dtype=torch.long)
        users = None if self.users is None else self.users[indices]
        return Examples(self.inputs[rows], self.targets[rows], users)


@dataclass(frozen=True)
class Data:
    """Training examples, validation examples (for tuning), and test examples (to be looked at once)."""

    train: Examples
    validation: Examples
    test: Examples


@dataclass(frozen=True)
class Task:
    """A learning problem. `load` reads the data, `model(seed)` makes the initial model, the same one for the same seed.

    `loss` and `metric` take a batch of outputs and of targets, and return one number per example: what training
    lowers, and what is reported (its mean, for example the share of correct labels).
    """

    name: str
    load: Callable[[], Data]
    model: Callable[[int], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    metric: Callable[[Tensor, Tensor], Tensor]


def classification(name: str, load: Callable[[], Data], model: Callable[[], nn.Module]) -> Task:
    """A task with cross-entropy as its loss and accuracy as its metric; `model()` draws from torch's global seed."""
    return Task(name, load, lambda seed: seeded(seed, model), cross_entropy, accuracy)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(outputs)[target], shape (batch,)."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest output is the target's, else 0, shape (batch,)."""
    return (outputs.argmax(dim=1) == targets).float()


def seeded(seed: int, model: Callable[[], nn.Module]) -> nn.Module:
    """`model()` made under `seed`, without touching the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model()


def evaluate(model: nn.Module, task: Task, examples: Examples, *, batch: int = 100) -> float:
    """The mean metric of `model` over `examples`."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(examples), batch):
            inputs = by_pixels(examples.inputs[start : start + batch].to(device))
            targets = examples.targets[start : start + batch].to(device)
            total += float(task.metric(model(inputs), targets).sum())
    model.train(training)
    return total / len(examples)


def by_pixels(inputs: Tensor) -> Tensor:
    """Images with the channels of a pixel side by side in memory, as a processor convolves them fastest; others as they are."""
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs


def split(examples: Examples, *sizes: int, seed: int) -> tuple[Examples, ...]:
    """Disjoint random parts of `examples` of the given sizes, the same for the same seed, and then the rest."""
    if sum(sizes) >= len(examples):
        raise ValueError(f"parts of {sizes} need more than {sum(sizes)} examples, got {len(examples)}")
    order = np.random.default_rng(seed).permutation(len(examples))
    return tuple(examples.take(part) for part in np.split(order, np.cumsum(sizes)))


def data_folders(data_dir: Path | None, *usual: Path) -> list[Path]:
    """Where to look for files: `data_dir` if given, else the folder named by $FEDCGD_DATA and then the usual ones."""
    if data_dir is not None:
        return [data_dir]
    named = os.environ.get(DATA_VARIABLE)
    return [*([Path(named)] if named else []), *usual]
