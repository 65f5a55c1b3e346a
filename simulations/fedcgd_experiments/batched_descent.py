"""Many small models at once, from many seeds, by descent with correlated noise: softmax regression and networks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_VALUES = 2**27
"""Activations that are held at once."""
_BLOCK = 32
"""Rounds whose noise is made at once."""


Inputs = NDArray[np.float32] | Tensor
Labels = NDArray[np.int64] | Tensor


@dataclass(frozen=True)
class Labelled:
    """Inputs with a one behind, shape (users, [examples of a person,] features + 1), and labels; and those to look at."""

    inputs: Inputs
    labels: Labels
    looked_at: tuple[tuple[Inputs, Labels], ...]
    classes: int
    hidden: tuple[int, ...] = ()
    scaled: bool = True
    """Whether a network starts from outputs of size 1 (He), or from weights and biases within ±1/√inputs, as PyTorch's do."""


@dataclass(frozen=True)
class People:
    """How a person trains: steps over all of her examples, at a rate."""

    steps: int = 5
    rate: float = 0.5


@dataclass(frozen=True)
class Rounds:
    """Who takes part when, for all runs of a group: users in `steps` parts in turn, by coins of 1/steps, or in random bins."""

    rounds: int
    steps: int
    sampling: str = "none"


@dataclass(frozen=True)
class Run:
    """C⁻¹·σ, as a place in a list, the rates of all rounds, and momentum."""

    noise: int
    rates: NDArray[np.float64]
    momentum: float


@torch.no_grad()
def accuracies(
    data: Labelled,
    when: Rounds,
    runs: Sequence[Run],
    noises: Sequence[NDArray[np.float32]],
    seeds: Sequence[int],
    *,
    people: People | None = None,
    device: str = "cpu",
) -> NDArray[np.float32]:
    """Accuracies on what is looked at, shape (runs, seeds, len(data.looked_at)).

    All runs of a seed share who takes part, the start and Z. A user's gradient, or a person's update over her steps and rate, is
    clipped to norm 1, and sums are divided by the planned cohort.

    Args:
        data: what is learned.
        when: who takes part in which round.
        runs: how each model is moved.
        noises: C⁻¹·σ of each kind of run, shape (rounds, rounds).
        seeds: of order, start and noise.
        people: how a person trains, if users are people.
        device: of torch.
    """
    x = torch.as_tensor(data.inputs).to(device)
    y = torch.as_tensor(data.labels).to(device)
    shapes = _shapes(data)
    params, z = zip(*(_start(shapes, when.rounds, seed, data.scaled, device) for seed in seeds), strict=True)
    weights = torch.stack(params)[:, None].repeat(1, len(runs), 1)
    velocities = torch.zeros_like(weights)
    kind = torch.tensor([run.noise for run in runs], device=device)
    rates = torch.tensor(np.array([run.rates for run in runs]), dtype=torch.float32, device=device)
    momenta = torch.tensor([run.momentum for run in runs], dtype=torch.float32, device=device)[:, None]
    correlated = _noise(torch.from_numpy(np.stack(noises)).to(device), torch.stack(z))
    coming = zip(*(participants(len(x), when, seed) for seed in seeds), strict=True)
    for t, (chosen, noise) in enumerate(zip(coming, correlated, strict=True)):
        rows, present = padded(chosen, device)
        size = max(1, _VALUES // (weights.shape[0] * weights.shape[1] * _width(data, people is not None)))
        total = noise[:, kind]
        for part in range(0, rows.shape[1], size):
            here, there = rows[:, part : part + size], present[:, part : part + size]
            total = total + (
                _gradients(weights, shapes, x[here], y[here], there)
                if people is None
                else _updates(weights, shapes, x[here], y[here], there, people)
            )
        velocities.mul_(momenta).add_(total, alpha=when.steps / len(x))
        weights += rates[:, t, None] * velocities
    return np.stack([_accuracy(weights, shapes, *both, device) for both in data.looked_at], axis=2)


def _shapes(data: Labelled) -> list[tuple[int, int]]:
    sizes = (data.inputs.shape[-1] - 1, *data.hidden, data.classes)
    return [(wide + 1, narrow) for wide, narrow in pairwise(sizes)]


def _width(data: Labelled, people: bool) -> int:
    """Values for each user and model that the widest step holds."""
    if people:
        return int(3 * sum(a * b for a, b in _shapes(data)) + data.inputs.shape[1] * sum(data.hidden))
    return max(data.classes, max(data.hidden, default=1))


def _start(shapes: list[tuple[int, int]], rounds: int, seed: int, scaled: bool, device: str) -> tuple[Tensor, Tensor]:
    """Parameters, and Z of all rounds. Inputs have norm 1; softmax regression starts from zero."""
    generator = torch.Generator(device).manual_seed(seed)
    parts = []
    for place, shape in enumerate(shapes):
        values = torch.randn(shape, generator=generator, device=device)
        last = place == len(shapes) - 1
        scale = 0.0 if len(shapes) == 1 else 2**0.5 if place == 0 else ((1 if last else 2) / (shape[0] - 1)) ** 0.5
        if scaled or len(shapes) == 1:
            values[-1] = 0
        else:
            values, scale = torch.rand(shape, generator=generator, device=device) * 2 - 1, (shape[0] - 1) ** -0.5
        parts.append((values * scale).flatten())
    start = torch.cat(parts)
    return start, torch.randn((rounds, len(start)), generator=generator, device=device)


def _noise(inverses: Tensor, z: Tensor) -> Iterator[Tensor]:
    """Rows of C⁻¹Zσ, shape (seeds, kinds, d), round after round."""
    rounds = z.shape[1]
    for first in range(0, rounds, _BLOCK):
        last = min(first + _BLOCK, rounds)
        block = torch.einsum("kbt,std->bskd", inverses[:, first:last, :last], z[:, :last])
        yield from block


def participants(users: int, when: Rounds, seed: int) -> Iterator[NDArray[np.int64]]:
    """Those who take part in each round."""
    generator = np.random.default_rng([seed, 1])
    order = generator.permutation(users)
    bins = generator.integers(when.steps, size=users)
    for t in range(when.rounds):
        if when.sampling == "poisson":
            yield np.flatnonzero(generator.random(users) < 1 / when.steps)
        elif when.sampling == "balls-in-bins":
            yield np.flatnonzero(bins == t % when.steps)
        else:
            yield order[t % when.steps :: when.steps]


def padded(chosen: Sequence[NDArray[np.int64]], device: str) -> tuple[Tensor, Tensor]:
    """Places, and 1 for those that are there, shape (seeds, most)."""
    most = max(1, *(len(rows) for rows in chosen))  # a round of coins may be empty
    places, present = np.zeros((2, len(chosen), most), np.int64)
    for seed, rows in enumerate(chosen):
        places[seed, : len(rows)], present[seed, : len(rows)] = rows, 1
    return torch.from_numpy(places).to(device), torch.from_numpy(present).to(device, torch.float32)


def _split(flat: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    parts = torch.split(flat, [a * b for a, b in shapes], dim=-1)
    return [part.reshape(*part.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]


def _forward(weights: list[Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs, shape (seeds, runs, rows, classes), and what each hidden layer says."""
    outputs, hidden = torch.einsum("smd,srdh->srmh", x, weights[0]), []
    for layer in weights[1:]:
        hidden.append(outputs.relu())
        outputs = hidden[-1] @ layer[..., :-1, :] + layer[..., -1:, :]
    return outputs, hidden


def _gradients(
    flat: Tensor, shapes: list[tuple[int, int]], x: Tensor, y: Tensor, present: Tensor, *, clipped: bool = True
) -> Tensor:
    """The sum over rows of −gradient, clipped to norm 1; shape of `flat`."""
    weights = _split(flat, shapes)
    outputs, hidden = _forward(weights, x)
    onehot = torch.nn.functional.one_hot(y, outputs.shape[-1])[:, None]
    deltas = [onehot - outputs.softmax(-1)]
    for layer, said in zip(reversed(weights[1:]), reversed(hidden), strict=True):
        deltas.insert(0, (deltas[0] @ layer[..., :-1, :].transpose(-1, -2)) * (said > 0))
    scale = present[:, None]
    if clipped:
        norms = deltas[0].square().sum(-1) * x.square().sum(-1)[:, None]
        for delta, said in zip(deltas[1:], hidden, strict=True):
            norms = norms + delta.square().sum(-1) * (said.square().sum(-1) + 1)
        scale = scale * norms.clamp(min=1).rsqrt()
    deltas = [delta * scale[..., None] for delta in deltas]
    sums = [torch.einsum("smd,srmh->srdh", x, deltas[0])]
    sums += [
        torch.cat([said.transpose(-1, -2) @ delta, delta.sum(-2, keepdim=True)], dim=-2)
        for said, delta in zip(hidden, deltas[1:], strict=True)
    ]
    return torch.cat([part.flatten(-2) for part in sums], dim=-1)


def _updates(
    flat: Tensor, shapes: list[tuple[int, int]], x: Tensor, y: Tensor, present: Tensor, people: People
) -> Tensor:
    """The sum over people of their updates, over steps and rate, clipped to norm 1; shape of `flat`."""
    seeds, runs, _ = flat.shape
    persons, examples = x.shape[1:3]
    x, y = x.flatten(0, 1), y.flatten(0, 1)
    everything = torch.full(y.shape, 1 / examples, device=flat.device)
    local = flat[:, None].repeat(1, persons, 1, 1).flatten(0, 1)
    total = torch.zeros_like(local)
    for _ in range(people.steps):
        step = _gradients(local, shapes, x, y, everything, clipped=False)
        local += people.rate * step
        total += step / people.steps
    total *= total.norm(dim=-1, keepdim=True).clamp(min=1).reciprocal() * present.flatten()[:, None, None]
    return total.view(seeds, persons, runs, -1).sum(1)


def _accuracy(
    flat: Tensor, shapes: list[tuple[int, int]], inputs: Inputs, labels: Labels, device: str
) -> NDArray[np.float32]:
    x, y = torch.as_tensor(inputs).to(device)[None], torch.as_tensor(labels).to(device)
    weights, right = _split(flat, shapes), torch.zeros(flat.shape[:2], device=device)
    size = max(1, _VALUES // (flat.shape[0] * flat.shape[1] * max(shape[1] for shape in shapes)))
    for part in range(0, len(y), size):
        here = x[:, part : part + size].expand(flat.shape[0], -1, -1)
        right += (_forward(weights, here)[0].argmax(-1) == y[part : part + size]).sum(-1)
    return (right / len(y)).cpu().numpy().T
