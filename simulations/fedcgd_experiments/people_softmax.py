"""Federated training of softmax regression for many points at once, as the app trains it.

Points with the same seed have the same people in the same rounds, so what depends on these alone (who has which examples, their
inner products, Z) is made once for all mechanisms, budgets, norms and learning rates. Flower's own strategies are among the
mechanisms, by their arithmetic and without their messages.
"""

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcgd.noise import NoiseStream
from fedcgd.participation.cohorts import History, cohort
from fedcgd.plan import Plan
from fedcgd_experiments.experiment import Record
from fedcgd_experiments.people_run import (
    FLOWER_ADAPTIVE,
    FLOWER_FIXED,
    PeoplePoint,
    Prepared,
    flower_adaptive_noise,
    loaded,
    prepared,
    record_of,
    run_people,
)
from fedcgd_experiments.softmax import inverse_of
from fedcgd_simulations.local_softmax import coefficients, is_softmax, with_bias
from fedcgd_simulations.task import Examples, evaluate

_SOME = 25
"""Users who train at once: about as many examples each, so that few places are empty."""

_VANISHING = 1e-4
"""Changes below it may be nothing in the float32 of weights that have been sent and sent back."""

_FLOWERS = (FLOWER_FIXED, FLOWER_ADAPTIVE)


def shared(point: PeoplePoint, *, data_dir: str = "") -> str:
    """A text that is equal for points that `train_people` can train together; empty if it cannot train `point`."""
    task, _ = loaded(point.task, point.model, data_dir)
    alike = ("task", "model", "users", "cohort", "participations", "sampling", "local_epochs", "local_batch", "seed")
    return str([getattr(point, name) for name in alike]) if is_softmax(task.model(0), task.loss) else ""


def train_people(points: Sequence[PeoplePoint], *, data_dir: str = "") -> list[Record]:
    """A record of each of `points`, which have the same `shared`, as `run_people` makes it; their processor time in equal parts.

    People, cohorts, Z and its correlation are the app's; of Flower's strategies, the noise too. Made otherwise are the changes of
    local training, all in inner products of inputs, in float32; sums that are not on the grid, and so without the smoothing that
    the grid's noise needs (5e-6 of its variance); and the order in which a user goes through its examples, which the app draws
    from the bits of the model, and which is here the same for all points. But for that order each is what the app trains, to a
    part in a thousand. Where an update vanishes, which Flower's strategies cannot clip, they are run themselves.
    """
    began = time.process_time()
    made = [prepared(point, data_dir=data_dir) for point in points]
    settings, plan, parts = made[0].settings, made[0].plan, made[0].parts
    task, data = loaded(points[0].task, points[0].model, data_dir)
    model, key = task.model(points[0].seed), settings.key()
    weights = _rows(model).repeat(len(points), 1)  # shape (points·classes, features + 1)
    classes, features = len(weights) // len(points), weights.shape[1] - 1
    flowers = {
        i: _Flower(point, one)
        for i, (point, one) in enumerate(zip(points, made, strict=True))
        if point.mechanism in _FLOWERS
    }
    correlated = {i: one.plan for i, one in enumerate(made) if i not in flowers}
    noise = _noise(list(correlated.values()), NoiseStream(key.noise), classes, features) if correlated else None
    norms = torch.tensor([point.clip_norm for point in points])
    rates = torch.tensor([point.learning_rate / settings.cohort for point in points]).repeat_interleave(classes)[
        :, None
    ]
    everyone, history = [str(user) for user in range(len(parts))], History()
    least = torch.full((len(points),), torch.inf)
    for number in range(plan.participation.rounds):
        chosen = cohort(plan.participation, number, everyone, history, cohort_size=settings.cohort, key=key.choices)
        assert chosen is not None  # all users are always there
        history = history.with_round(number, chosen)
        own = [parts[int(user)] for user in chosen]
        total, lengths = _clipped_sum(weights, classes, data.train, own, points, norms, number)
        least = torch.cat([least[None], lengths]).amin(0)
        by_point = total.view(len(points), classes, -1)
        if noise:
            by_point[list(correlated)] += noise(number)
        for i, flower in flowers.items():
            by_point[i] += flower.noise(int((lengths[:, i] > norms[i]).sum()), classes, features)
            norms[i] = flower.norm
        weights += rates * total
    records = []
    for i, (point, one) in enumerate(zip(points, made, strict=True)):
        _load(model, weights[i * classes : (i + 1) * classes])
        judged = data.validation if point.split == "validation" else data.test
        records.append(record_of(point, one, evaluate(model, task, judged, batch=5000)))
    seconds = (time.process_time() - began) / len(points)
    return [
        run_people(point, data_dir=data_dir)
        if i in flowers and not least[i] > _VANISHING
        else records[i] | {"cpu_seconds": round(seconds, 4)}
        for i, point in enumerate(points)
    ]


class _Flower:
    """What Flower's strategy around FedAvg makes of a round: `noise` for the sum of the clipped updates, and the next `norm`."""

    def __init__(self, point: PeoplePoint, made: Prepared) -> None:
        self.norm, self._quantile, self._cohort = point.clip_norm, point.quantile, made.settings.cohort
        self._adaptive = point.mechanism == FLOWER_ADAPTIVE
        self._multiplier = made.plan.noise_multiplier
        if self._adaptive:
            multiplier, self._count = flower_adaptive_noise(made.plan.noise_multiplier, self._cohort)
            self._multiplier = (multiplier**-2 - (2 * self._count) ** -2) ** -0.5
        self._random = np.random.RandomState(point.seed)  # the generator that Flower's noise is of

    def noise(self, clipped: int, classes: int, features: int) -> Tensor:
        """Of a round in which so many updates were longer than the norm; shape (classes, features + 1).

        Flower moves the norm before it draws the noise, which so is that of the next round's norm.
        """
        if self._adaptive:
            fraction = self._random.normal(clipped, self._count) / self._cohort
            self.norm *= math.exp(-0.2 * (fraction - self._quantile))
        stddev = self._multiplier * self.norm
        weight, bias = (self._random.normal(0, stddev, shape) for shape in ((classes, features), (classes, 1)))
        return torch.from_numpy(np.concatenate([weight, bias], axis=1).astype(np.float32))


def _clipped_sum(
    weights: Tensor,
    classes: int,
    examples: Examples,
    rows: Sequence[NDArray[np.intp]],
    points: Sequence[PeoplePoint],
    norms: Tensor,
    round: int,
) -> tuple[Tensor, Tensor]:
    """Σ over users of their clipped changes, in the shape of `weights`, and how long those were, shape (users, models)."""
    first = points[0]
    generator, total = np.random.default_rng((first.seed, round)), torch.zeros_like(weights)
    rates, proximal = (
        torch.tensor([[getattr(point, name)] for point in points]) for name in ("local_learning_rate", "proximal")
    )
    rows, lengths = sorted(rows, key=len), [torch.empty(0, len(points))]  # a secret sampling may draw nobody
    for start in range(0, len(rows), _SOME):
        some = rows[start : start + _SOME]
        counts = torch.tensor([len(own) for own in some])
        most = int(counts.max())
        places = torch.from_numpy(np.stack([own[np.minimum(np.arange(most), len(own) - 1)] for own in some]))
        empty = torch.arange(most) >= counts[:, None]
        orders = [
            torch.from_numpy(generator.random(places.shape)).masked_fill_(empty, 2.0).argsort(dim=1)
            for _ in range(first.local_epochs)
        ]
        inputs = with_bias(examples.inputs[places].flatten(2))
        products = inputs @ inputs.mT
        changes = coefficients(
            inputs @ weights.T, products, examples.targets[places], counts, orders,
            classes=classes, batch=first.local_batch, learning_rate=rates, proximal=proximal,
        )  # fmt: skip
        squares = (changes * (products @ changes)).sum(1).view(len(some), -1, classes).sum(2)  # shape (users, models)
        lengths.append(squares.clamp(min=0).sqrt())
        factors = (norms / lengths[-1].clamp(min=1e-15)).clamp(max=1.0).repeat_interleave(classes, dim=1)
        total -= (changes * factors[:, None]).flatten(0, 1).T @ inputs.flatten(0, 1)
    return total, torch.cat(lengths)


def _rows(model: nn.Module) -> Tensor:
    """The weights of softmax regression and its biases, shape (classes, features + 1)."""
    linear = _linear(model)
    return torch.cat([linear.weight.detach(), linear.bias.detach()[:, None]], dim=1)


def _load(model: nn.Module, rows: Tensor) -> None:
    linear = _linear(model)
    with torch.no_grad():
        linear.weight.copy_(rows[:, :-1])
        linear.bias.copy_(rows[:, -1])


def _linear(model: nn.Module) -> nn.Linear:
    (linear,) = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    return linear


def _noise(plans: Sequence[Plan], stream: NoiseStream, classes: int, features: int) -> Callable[[int], Tensor]:
    """round → ζσ·(C⁻¹Z)_round of all `plans`, shape (plans, classes, features + 1)."""
    rounds, size = plans[0].participation.rounds, classes * (features + 1)
    z = np.stack([stream.normal(round, 0, 0, size) for round in range(rounds)])
    mechanisms = [str(plan.to_description()["mechanism"]) for plan in plans]
    inverses = {name: plan.mechanism for name, plan in zip(mechanisms, plans, strict=True)}
    correlated = torch.from_numpy(np.stack([inverse_of(mechanism, rounds) @ z for mechanism in inverses.values()]))
    kind = torch.tensor([list(inverses).index(name) for name in mechanisms])
    spread = torch.tensor([plan.stddev for plan in plans])[:, None]

    def of(round: int) -> Tensor:
        flat = correlated[kind, round] * spread
        weight, bias = flat[:, : classes * features], flat[:, classes * features :]
        return torch.cat([weight.reshape(-1, classes, features), bias[:, :, None]], dim=2)

    return of
