"""CIFAR-10 and IMDB on one GPU, in minutes: networks at a paper's values, linear models on features, the planner's recipes.

    python -m fedcgd_experiments.real_data public PICTURES DATA                  for plans from public inputs: `public_pictures`
    python -m fedcgd_experiments.real_data prepare sheet.json --public DATA      every σ, and every plan: on a CPU, once
    python -m fedcgd_experiments.real_data run sheet.json rows.jsonl --data-dir DATA --minutes 9
    python -m fedcgd_experiments.real_data run sheet.json rows.jsonl --data-dir DATA --device cpu --linear minilm     one set
    python -m fedcgd_experiments.real_data lambdas rows.jsonl --data-dir DATA         Figures 2 and 3, linear: on a CPU, minutes

Many models at once (`stacked_cnn`, `batched_descent`), with the noise of each mechanism at its σ from a seeded generator: no
key, no lattice. Rows are written as they come, and what is there is not trained again: to
judge a changed planner, take its rows out.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import click
import numpy as np
import torch
from scipy.linalg import toeplitz
from torch import Tensor
from torch.nn import functional

from fedcgd.cli.declare import Argument, Option
from fedcgd.planning.recipe import Recipe
from fedcgd.planning.theory import unit_progress
from fedcgd_experiments import stacked_cnn
from fedcgd_experiments.batched_descent import Labelled, Rounds, Run, accuracies
from fedcgd_experiments.real_tables import PLAN, PUBLIC
from fedcgd_experiments.runner import Deadline, PausedError, within
from fedcgd_experiments.stacked_cnn import Copy, Trainable
from fedcgd_simulations import minilm, scattering
from fedcgd_simulations.commands import group_of
from fedcgd_simulations.models.cnn import cnn
from fedcgd_simulations.public_pictures import read, things_on_photographs
from fedcgd_simulations.task import Data, Examples, seeded
from fedcgd_simulations.tasks import cifar10, imdb


@dataclass(frozen=True)
class Exam:
    """How all is tried.

    Attributes:
        delta: δ.
        epsilons: of linear models.
        participations: epochs of linear models.
        parts: learning rates that are tried, as parts of what moves a model by users/σ₁, σ₁ of one release at the budget.
        tests: seeds that nothing was chosen by, of networks the first three; 0 is what chooses.
        first_rounds: after which the pace is measured, over twice as many.
    """

    delta: float = 1e-5
    epsilons: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 8.0)
    participations: int = 60
    parts: tuple[float, ...] = tuple(2.0 ** (k / 2) for k in range(-6, 5))
    tests: tuple[int, ...] = tuple(range(1000, 1005))
    first_rounds: int = 5


EXAM = Exam()
Row = dict[str, Any]
DataDir = Annotated[Path, Option("--data-dir", help="folder of cifar-10-batches-bin and aclImdb")]


@dataclass(frozen=True)
class Net:
    """A copy of the CNN: what it belongs to, its recipe at an ε, its first rate, its seed."""

    figure: str
    recipe: Recipe
    epsilon: float
    rate: float
    seed: int


def net(figure: str, mechanism: str, sampling: str, epsilon: float, rate: float, seed: int, **more: Any) -> Net:
    """Ten epochs of batches of 128, with a constant rate and without momentum, unless `more` says otherwise."""
    given: dict[str, Any] = {"steps": 352, "participations": 10, "schedule": "constant", "momentum": 0.0, **more}
    return Net(figure, Recipe(mechanism=mechanism, sampling=sampling, users=45_000, **given), epsilon, rate, seed)


TABLE_3 = {
    1.0: ("lambda-cgd:0.9", 0.2),
    2.0: ("lambda-cgd:0.9", 0.2),
    4.0: ("lambda-cgd:0.95", 0.5),
    8.0: ("lambda-cgd:0.95", 0.5),
}
"""By ε: λ-CGD's number and rate in Table 3 of arXiv:2601.22334; DP-SGD's rate is 0.2."""
NONE = {
    "λ-CGD, without amplification": TABLE_3,
    "DP-SGD, without amplification": dict.fromkeys(TABLE_3, ("dp-sgd", 0.2)),
}
LAMBDAS = ("lambda-cgd:0.9", "dp-sgd", "lambda-cgd:0.95", "lambda-cgd:0.8", "lambda-cgd:0.975", "lambda-cgd:0.5")


def figure_4(epsilons: Sequence[float]) -> list[Net]:
    """At Table 3's values; and without amplification, with a falling rate, of which four are tried."""
    given = [
        one
        for seed, epsilon in product(EXAM.tests[:3], epsilons)
        for one in (
            net("figure-4", "dp-sgd", "poisson", epsilon, 0.2, seed),
            net("figure-4", TABLE_3[epsilon][0], "balls-in-bins", epsilon, TABLE_3[epsilon][1], seed),
        )
    ]
    tried = [
        net("figure-4 tuning", arm[epsilon][0], "none", epsilon, rate, 0, schedule="linear")
        for epsilon, arm, rate in product(epsilons, NONE.values(), (0.1, 0.2, 0.5, 1.0))
    ]
    return given + tried


def chosen(rows: Sequence[Row]) -> list[Net]:
    """What validation chose of the rates that were tried, for the seeds that test."""
    best: dict[tuple[str, float], Row] = {}
    for row in rows:
        if row.get("figure") == "figure-4 tuning":
            place = row["recipe"]["mechanism"].split(":")[0], row["epsilon"]
            best[place] = max(best.get(place, row), row, key=lambda one: float(one["validation"]))
    return [
        Net("figure-4", Recipe(**row["recipe"]), row["epsilon"], row["rate"], seed)
        for seed, row in product(EXAM.tests[:3], best.values())
    ]


def lambdas(figure: str, sampling: str, epsilon: float, rates: Sequence[float], **more: Any) -> list[Net]:
    """Each λ at each rate."""
    return [net(figure, name, sampling, epsilon, rate, 0, **more) for name, rate in product(LAMBDAS, rates)]


def stacks(rows: Callable[[], Sequence[Row]]) -> Iterator[list[Net]]:
    """What is trained together, the most important first, and in it too."""
    yield figure_4((8.0, 4.0, 2.0))
    yield chosen(rows())
    by_lambda = lambdas("figure-3", "balls-in-bins", 8.0, (0.2, 0.5)) + lambdas(
        "figure-2 128", "none", 8.0, (0.1, 0.2, 0.5)
    )
    yield [one for one in by_lambda if one.recipe.mechanism != "dp-sgd" or one.recipe.sampling == "none"]
    yield lambdas("figure-2 1024", "none", 8.0, (0.2, 0.5, 1.0), steps=44)
    yield figure_4((1.0,))
    yield chosen(rows())


ARMS: Mapping[str, Sequence[tuple[str, str, int]]] = {
    "λ-CGD, without amplification": [(f"lambda-cgd:{lam}", "none", 20) for lam in (0.9, 0.95, 0.975)],
    "banded Toeplitz, without amplification": [("banded-toeplitz:20", "none", 20)],
    "DP-SGD, without amplification": [("dp-sgd", "none", 20)],
    "DP-SGD, full batch": [("dp-sgd", "none", 1)],
    "DP-SGD, Poisson": [("dp-sgd", "poisson", 20), ("dp-sgd", "poisson", 5)],
}
"""Of linear models: mechanism, sampling, rounds of an epoch."""


def recipes_of(users: int, label: str) -> list[Recipe]:
    """The recipes of an arm: 60 epochs, a falling rate, momentum 0.9."""
    return [
        Recipe(mechanism=mechanism, sampling=sampling, users=users, steps=steps, participations=EXAM.participations)
        for mechanism, sampling, steps in ARMS[label]
    ]


SETS = (
    *(("cifar10", 45_000, features, 10) for features in (4800, 15_552, 1200, 300)),
    *(("cifar10", 20_000, features, 10) for features in (4800, 1200, 300)),
    ("imdb", 22_500, imdb.SIZES.features, 2),
    ("minilm", 22_500, minilm.WIDTH, 2),
    *(
        ("cifar10-public", users, features, 10)
        for users, features in ((45_000, 4800), (50_000, 4800), (50_000, 15_552))
    ),
)
"""Of linear models: data, examples, features and classes; `cifar10-public`: features normalised with those of public pictures.

Of these the plan from public inputs alone is trained, so that the examples that else validate can train too: 50,000.
"""
TEXTS = {"imdb": "softmax", "minilm": "minilm"}
"""The model of the task whose inputs a set of reviews has."""


def arms_of(name: str) -> tuple[str, ...]:
    """The labels that are tuned on a set."""
    return () if name == "cifar10-public" else tuple(ARMS)


def noise_key(recipe: Recipe, epsilon: float) -> str:
    """What a recipe's noise depends on, but for who takes part."""
    return json.dumps([epsilon, *(value for name, value in asdict(recipe).items() if name != "users")])


def public_command(
    pictures: Annotated[Path, Argument(help="folder of stamps and photographs")],
    data: Annotated[Path, Argument(help="folder for public-FEATURES.npy")],
    count: int = 4000,
) -> None:
    """Scattering features of public pictures (`public_pictures`), as many as CIFAR-10's."""
    made = things_on_photographs(*read(pictures), np.random.default_rng(0))
    pixels = np.stack([np.asarray(next(made)).transpose(2, 0, 1) for _ in range(count)])
    four, eight = (cifar10.inputs(pixels, angles) for angles in (4, 8))
    for features in (four, pooled(four, 4, 1200), pooled(four, 4, 300), eight):
        np.save(data / f"public-{features.shape[1]}.npy", features.numpy())
    for angles, features in ((4, four), (8, eight)):
        np.save(data / f"public-raw-{features.shape[1]}.npy", cifar10.inputs(pixels, angles, raw=True).numpy())


def normaliser(public: Tensor) -> Callable[[Tensor], Tensor]:
    """Of raw features: scaled to norm 1, less the mean of the public ones, each channel over its deviation there."""

    def unit(features: Tensor) -> Tensor:
        return functional.normalize(features.flatten(1), dim=1).view(-1, *public.shape[1:])

    known = unit(public)
    mean = known.mean(0)
    scale = (known - mean).square().mean((0, 2, 3)).sqrt().view(-1, 1, 1)

    def normalised(features: Tensor) -> Tensor:
        return ((unit(features) - mean.to(features.device)) / scale.to(features.device)).flatten(1)

    return normalised


def public_inputs(folder: Path, name: str, features: int) -> Any:
    """What `public_command` made for a set."""
    if name == "cifar10-public":
        raw = torch.from_numpy(np.load(folder / f"public-raw-{features}.npy"))
        return normaliser(raw)(raw).numpy()
    return np.load(folder / f"public-{features}.npy")


def prepare_command(
    sheet: Annotated[Path, Argument(help="a file of JSON to write, or to complete")],
    public: Annotated[Path | None, Option(help="folder of public-FEATURES.npy, for plans from public inputs")] = None,
) -> None:
    """σ and C⁻¹ of all that is trained, and all plans: nothing of it needs private data."""
    from fedcgd.planning import planner
    from fedcgd.planning.landscape import LinearModel
    from fedcgd.planning.problem import PlanningProblem

    made = json.loads(sheet.read_text()) if sheet.exists() else {"noise": {}, "plans": {}}

    def keep(recipe: Recipe, epsilon: float) -> None:
        key = noise_key(recipe, epsilon)
        if key not in made["noise"]:
            made["noise"][key] = noise_row(recipe, epsilon)
            print(key, made["noise"][key]["sigma"], flush=True)

    wanted = [(recipe, epsilon) for label in ARMS for recipe in recipes_of(45_000, label) for epsilon in EXAM.epsilons]
    for stack in stacks(list):
        wanted += [(one.recipe, one.epsilon) for one in stack]
    wanted += [
        (Recipe(mechanism="dp-sgd", sampling="none", users=2, steps=1, participations=1), epsilon)
        for epsilon in EXAM.epsilons
    ]
    for recipe, epsilon in wanted:
        keep(recipe, epsilon)
        sheet.write_text(json.dumps(made))
    for name, users, features, classes in SETS:
        models = {PLAN: LinearModel(classes=classes, features=features)} if arms_of(name) else {}
        if public is not None and name.startswith("cifar10"):
            models[PUBLIC] = LinearModel.of_public_inputs(public_inputs(public, name, features), classes=classes)
        for (label, model), epsilon in product(models.items(), EXAM.epsilons):
            key = plan_key(label, (name, users, features), epsilon)
            if key not in made["plans"]:
                question = PlanningProblem(
                    users=users, epsilon=epsilon, delta=EXAM.delta, participations=EXAM.participations, model=model
                )
                best = planner.plan_recipes(question)[0]
                keep(best.recipe, epsilon)
                made["plans"][key] = {"recipe": asdict(best.recipe), "rate": best.outcome.learning_rate}
                sheet.write_text(json.dumps(made))
                print(key, made["plans"][key], flush=True)


def noise_row(recipe: Recipe, epsilon: float) -> dict[str, Any]:
    """σ, and the first column of C⁻¹, of which the others are shifts."""
    from fedcgd_experiments.planner_trial import noise_of

    inverse, sigma = noise_of(recipe, epsilon)
    assert np.array_equal(inverse, toeplitz(inverse[:, 0], np.zeros(recipe.rounds)))
    return {"sigma": sigma, "column": np.trim_zeros(inverse[:, 0], "b").tolist()}


def plan_key(label: str, cell: tuple[str, int, int], epsilon: float) -> str:
    """What a plan of a set (data, examples, features) is kept under."""
    return json.dumps([label, *cell, epsilon])


@dataclass(frozen=True)
class Sheet:
    """What `prepare_command` wrote."""

    noise: Mapping[str, Mapping[str, Any]]
    plans: Mapping[str, Mapping[str, Any]]

    def taps(self, recipe: Recipe, epsilon: float) -> tuple[float, ...]:
        """σ·C⁻¹ as the weights of this round's and of earlier rounds' Z."""
        found = self.noise[noise_key(recipe, epsilon)]
        return tuple(found["sigma"] * value for value in found["column"])

    def sigma(self, recipe: Recipe, epsilon: float) -> float:
        """σ."""
        return float(self.noise[noise_key(recipe, epsilon)]["sigma"])


@dataclass(frozen=True)
class Bench:
    """Where and how large: a device, the folder of the data, the most examples and rounds (to try this out), and until when.

    What is to be begun must end `until` then, at the pace of its first rounds; all ends when it is `late`.
    """

    device: str
    data_dir: Path
    examples: int
    rounds: int
    until: Deadline
    late: Deadline

    def part(self, examples: Examples, most: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels, on the device."""
        count = min(most, self.examples)
        return examples.inputs[:count].to(self.device), examples.targets[:count].to(self.device)

    def rates(self, recipe: Recipe, first: float) -> list[float]:
        """Of all rounds."""
        return [float(first * rate) for rate in recipe.workload.rates(recipe.rounds)[: self.rounds]]

    def when(self, recipe: Recipe) -> Rounds:
        """Who takes part when."""
        return Rounds(min(recipe.rounds, self.rounds), recipe.steps, recipe.sampling)


class CrowdedError(Exception):
    """Time is left for so many copies of those that were begun."""


def networks(bench: Bench, sheet: Sheet, data: Data, nets: Sequence[Net]) -> Iterator[Row]:
    """A row for each net; of those for which time is too short, at the pace of the first rounds, the last are left out."""
    inputs, labels = bench.part(data.train, 45_000)
    kind = torch.bfloat16 if bench.device == "cuda" else torch.float32
    trainable = Trainable(inputs, labels, lambda seed: seeded(seed, cnn), 8.0, kind)
    while nets:
        copies = [
            Copy(
                bench.when(one.recipe),
                tuple(8.0 * tap for tap in sheet.taps(one.recipe, one.epsilon)),
                bench.rates(one.recipe, one.rate),
                one.seed,
            )
            for one in nets
        ]
        started = time.monotonic()
        try:
            weights = stacked_cnn.trained(trainable, copies, pace(bench, copies))
        except CrowdedError as error:
            nets = nets[: error.args[0]]
            continue
        seconds = (time.monotonic() - started) / len(nets)
        judged = [
            stacked_cnn.accuracies(trainable, weights, *bench.part(part, 10_000)).tolist()
            for part in (data.validation, data.test)
        ]
        for one, validation, test in zip(nets, *judged, strict=True):
            sigma = sheet.sigma(one.recipe, one.epsilon)
            found = {
                "sigma": sigma,
                "validation": round(validation, 4),
                "test": round(test, 4),
                "seconds": round(seconds, 2),
            }
            yield {**asdict(one), **found}
        return


def pace(bench: Bench, copies: Sequence[Copy]) -> Callable[[int], None]:
    """Raises CrowdedError after some rounds if time is too short for all, and PausedError when it is over."""
    began: list[float] = []
    total = copies[0].when.rounds

    def after(rounds: int) -> None:
        if rounds in (EXAM.first_rounds, 3 * EXAM.first_rounds):
            if bench.device == "cuda":
                torch.cuda.synchronize()
            began.append(time.monotonic())
        if rounds == 3 * EXAM.first_rounds:
            need = (began[1] - began[0]) / (2 * EXAM.first_rounds) * (total - rounds)
            left = 0.95 * (bench.until.end - began[1])
            print(f"{len(copies)} copies need {need:.0f} seconds, {left:.0f} are left", flush=True)
            if need > left:
                raise CrowdedError(int(len(copies) * left / need))
        if bench.late():
            raise PausedError(f"after {rounds} of {total} rounds")

    return after


def feature_sets(
    bench: Bench, sheet: Sheet, names: Sequence[str], done: set[tuple[Any, ...]]
) -> Iterator[tuple[str, int, int, Labelled]]:
    """(data, examples, features, what is trained on and looked at) of each set of these data that is not `done`."""

    @cache
    def scattered(angles: int) -> list[tuple[Tensor, Tensor]]:
        pictures = cifar10.load(bench.data_dir)
        parts = (bench.part(part, 45_000) for part in (pictures.train, pictures.validation, pictures.test))
        return [(scattering.features(inputs, angles), labels) for inputs, labels in parts]

    for name, users, features, classes in SETS:
        cell = name, users, features
        planned = [label for label in (PLAN, PUBLIC) if plan_key(label, cell, EXAM.epsilons[0]) in sheet.plans]
        if name not in names or all((*cell, label) in done for label in (*arms_of(name), *planned)):
            continue
        angles = 8 if features == 15_552 else 4
        if name == "cifar10-public":
            raw = cifar10.load(bench.data_dir, angles=angles, raw=True)
            normalised = normaliser(torch.from_numpy(np.load(bench.data_dir / f"public-raw-{features}.npy")))
            raws = [bench.part(part, 45_000) for part in (raw.train, raw.validation, raw.test)]
            parts = [(normalised(inputs), labels) for inputs, labels in raws]
            if users == 50_000:  # nothing is chosen by validation
                parts[0] = torch.cat([parts[0][0], parts[1][0]]), torch.cat([parts[0][1], parts[1][1]])
        elif name != "cifar10":
            data = imdb.load(TEXTS[name], bench.data_dir)
            parts = [bench.part(part, users) for part in (data.train, data.validation, data.test)]
        else:
            parts = [(pooled(inputs, angles, features)[:users], labels[:users]) for inputs, labels in scattered(angles)]
        train, *looked_at = ((with_one(inputs), labels) for inputs, labels in parts)
        yield name, users, features, Labelled(*train, tuple(looked_at), classes)


def pooled(features: Tensor, angles: int, wanted: int) -> Tensor:
    """`wanted` of the features: means over 2 × 2 or 4 × 4 neighbours of each channel."""
    maps = features.view(len(features), 3 * (1 + 2 * angles + angles**2), 8, 8)
    side = round((maps[0].numel() / wanted) ** 0.5)
    return functional.avg_pool2d(maps, side).flatten(1)


def with_one(inputs: Tensor) -> Tensor:
    """Of unit norm, and a one behind."""
    unit = functional.normalize(inputs, dim=1)
    return torch.cat([unit, torch.ones_like(unit[:, :1])], dim=1)


Try = tuple[str, Recipe, float, float]
"""Label, recipe, ε and first rate."""


def linear(
    bench: Bench, sheet: Sheet, data: Labelled, cell: tuple[str, int, int], done: set[tuple[Any, ...]]
) -> Iterator[Row]:
    """A row for each arm that is not `done` and ε: its best candidate by validation, tested; and the plans at their own rates."""
    started = time.monotonic()
    name, users, features = cell
    alone = Recipe(mechanism="dp-sgd", sampling="none", users=2, steps=1, participations=1)
    candidates: list[Try] = [
        (label, recipe, epsilon, part * users / sheet.sigma(alone, epsilon) / unit_progress(recipe))
        for label in arms_of(name)
        if (*cell, label) not in done
        for recipe, epsilon, part in product(recipes_of(users, label), EXAM.epsilons, EXAM.parts)
    ]
    found = trained(bench, sheet, data, candidates, (0,))[:, 0, 0]
    best: dict[tuple[str, float], int] = {}
    for place, (label, _, epsilon, _) in enumerate(candidates):
        if found[place] > found[best.setdefault((label, epsilon), place)]:
            best[label, epsilon] = place
    tries = [candidates[place] for place in best.values()]
    validation: list[float | None] = [float(found[place]) for place in best.values()]
    for label, epsilon in product((PLAN, PUBLIC), EXAM.epsilons):
        plan = sheet.plans.get(plan_key(label, cell, epsilon))
        if plan and (*cell, label) not in done:
            tries.append((label, Recipe(**plan["recipe"]), epsilon, plan["rate"]))
            validation.append(None)
    tests = trained(bench, sheet, data, tries, EXAM.tests)[:, :, 1].round(4).tolist()
    seconds = round((time.monotonic() - started) / (len(candidates) + len(tries) * len(EXAM.tests)), 3)
    for (label, recipe, epsilon, rate), chosen_by, test in zip(tries, validation, tests, strict=True):
        yield {
            "set": name, "users": users, "features": features, "label": label, "recipe": asdict(recipe), "epsilon": epsilon,
            "rate": rate, "sigma": sheet.sigma(recipe, epsilon), "validation": chosen_by, "test": test, "seconds": seconds,
        }  # fmt: skip


def trained(bench: Bench, sheet: Sheet, data: Labelled, tries: Sequence[Try], seeds: Sequence[int]) -> Any:
    """Accuracies on what is looked at, shape (tries, seeds, 2)."""
    found = np.empty((len(tries), len(seeds), 2))
    groups: dict[tuple[Rounds, int], list[int]] = {}
    for place, (_, recipe, _, _) in enumerate(tries):
        groups.setdefault((bench.when(recipe), recipe.participations), []).append(place)
    for (when, _), places in groups.items():
        kinds = list(dict.fromkeys(tries[place][1:3] for place in places))
        noises = [
            toeplitz(column, np.zeros_like(column)) for column in (columns(sheet, *kind, when.rounds) for kind in kinds)
        ]
        runs = [
            Run(kinds.index(tries[place][1:3]), np.array(bench.rates(recipe, rate)), recipe.momentum)
            for place in places
            for _, recipe, _, rate in [tries[place]]
        ]
        found[places] = accuracies(data, when, runs, noises, seeds, device=bench.device)
    return found


def columns(sheet: Sheet, recipe: Recipe, epsilon: float, rounds: int) -> Any:
    """σ times the first column of C⁻¹."""
    taps = np.array(sheet.taps(recipe, epsilon), np.float32)[:rounds]
    return np.pad(taps, (0, rounds - len(taps)))


def texts_command(data_dir: DataDir) -> None:
    """Turn IMDB into bags of words, a minute's work of a processor, while a GPU trains networks."""
    imdb.load("softmax", data_dir)


def run_command(
    sheet: Annotated[Path, Argument(help="what `prepare` wrote")],
    output: Annotated[Path, Argument(help="JSON lines, appended")],
    data_dir: DataDir,
    minutes: Annotated[float, Option(help="that all of it may take")] = 9.0,
    share: Annotated[float, Option(help="of them for the first stack of networks, at most")] = 0.55,
    device: str = "cuda",
    examples: Annotated[int, Option(help="the most of each part of the data; fewer to try this out")] = 45_000,
    rounds: Annotated[int, Option(help="the most of each training; fewer to try this out")] = 10**6,
    linear: Annotated[
        str | None,
        Option(type=click.Choice(dict.fromkeys(one[0] for one in SETS)), help="linear models on these alone"),
    ] = None,
) -> None:
    """Train everything, the most important first, until time is up. If one fails the rest goes on, and the command ends with 1.

    MiniLM's features take an hour of a core, so they are had by `--linear minilm` alone.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    late, first = within(minutes), within(minutes * share)
    bench = Bench(device, data_dir, examples, rounds, first, late)
    prepared = Sheet(**json.loads(sheet.read_text()))
    data = cifar10.load(data_dir) if linear is None else None

    def rows() -> list[Row]:
        return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []

    failed: list[str] = []

    def write(step: str, made: Iterator[Row]) -> None:
        started = time.monotonic()
        try:
            for row in made:
                with output.open("a") as file:
                    print(json.dumps(row), file=file)
        except PausedError as error:
            print(f"{step}: time is up {error}", flush=True)
        except Exception as error:  # one step's failure must not end the rest
            print(f"{step}: {type(error).__name__}: {error}", flush=True)
            failed.append(step)
        print(f"{step}: {time.monotonic() - started:.0f} seconds", flush=True)

    def networks_of(step: str, nets: Sequence[Net]) -> None:
        if data is None:
            return
        done = [{name: row.get(name) for name in Net.__dataclass_fields__} for row in rows()]
        missing = [one for one in nets if asdict(one) not in done]
        for count in dict.fromkeys(one.recipe.rounds for one in missing):
            write(step, networks(bench, prepared, data, [one for one in missing if one.recipe.rounds == count]))

    waiting = enumerate(stacks(rows))
    place, nets = next(waiting)
    networks_of(f"stack {place}", nets)
    bench = replace(bench, until=late)
    write(
        "features",
        linear_rows(
            bench,
            prepared,
            ("cifar10", "imdb") if linear is None else (linear,),
            {tuple(row.get(each) for each in ("set", "users", "features", "label")) for row in rows()},
        ),
    )
    for place, nets in waiting:
        if not late():
            networks_of(f"stack {place}", nets)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


AXIS = ("dp-sgd", *(f"lambda-cgd:{lam}" for lam in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99)))
"""Mechanisms by their λ, from 0 on."""


def by_lambda(bench: Bench, data: Labelled) -> Iterator[Row]:
    """A row for each sampling, ε and λ: ten epochs of 20 rounds at a constant rate, chosen for each by validation, tested."""
    users = len(data.inputs)
    for figure, sampling in (("figure-2", "none"), ("figure-3", "balls-in-bins")):
        recipes = [
            Recipe(
                mechanism=name, sampling=sampling, users=users, steps=20, participations=10, schedule="constant", momentum=0.0
            )
            for name in AXIS
        ]  # fmt: skip
        cells = list(product(recipes, (1.0, 8.0)))
        sheet = Sheet({noise_key(*cell): noise_row(*cell) for cell in cells}, {})
        rates = [0.78125 * 2.0**k for k in range(7)]  # the best of each lies between others
        tries = [(figure, *cell, rate) for cell, rate in product(cells, rates)]
        found = trained(bench, sheet, data, tries, (0,))[:, 0, 0].reshape(len(cells), -1)
        chosen = [tries[place * found.shape[1] + best] for place, best in enumerate(found.argmax(1))]
        tests = trained(bench, sheet, data, chosen, EXAM.tests[:3])[:, :, 1].round(4).tolist()
        for (_, recipe, epsilon, rate), validation, test in zip(chosen, found, tests, strict=True):
            yield {
                "figure": f"{figure} scattering", "recipe": asdict(recipe), "epsilon": epsilon, "rate": rate,
                "sigma": sheet.sigma(recipe, epsilon), "validation": validation.round(4).tolist(), "test": test,
            }  # fmt: skip


def lambdas_command(
    output: Annotated[Path, Argument(help="JSON lines, appended")],
    data_dir: DataDir,
    device: str = "cpu",
    examples: Annotated[int, Option(help="that are trained on")] = 20_000,
) -> None:
    """Figures 2 and 3 of arXiv:2601.22334 with a linear model: accuracy against λ, on 1200 scattering features of CIFAR-10."""
    loaded = cifar10.load(data_dir, angles=4)
    bench = Bench(device, data_dir, 45_000, 10**6, within(None), within(None))
    parts = [
        bench.part(part, 45_000) for part in (loaded.train.take(np.arange(examples)), loaded.validation, loaded.test)
    ]
    train, *looked_at = ((with_one(pooled(inputs, 4, 1200)), labels) for inputs, labels in parts)
    with output.open("a") as file:
        for row in by_lambda(bench, Labelled(*train, tuple(looked_at), 10)):
            print(json.dumps(row), file=file, flush=True)


def linear_rows(bench: Bench, sheet: Sheet, names: Sequence[str], done: set[tuple[Any, ...]]) -> Iterator[Row]:
    """The rows of each set of these data that is not `done`."""
    for name, users, features, data in feature_sets(bench, sheet, names, done):
        if bench.late():
            raise PausedError(f"before {name}, {users} × {features}")
        started = time.monotonic()
        yield from linear(bench, sheet, data, (name, users, features), done)
        print(f"{name}, {users} × {features}: {time.monotonic() - started:.0f} seconds", flush=True)


app = group_of(
    {
        "public": public_command,
        "prepare": prepare_command,
        "texts": texts_command,
        "run": run_command,
        "lambdas": lambdas_command,
    },
    help=__doc__ or "",
)

if __name__ == "__main__":
    app()
