"""What a user with many examples does in a round: SGD over its own examples, near the model that it was sent.

`train_one` is the plain loop for one user; `train_many` does the same for a cohort at once, some twenty times as fast for a small
model. Both draw a user's order of examples from the same seed, so they give the same models up to rounding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedcgd.noise.quantisation import Integers
from fedcgd_flower import LocalTask, arrays_of, load_arrays
from fedcgd_flower.layout import unflatten
from fedcgd_flower.user_training import user_seeds
from fedcgd_simulations.local_softmax import MOST_EXAMPLES, coefficients, is_softmax, with_bias
from fedcgd_simulations.models.softmax import UnitNorm
from fedcgd_simulations.task import Examples, Task, by_pixels

_PLAIN = (
    nn.Sequential,
    nn.Linear,
    nn.Conv2d,
    nn.Tanh,
    nn.ReLU,
    nn.Flatten,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.Dropout,
    UnitNorm,
)
_NUMBERS = 2**24  # weights held at once, over all users of a part


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Epochs, batch and learning rate of a user's SGD, and µ = `proximal` of FedProx: µ/2·‖w − w_round‖² is added to its loss.

    FedProx is of Li et al., "Federated Optimization in Heterogeneous Networks", 2020, arXiv:1812.06127.
    """

    epochs: int
    batch: int
    learning_rate: float
    proximal: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs < 0 or self.batch < 1 or not self.learning_rate > 0 or not 0 <= self.proximal < float("inf"):
            raise ValueError(
                "local-epochs must be at least 0, local-batch at least 1, local-learning-rate positive and proximal at least 0, "
                f"got {self.epochs}, {self.batch}, {self.learning_rate} and {self.proximal}"
            )


def train_one(task: Task, arrays: ArrayRecord, mine: Examples, local: LocalTraining) -> ArrayRecord:
    """The model `arrays` after a user's local training on `mine`; the orders come from torch's global generator."""
    model = task.model(0).to(mine.inputs.device)
    load_arrays(model, arrays)
    moving = [p for p in model.parameters() if p.requires_grad]
    sent = [p.detach().clone() for p in moving]
    optimizer = torch.optim.SGD(moving, lr=local.learning_rate)
    inputs = by_pixels(mine.inputs)
    for _ in range(local.epochs):
        for rows in torch.split(torch.randperm(len(mine)), local.batch):
            optimizer.zero_grad()
            task.loss(model(inputs[rows]), mine.targets[rows]).mean().backward()  # type: ignore[no-untyped-call]
            if local.proximal:
                for p, start in zip(moving, sent, strict=True):
                    assert p.grad is not None
                    p.grad.add_(p.detach() - start, alpha=local.proximal)
            optimizer.step()
    return arrays_of(model)


def vectorises(model: nn.Module) -> bool:
    """Whether `train_many` can train `model`: nothing but layers that treat examples alike and draw nothing."""
    return all(isinstance(layer, _PLAIN) for layer in model.modules()) and not any(
        isinstance(layer, nn.Dropout) and layer.p for layer in model.modules()
    )


Part = Callable[[str], NDArray[np.intp]]
"""user → the rows of its examples."""

Trained = Iterator[tuple[list[str], NDArray[np.float32]]]


def train_many(
    task: Task, work: LocalTask, examples: Examples, part: Part, local: LocalTraining
) -> tuple[Integers, int]:
    """The sum of the clipped updates of `work.users`, as the loop over `train_one` gives it, and how many they are.

    The model must be one that `vectorises`. Other users change an update in its last bits at most.
    """
    total, answered = np.zeros(work.size, np.int64), 0
    for _, trained in trained_models(task, work, examples, part, local):
        for row in trained:
            update = work.clipped(row)
            if update is not None:
                total += update
                answered += 1
    return total, answered


def trained_models(task: Task, work: LocalTask, examples: Examples, part: Part, local: LocalTraining) -> Trained:
    """Pairs of users and their models after local training, shape (users, size), float32; each user is in one of them."""
    seeds, model = user_seeds(work.model), task.model(0).to(examples.inputs.device)
    alike: dict[int, list[str]] = {}  # users with about as many batches are trained together
    for user in work.users:
        batches = -(-len(part(user)) // local.batch)
        alike.setdefault((batches - 1).bit_length(), []).append(user)
    at_once = max(1, _NUMBERS // work.layout.size)
    for _, users in sorted(alike.items()):
        for start in range(0, len(users), at_once):
            some = users[start : start + at_once]
            rows = [part(user) for user in some]
            few = max(len(own) for own in rows) <= MOST_EXAMPLES and is_softmax(model, task.loss)
            train = _train_softmax if few else _train_together
            yield some, train(task, model, work, examples, rows, [seeds(user) for user in some], local)


def _train_softmax(
    task: Task,
    model: nn.Module,
    work: LocalTask,
    examples: Examples,
    rows: Sequence[NDArray[np.intp]],
    seeds: Sequence[int],
    local: LocalTraining,
) -> NDArray[np.float32]:
    """`_train_together` of softmax regression."""
    device, sizes = examples.inputs.device, [len(own) for own in rows]
    most = max(sizes)
    padded = torch.from_numpy(np.stack([own[np.minimum(np.arange(most), len(own) - 1)] for own in rows])).to(device)
    orders = torch.zeros(local.epochs, len(rows), most, dtype=torch.long)
    for user, (size, seed) in enumerate(zip(sizes, seeds, strict=True)):
        generator = torch.Generator().manual_seed(seed)
        for epoch in range(local.epochs):
            orders[epoch, user, :size] = torch.randperm(size, generator=generator)
    sent = unflatten(work.model, work.layout, passthrough=False)
    weight, bias = (torch.from_numpy(sent[f"1.{name}"].numpy().copy()).to(device) for name in ("weight", "bias"))
    inputs = with_bias(examples.inputs[padded].flatten(2))
    changes = coefficients(
        inputs @ torch.cat([weight, bias[:, None]], dim=1).T, inputs @ inputs.mT, examples.targets[padded],
        torch.tensor(sizes), list(orders), batch=local.batch, learning_rate=local.learning_rate, proximal=local.proximal,
    )  # fmt: skip
    moved = changes.mT @ inputs
    trained = weight - moved[:, :, :-1], bias - moved[:, :, -1]
    return _flat(dict(zip(("1.weight", "1.bias"), trained, strict=True)), work)


def _flat(weights: Mapping[str, Tensor], work: LocalTask) -> NDArray[np.float32]:
    """Arrays with a row for each user, as one row for each."""
    flat: NDArray[np.float32] = torch.cat([weights[name].flatten(1) for name in work.layout.names], dim=1).cpu().numpy()
    return flat


def _train_together(
    task: Task,
    model: nn.Module,
    work: LocalTask,
    examples: Examples,
    rows: Sequence[NDArray[np.intp]],
    seeds: Sequence[int],
    local: LocalTraining,
) -> NDArray[np.float32]:
    """The models of users who have the examples `rows` each, shape (users, size)."""
    device, users = examples.inputs.device, len(rows)
    counts = torch.tensor([len(own) for own in rows])
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    sent = {
        name: torch.from_numpy(array.numpy().copy()).to(device)
        for name, array in unflatten(work.model, work.layout, passthrough=False).items()
    }
    weights = {name: value.expand(users, *value.shape).clone() for name, value in sent.items()}

    def loss(own: dict[str, Tensor], inputs: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
        return (task.loss(functional_call(model, own, (inputs,)), targets) * shares).sum()

    gradients = vmap(grad(loss))
    for _ in range(local.epochs):
        order = torch.zeros(users, int(counts.max()), dtype=torch.long)
        for i, (own, generator) in enumerate(zip(rows, generators, strict=True)):
            order[i, : len(own)] = torch.from_numpy(own)[torch.randperm(len(own), generator=generator)]
        for first in range(0, order.shape[1], local.batch):
            batch = order[:, first : first + local.batch].to(device)
            there = torch.arange(first, first + batch.shape[1]) < counts[:, None]
            shares = (there / there.sum(1, keepdim=True).clamp(min=1)).to(device)
            step = gradients(weights, examples.inputs[batch], examples.targets[batch], shares)
            training = there.any(1).to(device)  # who has no batch left stays where it is
            for name, value in weights.items():
                move = step[name] + local.proximal * (value - sent[name]) if local.proximal else step[name]
                value.sub_(move * training.view(-1, *[1] * (value.dim() - 1)), alpha=local.learning_rate)
    return _flat(weights, work)
