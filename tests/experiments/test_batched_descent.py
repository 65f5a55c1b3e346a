"""Many models at once descend as each would alone, by autograd, one example after the other."""

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedcgd.planning.recipe import Recipe
from fedcgd_experiments import batched_descent, real_data, real_tables
from fedcgd_experiments.batched_descent import Labelled, People, Rounds, Run, accuracies
from fedcgd_experiments.runner import NEVER
from fedcgd_experiments.tables import lambdas
from fedcgd_simulations.tasks import cifar10
from tests.helpers.cifar10_files import write_python

SEEDS = (3, 8)
CLASSES, FEATURES = 3, 4
RUNS = [Run(0, np.array([2.0, 1.5, 1.0, 0.5]), 0.9), Run(1, np.full(4, 1.0), 0.0)]
MATRICES = [np.tril(np.full((4, 4), 0.3, np.float32)), np.eye(4, dtype=np.float32)]
PEOPLE = People(steps=2, rate=0.7)


def labelled(hidden: tuple[int, ...], *, scaled: bool = True, people: bool = False) -> Labelled:
    generator = np.random.default_rng(5)
    shape = (12, 3) if people else (12,)
    x = generator.normal(size=(*shape, FEATURES + 1)).astype(np.float32)
    looked_at = generator.normal(size=(3000, FEATURES + 1)).astype(np.float32)
    labels = generator.integers(0, CLASSES, size=shape), generator.integers(0, CLASSES, size=3000)
    return Labelled(x, labels[0], ((looked_at, labels[1]),), CLASSES, hidden, scaled)


def outputs(layers: list[Tensor], x: Tensor) -> Tensor:
    """Of a network; the first layer's bias is the last input."""
    values = x @ layers[0]
    for layer in layers[1:]:
        values = values.relu() @ layer[:-1] + layer[-1]
    return values


def gradient(layers: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """−∇ of the mean loss, flat."""
    with torch.enable_grad():
        leaves = [layer.detach().requires_grad_() for layer in layers]
        slopes = torch.autograd.grad(cross_entropy(outputs(leaves, x), y), leaves)
    return -torch.cat([slope.flatten() for slope in slopes])


def alone(data: Labelled, when: Rounds, run: Run, seed: int, people: People | None) -> float:
    """The accuracy of one model, in plain loops."""
    sizes = (FEATURES, *data.hidden, CLASSES)
    shapes = [(a + 1, b) for a, b in pairwise(sizes)]
    flat, z = batched_descent._start(shapes, when.rounds, seed, data.scaled, "cpu")
    noise = torch.from_numpy(MATRICES[run.noise]) @ z

    def layers(flat: Tensor) -> list[Tensor]:
        parts = flat.split([a * b for a, b in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    velocity = torch.zeros_like(flat)
    for t, rows in enumerate(batched_descent.participants(len(data.inputs), when, seed)):
        total = noise[t].clone()
        for row in rows:
            x, y = torch.from_numpy(data.inputs[row]), torch.tensor(data.labels[row])
            if people is None:
                update = gradient(layers(flat), x[None], y[None])
            else:
                local = flat.clone()
                for _ in range(people.steps):
                    local += people.rate * gradient(layers(local), x, y)
                update = (local - flat) / (people.steps * people.rate)
            total += update / max(1.0, float(update.norm()))
        velocity = run.momentum * velocity + total * when.steps / len(data.inputs)
        flat = flat + run.rates[t] * velocity
    x, y = data.looked_at[0]
    return float((outputs(layers(flat), torch.from_numpy(x)).argmax(1).numpy() == y).mean())


@pytest.mark.parametrize("sampling", ["none", "poisson", "balls-in-bins"])
@pytest.mark.parametrize(
    ("hidden", "scaled", "people"),
    [((), True, None), ((5,), False, None), ((6, 4), True, None), ((), True, PEOPLE), ((5,), True, PEOPLE)],
)
def test_each_model_is_the_one_that_is_trained_alone(
    hidden: tuple[int, ...], scaled: bool, people: People | None, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched_descent, "_VALUES", 100)  # so that a round's sum has several parts
    data = labelled(hidden, scaled=scaled, people=people is not None)
    when = Rounds(rounds=4, steps=2, sampling=sampling)
    found = accuracies(data, when, RUNS, MATRICES, SEEDS, people=people)
    expected = [[alone(data, when, run, seed, people) for seed in SEEDS] for run in RUNS]
    assert found[:, :, 0] == pytest.approx(np.array(expected), abs=0.0011)
    assert len({round(value, 3) for value in found.flatten().tolist()}) > 2


def test_each_lambda_has_the_rate_that_validation_chose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(2, size=400)
    inputs = (labels[:, None] * 2 - 1 + generator.normal(size=(400, 3))).astype(np.float32)
    data = Labelled(inputs[:200], labels[:200], ((inputs[200:300], labels[200:300]), (inputs[300:], labels[300:])), 2)
    monkeypatch.setattr(real_data, "AXIS", ("lambda-cgd:0.5",))
    bench = real_data.Bench("cpu", tmp_path, 10**6, 10**6, NEVER, NEVER)
    rows = list(real_data.by_lambda(bench, data))
    (tmp_path / "real_data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for figure, sampling in (("figure-2", "none"), ("figure-3", "balls-in-bins")):
        found = real_tables.against_lambda(rows, figure)
        assert {epsilon: list(by) for epsilon, by in found.items()} == {1.0: [0.5], 8.0: [0.5]}
        for by in found.values():
            for row in by.values():
                assert row["recipe"]["sampling"] == sampling
                best = max(range(7), key=lambda place: row["validation"][place])
                assert row["rate"] == 50 * 2.0 ** (best - 6)
                assert len(row["test"]) == 3
    quiet, loud = (real_tables.against_lambda(rows, "figure-3")[e][0.5] for e in (8.0, 1.0))
    assert quiet["sigma"] < loud["sigma"]
    assert min(quiet["test"]) > 0.8
    table = lambdas(tmp_path, "")
    assert table.count("\n") == 6
    assert real_tables.lambda_picture(tmp_path).axes


def test_a_plan_from_public_pictures_trains_alone_and_on_what_else_validates(tmp_path: Path) -> None:
    """Nothing is chosen by validation, and a run whose step failed does not end well."""
    write_python(tmp_path / "cifar-10-batches-py")
    cell = ("cifar10-public", 50_000, 15_552)
    recipe = Recipe(mechanism="dp-sgd", sampling="none", users=50_000, steps=1, participations=2)
    plan = {"recipe": asdict(recipe), "rate": 1.0}
    sheet = real_data.Sheet(
        {real_data.noise_key(recipe, e): {"sigma": 1.0, "column": [1.0]} for e in real_data.EXAM.epsilons},
        {real_data.plan_key(real_data.PUBLIC, cell, e): plan for e in real_data.EXAM.epsilons},
    )
    (tmp_path / "sheet.json").write_text(json.dumps(asdict(sheet)))

    def run() -> None:
        real_data.run_command(
            tmp_path / "sheet.json", tmp_path / "rows.jsonl", tmp_path, device="cpu", linear="cifar10-public"
        )

    with pytest.raises(SystemExit, match="features"):
        run()
    pictures = np.random.default_rng(0).integers(256, size=(6, 3, 32, 32), dtype=np.uint8)
    np.save(tmp_path / "public-raw-15552.npy", cifar10.inputs(pictures, 8, raw=True).numpy())
    run()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["label"], row["users"], row["epsilon"], len(row["test"])) for row in rows] == [
        (real_data.PUBLIC, 50_000, epsilon, 5) for epsilon in real_data.EXAM.epsilons
    ]
    bench = real_data.Bench("cpu", tmp_path, 10**6, 10**6, NEVER, NEVER)
    ((*found, data),) = real_data.feature_sets(bench, sheet, ("cifar10-public",), set())
    assert (tuple(found), len(data.inputs), len(data.labels)) == (cell, 50, 50)
