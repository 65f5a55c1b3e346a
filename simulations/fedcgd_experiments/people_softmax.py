"""Federated training of softmax regression for many points at once, as the app trains it.

Points with the same seed have the same people in the same rounds, so what depends on these alone (who has which examples, their
inner products, Z) is made once for all mechanisms, budgets, norms and ways to learn.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcgd.clipping.flat_models import flatten
from fedcgd.mechanisms.schedule import SCHEDULES
from fedcgd.noise import NoiseStream
from fedcgd.participation.cohorts import cohort
from fedcgd.participation.history import History
from fedcgd.plan import Plan
from fedcgd_experiments.central_softmax import correlated
from fedcgd_experiments.people_point import PeoplePoint, loaded, prepared
from fedcgd_experiments.results import Row
from fedcgd_simulations.local_softmax import Steps, coefficients, with_bias
from fedcgd_simulations.task import Examples, evaluate


def train_people(points: Sequence[PeoplePoint], *, data_dir: str = "") -> list[Row]:
    """A row of each of `points`, which have the same people in the same rounds, as `run_people` makes it.

    People, cohorts, Z and its correlation are the app's. Made otherwise are the changes of local training, all in inner products
    of inputs, in float32; sums that are not on the lattice, and so without the smoothing that its noise needs (5e-6 of its
    variance); and the order in which a user goes through its examples, which the app draws from the bits of the model, and which
    is here the same for all points. But for that order each is what the app trains, to a part in a thousand.
    """
    made = [prepared(point, data_dir=data_dir) for point in points]
    settings, plan, parts = made[0].settings, made[0].plan, made[0].parts
    task, data = loaded(points[0].task, points[0].model, data_dir)
    model, key = task.model(points[0].seed), settings.key()
    first, classes = flatten(model), len(list(model.parameters())[-1])  # as many as there are biases
    weights = _rows(first, classes).repeat(len(points), 1)  # shape (points·classes, features + 1)
    velocities = torch.zeros_like(weights)
    noise = _noise([one.plan for one in made], NoiseStream(key.noise), classes, len(first))
    norms = torch.tensor([point.clip_norm for point in points])
    momenta = _per_class([point.momentum for point in points], classes)
    everyone, history = [str(user) for user in range(len(parts))], History()
    for number in range(plan.participation.rounds):
        chosen = cohort(plan.participation, number, everyone, history, cohort_size=settings.cohort, key=key.choices)
        assert chosen is not None  # all users are always there
        history = history.with_round(number, chosen)
        total = _clipped_sum(weights, classes, data.train, [parts[int(user)] for user in chosen], points, norms, number)
        total.view(len(points), classes, -1).add_(noise(number))
        velocities.mul_(momenta).add_(total)
        done = number / plan.participation.rounds
        rates = [point.learning_rate * SCHEDULES[point.schedule](done) / settings.cohort for point in points]
        weights.addcmul_(velocities, _per_class(rates, classes))
    rows = []
    for i, (point, one) in enumerate(zip(points, made, strict=True)):
        nn.utils.vector_to_parameters(_flat(weights[i * classes : (i + 1) * classes]), model.parameters())
        judged = data.validation if point.split == "validation" else data.test
        rows.append(one.row(point, evaluate(model, task, judged, batch=5000)))
    return rows


def _per_class(values: Sequence[float], classes: int) -> Tensor:
    """A column with each value once for each class of its model."""
    return torch.tensor(values).repeat_interleave(classes)[:, None]


def _clipped_sum(
    weights: Tensor,
    classes: int,
    examples: Examples,
    rows: Sequence[NDArray[np.intp]],
    points: Sequence[PeoplePoint],
    norms: Tensor,
    round: int,
) -> Tensor:
    """Σ over users of their clipped changes, in the shape of `weights`."""
    first = points[0]
    generator, total = np.random.default_rng((first.seed, round)), torch.zeros_like(weights)
    rates, proximal = (
        torch.tensor([[getattr(point, name)] for point in points]) for name in ("local_learning_rate", "proximal")
    )
    rows, at_once = sorted(rows, key=len), 25
    for start in range(0, len(rows), at_once):
        some = rows[start : start + at_once]
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
            classes=classes, steps=Steps(first.local_batch, rates, proximal),
        )  # fmt: skip
        squares = (changes * (products @ changes)).sum(1).view(len(some), -1, classes).sum(2)  # shape (users, models)
        factors = (
            (norms / squares.clamp(min=0).sqrt().clamp(min=1e-15)).clamp(max=1.0).repeat_interleave(classes, dim=1)
        )
        total -= (changes * factors[:, None]).flatten(0, 1).T @ inputs.flatten(0, 1)
    return total


def _rows(flat: Tensor, classes: int) -> Tensor:
    """Weights and then biases, shape (…, d), as a row for each class, its bias last: shape (…, classes, features + 1)."""
    weights, biases = flat[..., :-classes], flat[..., -classes:]
    return torch.cat([weights.reshape(*biases.shape, -1), biases[..., None]], dim=-1)


def _flat(rows: Tensor) -> Tensor:
    return torch.cat([rows[:, :-1].flatten(), rows[:, -1]])


def _noise(plans: Sequence[Plan], stream: NoiseStream, classes: int, size: int) -> Callable[[int], Tensor]:
    """round → ζσ·(C⁻¹Z)_round of all `plans`, shape (plans, classes, features + 1)."""
    mechanisms = [str(plan.to_description()["mechanism"]) for plan in plans]
    different = {name: plan.mechanism for name, plan in zip(mechanisms, plans, strict=True)}
    noise = torch.from_numpy(correlated(list(different.values()), stream, plans[0].participation.rounds, size))
    kind = torch.tensor([list(different).index(name) for name in mechanisms])
    spread = torch.tensor([plan.stddev for plan in plans])[:, None]
    return lambda round: _rows(noise[round, kind] * spread, classes)
