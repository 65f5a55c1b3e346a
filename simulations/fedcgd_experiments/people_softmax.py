"""Federated training of softmax regression for many points at once, as the app trains it.

Points with the same seed have the same people in the same rounds, so what depends on these alone (who has which examples, their
inner products, Z) is made once for all mechanisms, budgets and learning rates.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcgd.noise import NoiseStream
from fedcgd.participation.cohorts import History, cohort
from fedcgd.plan import Plan
from fedcgd_experiments.experiment import Record
from fedcgd_experiments.people_run import FLOWER_ADAPTIVE, FLOWER_FIXED, PeoplePoint, loaded, prepared, record_of
from fedcgd_experiments.softmax import inverse_of
from fedcgd_simulations.local_softmax import coefficients, is_softmax, with_bias
from fedcgd_simulations.local_training import LocalTraining
from fedcgd_simulations.task import Examples, evaluate

_SOME = 25
"""Users who train at once: about as many examples each, so that few places are empty."""


def shared(point: PeoplePoint, *, data_dir: str = "") -> str:
    """A text that is equal for points that `train_people` can train together; empty if it cannot train `point`."""
    if point.mechanism in (FLOWER_FIXED, FLOWER_ADAPTIVE):
        return ""
    task, _ = loaded(point.task, point.model, data_dir)
    apart = ("mechanism", "epsilon", "delta", "learning_rate", "quantile", "population", "split")
    return (
        str({k: v for k, v in asdict(point).items() if k not in apart}) if is_softmax(task.model(0), task.loss) else ""
    )


def train_people(points: Sequence[PeoplePoint], *, data_dir: str = "") -> list[Record]:
    """A record of each of `points`, which have the same `shared`, as `run_people` makes it; their processor time in equal parts.

    People, cohorts, Z and its correlation are the app's. Made otherwise are the changes of local training, all in inner products
    of inputs, in float32; sums that are not on the grid, and so without the smoothing that the grid's noise needs (5e-6 of its
    variance); and the order in which a user goes through its examples, which the app draws from the bits of the model, and which
    is here the same for all points. But for that order each is what the app trains, to a part in a thousand.
    """
    began = time.process_time()
    made = [prepared(point, data_dir=data_dir) for point in points]
    settings, plan, parts = made[0].settings, made[0].plan, made[0].parts
    task, data = loaded(points[0].task, points[0].model, data_dir)
    model, key = task.model(points[0].seed), settings.key()
    weights = _rows(model).repeat(len(points), 1)  # shape (points·classes, features + 1)
    classes = len(weights) // len(points)
    noise = _noise([one.plan for one in made], NoiseStream(key.noise), classes, weights.shape[1] - 1)
    rates = torch.tensor([point.learning_rate / settings.cohort for point in points]).repeat_interleave(classes)[
        :, None
    ]
    everyone, history = [str(user) for user in range(len(parts))], History()
    for number in range(plan.participation.rounds):
        chosen = cohort(plan.participation, number, everyone, history, cohort_size=settings.cohort, key=key.choices)
        assert chosen is not None  # all users are always there
        history = history.with_round(number, chosen)
        own = [parts[int(user)] for user in chosen]
        total = _clipped_sum(
            weights, classes, data.train, own, settings.local, settings.clip_norm, settings.seed, number
        )
        weights += rates * (total + noise(number))
    records = []
    for i, (point, one) in enumerate(zip(points, made, strict=True)):
        _load(model, weights[i * classes : (i + 1) * classes])
        judged = data.validation if point.split == "validation" else data.test
        records.append(record_of(point, one, evaluate(model, task, judged, batch=5000)))
    seconds = (time.process_time() - began) / len(points)
    return [record | {"cpu_seconds": round(seconds, 4)} for record in records]


def _clipped_sum(
    weights: Tensor,
    classes: int,
    examples: Examples,
    rows: Sequence[NDArray[np.intp]],
    local: LocalTraining,
    clip_norm: float,
    seed: int,
    round: int,
) -> Tensor:
    """Σ over users of their clipped changes of each model, in the shape of `weights`."""
    generator, total = np.random.default_rng((seed, round)), torch.zeros_like(weights)
    rows = sorted(rows, key=len)
    for start in range(0, len(rows), _SOME):
        some = rows[start : start + _SOME]
        counts = torch.tensor([len(own) for own in some])
        most = int(counts.max())
        places = torch.from_numpy(np.stack([own[np.minimum(np.arange(most), len(own) - 1)] for own in some]))
        empty = torch.arange(most) >= counts[:, None]
        orders = [
            torch.from_numpy(generator.random(places.shape)).masked_fill_(empty, 2.0).argsort(dim=1)
            for _ in range(local.epochs)
        ]
        inputs = with_bias(examples.inputs[places].flatten(2))
        products = inputs @ inputs.mT
        changes = coefficients(
            inputs @ weights.T, products, examples.targets[places], counts, orders,
            classes=classes, batch=local.batch, learning_rate=local.learning_rate, proximal=local.proximal,
        )  # fmt: skip
        squares = (changes * (products @ changes)).sum(1).view(len(some), -1, classes).sum(2)  # shape (users, models)
        factors = (clip_norm / squares.clamp(min=1e-30).sqrt()).clamp(max=1.0).repeat_interleave(classes, dim=1)
        total -= (changes * factors[:, None]).flatten(0, 1).T @ inputs.flatten(0, 1)
    return total


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
    """round → ζσ·(C⁻¹Z)_round of all `plans`, one below the other, in the shape of their weights."""
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
        return torch.cat([weight.reshape(-1, features), bias.reshape(-1, 1)], dim=1)

    return of
