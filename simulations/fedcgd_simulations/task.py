"""What a task is: data, a model, a loss and a metric."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

DATA_VARIABLE = "FEDCGD_DATA"

T = TypeVar("T")


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
    lowers, and what is reported (its mean, for example the share of correct labels). `augment` changes a batch of inputs at
    random, each by itself.
    """

    name: str
    load: Callable[[], Data]
    model: Callable[[int], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    metric: Callable[[Tensor, Tensor], Tensor]
    augment: Callable[[Tensor], Tensor] | None = None

    def augmented(self, inputs: Tensor, copies: int) -> Tensor:
        """`copies` of each input that follow one another, changed at random; as they are for 0.

        Raises:
            ValueError: for a task whose inputs nothing is known to change.
        """
        if not copies:
            return inputs
        if self.augment is None:
            raise ValueError(f"the inputs of {self.name} for this model have no augmentation; set augmentations to 0")
        return self.augment(inputs.repeat_interleave(copies, dim=0))


def classification(name: str, load: Callable[[], Data], model: Callable[[], nn.Module]) -> Task:
    """A task with cross-entropy as its loss and accuracy as its metric; `model()` draws from torch's global seed."""
    return Task(name, load, lambda seed: seeded(seed, model), cross_entropy, accuracy)


def shifted_and_mirrored(images: Tensor) -> Tensor:
    """Each of the images, shape (images, channels, height, width), up to four pixels aside and half of them mirrored.

    Draws from torch's global generator; what was outside an image is its mirror image.
    """
    most = 4
    wide = functional.pad(images, (most,) * 4, mode="reflect")
    down, right = torch.randint(2 * most + 1, (2, len(images)))
    height, width = images.shape[2:]
    moved = [image[:, y : y + height, x : x + width] for image, y, x in zip(wide, down, right, strict=True)]
    mirrored = torch.rand(len(images)) < 0.5
    return torch.stack([image.flip(2) if turn else image for image, turn in zip(moved, mirrored, strict=True)])


def average_of(model: nn.Module, decay: float) -> AveragedModel:
    """The exponential moving average of a model's weights: a decay, and less of it at first, (1 + t)/(10 + t) after t updates.

    It is made of what was released, so it costs no privacy. (De, Berrada, Hayes, Smith and Balle, "Unlocking High-Accuracy
    Differentially Private Image Classification through Scale", 2022, arXiv:2204.13650.)
    """
    return AveragedModel(
        model, avg_fn=lambda mean, new, t: mean + (1 - min(decay, (1 + int(t)) / (10 + int(t)))) * (new - mean)
    )


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(outputs)[target], shape (batch,)."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest output is the target's, else 0, shape (batch,)."""
    return (outputs.argmax(dim=1) == targets).float()


def seeded(seed: int, make: Callable[[], T]) -> T:
    """`make()` under `seed`, without touching the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


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
