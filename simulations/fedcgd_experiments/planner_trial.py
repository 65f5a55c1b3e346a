"""Does `fedcgd plan` name the best recipe? Candidates of all kinds, tuned with equal budgets, on sets it has not seen.

    python -m fedcgd_experiments.planner_trial tune benchmarks/results/planner.jsonl [--only digits]
    python -m fedcgd_experiments.planner_trial judge benchmarks/results/planner.jsonl
    python -m fedcgd_experiments.planner_trial rehearse benchmarks/results/planner.jsonl [--repeats 4]
    python -m fedcgd_experiments.planner_trial table benchmarks/results/planner.jsonl
    python -m fedcgd_experiments.planner_trial curve benchmarks/results/planner-digits.json

Softmax regression and a small network, in NumPy, many learning rates and mechanisms at once on the same batches and noise. The
noise is that of each mechanism at its σ, from a seeded generator: no key, no lattice. One core; goes on where it was stopped.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray
from sklearn import datasets

from fedcgd.accounting import calibrate, gaussian
from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.schedule import Schedule
from fedcgd.optimisation import catalogue
from fedcgd.participation import Participation, Sampling
from fedcgd.planning import planner
from fedcgd.planning.landscape import LinearModel
from fedcgd.planning.planner import PlannedRecipe
from fedcgd.planning.proxy import ArrayProxy
from fedcgd.planning.question import Question, SecretSampling
from fedcgd.planning.recipe import Recipe
from fedcgd.planning.rehearsal import RehearsedRecipe, rehearse
from fedcgd.planning.theory import unit_progress
from fedcgd_experiments.central_softmax import inverse_of
from fedcgd_experiments.tables import markdown
from fedcgd_simulations.tasks import fashion_mnist, tweets
from fedcgd_simulations.text import hashed_bag

Array = NDArray[np.float32]
DELTA = 1e-5


@dataclass(frozen=True)
class Set:
    """Inputs of unit norm with a one behind, and labels: to train, to validate, to test."""

    name: str
    x: tuple[Array, Array, Array]
    y: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
    hidden: int = 0

    @property
    def classes(self) -> int:
        return int(self.y[0].max()) + 1


def split(name: str, x: NDArray[Any], y: NDArray[Any], train: int, hidden: int = 0, test: int = 2000) -> Set:
    """`train` examples to train, a third of the rest (at most `test`) to validate, and others to test."""
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order].astype(np.float32), y[order].astype(np.int64)
    x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    x = np.hstack([x, np.ones((len(x), 1), np.float32)])
    rest = len(x) - train
    a, b = train + min(rest // 3, test), min(len(x), train + min(rest // 3, test) + test)
    return Set(name, (x[:train], x[train:a], x[a:b]), (y[:train], y[train:a], y[a:b]), hidden)


def standard(x: NDArray[Any]) -> NDArray[Any]:
    """Columns of mean 0 and deviation 1, as if their ranges were public."""
    return np.asarray((x - x.mean(0)) / np.maximum(x.std(0), 1e-12))


def blend(rows: int, columns: int, informative: int, classes: int, seed: int, **more: Any) -> Callable[[], Any]:
    """Makes a set of clusters around corners of a cube."""
    sizes = {"n_informative": informative, "n_classes": classes, "random_state": seed}
    return partial(datasets.make_classification, rows, columns, **sizes, **more)


def blobs(rows: int, columns: int, classes: int, spread: float, seed: int) -> Callable[[], Any]:
    """Makes a set with a round cluster for each class."""
    return partial(datasets.make_blobs, rows, columns, centers=classes, cluster_std=spread, random_state=seed)


GENERATED: dict[str, tuple[int, Callable[[], Any]]] = {
    "two": (2000, blend(6000, 20, 10, 2, 1)),
    "five": (5000, blend(9000, 50, 20, 5, 2)),
    "wide": (2000, blend(4000, 200, 30, 3, 3, n_clusters_per_class=1)),
    "noisy": (8000, blend(12000, 30, 8, 4, 4, flip_y=0.2)),
    "blobs": (3000, blobs(5000, 16, 10, 6.0, 5)),
    "quantiles": (3000, partial(datasets.make_gaussian_quantiles, n_samples=7000, n_features=8, random_state=6)),
    "hastie": (8000, partial(datasets.make_hastie_10_2, 12000, random_state=7)),
    "moons": (3000, partial(datasets.make_moons, 4000, noise=0.2, random_state=8)),
    "three": (4000, blend(8000, 40, 15, 3, 10)),
    "rings": (3000, partial(datasets.make_circles, 5000, noise=0.15, factor=0.6, random_state=11)),
    "gauss": (5000, blobs(8000, 60, 4, 14.0, 12)),
}
"""Sets of scikit-learn: so many to train, and how they are made."""


@lru_cache(maxsize=4)
def load(name: str) -> Set:
    """A set by its name."""
    base, _, net = name.partition("+")
    hidden = 32 if net else 0
    if base in ("digits", "odd"):
        raw = datasets.load_digits()
        return split(name, raw.data / 16, raw.target % 2 if base == "odd" else raw.target, 1260, hidden)
    if base == "cancer":
        raw = datasets.load_breast_cancer()
        return split(name, standard(raw.data), raw.target, 369, hidden)
    if base in ("fashion", "fashion-all"):
        users, test, count = (6000, 2000, 12000) if base == "fashion" else (50000, 6000, 60000)
        folder = fashion_mnist.find_folder(None)
        images = fashion_mnist.read_idx(folder, "train-images-idx3-ubyte").reshape(-1, 784)[:count] / 255
        images = images.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196)  # 14 × 14, to be trained in seconds
        labels = fashion_mnist.read_idx(folder, "train-labels-idx1-ubyte")[:count]
        return split(name, images, labels, users, hidden, test)
    if base == "tweets":
        texts, classes = tweets.read_tweets(tweets.find_file(None))
        rows = np.random.default_rng(1).permutation(len(texts))[:8000]
        bag = hashed_bag([texts[i] for i in rows], features=256).numpy()
        return split(name, bag, np.array(classes)[rows], 4000, hidden)
    train, make = GENERATED[base]
    x, y = make()
    if base not in ("quantiles", "moons", "rings"):
        return split(name, standard(x), (y > 0).astype(int) if base == "hastie" else y, train, hidden)
    generator = np.random.default_rng(9)  # random cosines, which make curved borders straight
    x = np.cos(x @ generator.normal(size=(x.shape[1], 200)) * 0.7 + generator.uniform(0, 6.28, 200))
    return split(name, x, y, train, hidden)


SETS = (
    "digits", "digits+net", "cancer", "two", "five", "five+net", "wide", "noisy", "blobs", "quantiles", "moons", "tweets",
    "fashion", "hastie+net", "fashion+net", "three", "rings", "gauss", "odd+net",
    "fashion-all", "fashion-all+net",
)  # fmt: skip
HELD_OUT = SETS[-8:]
"""Sets that the constants of the planner have never seen."""
UNCENTRED = ("digits", "fashion", "fashion-all", "moons", "rings")
"""Linear models of these have inputs with a large mean: pixels, and cosines that vary slowly."""


def model_of(data: Set) -> LinearModel | None:
    """What the plan may know of a linear model."""
    if data.hidden:
        return None
    return LinearModel(classes=data.classes, features=data.x[0].shape[1] - 1, centred=data.name not in UNCENTRED)


@lru_cache(maxsize=4096)
def sigma_of(mechanism: Mechanism, participation: Participation, epsilon: float) -> float:
    """σ at (ε, δ)."""
    return calibrate(mechanism, participation, epsilon=epsilon, delta=DELTA).noise_multiplier


@lru_cache(maxsize=128)
def noise_of(recipe: Recipe, epsilon: float) -> tuple[Array, float]:
    """(C⁻¹, σ) of a recipe at (ε, δ)."""
    mechanism = catalogue.mechanism(recipe.mechanism, recipe.participation, workload=recipe.workload)
    sigma = sigma_of(mechanism, recipe.participation, epsilon)
    return inverse_of(mechanism, recipe.rounds), sigma


def batches(recipe: Recipe, seed: int) -> Iterator[NDArray[np.int64]]:
    """The rows of each round: by coins under Poisson sampling, else the same split in every turn."""
    generator = np.random.default_rng([seed, 1])
    order = generator.permutation(recipe.users)
    for t in range(recipe.rounds):
        if recipe.sampling == "poisson":
            yield np.flatnonzero(generator.random(recipe.users) < 1 / recipe.steps)
        else:
            yield order[t % recipe.steps :: recipe.steps]


def train(data: Set, runs: Sequence[tuple[Recipe, float]], epsilon: float, seed: int) -> NDArray[np.float64]:
    """(validation, test) accuracy of each run (a recipe and its learning rate), shape (len(runs), 2).

    All have the sampling, steps and turns of the first, so that they share batches and Z. Gradients are clipped to norm 1.
    """
    first, x, y = runs[0][0], data.x[0], data.y[0]
    generator, count = np.random.default_rng([seed, 2]), len(runs)
    d, c, h = x.shape[1], data.classes, data.hidden
    shapes = [(d, c)] if not h else [(d, h), (h + 1, c)]
    weights = [np.zeros((count, *shape), np.float32) for shape in shapes]
    if h:
        start = generator.normal(size=shapes[0]).astype(np.float32) * np.sqrt(2.0, dtype=np.float32)
        start[-1] = 0
        weights[0] += start
        weights[1][:, :-1] += generator.normal(size=(h, c)).astype(np.float32) * np.float32(1 / np.sqrt(h))
    velocities = [np.zeros_like(weight) for weight in weights]
    sizes = [int(np.prod(shape)) for shape in shapes]
    z = generator.standard_normal((first.rounds, sum(sizes)), dtype=np.float32)
    kinds = list(dict.fromkeys(recipe for recipe, _ in runs))
    made = [noise_of(recipe, epsilon) for recipe in kinds]
    kind = np.array([kinds.index(recipe) for recipe, _ in runs])
    noise, sigma = np.stack([inverse @ z for inverse, _ in made]), np.array([made[k][1] for k in kind], np.float32)
    rates = np.array([rate * recipe.workload.rates(first.rounds) for recipe, rate in runs], np.float32)
    momenta = np.array([recipe.momentum for recipe, _ in runs], np.float32)
    onehot, squares = np.eye(c, dtype=np.float32)[y], (x**2).sum(1)
    for t, rows in enumerate(batches(first, seed)):
        xb = x[rows]
        outputs, hidden = forward(xb, weights)
        residuals = onehot[rows] - softmax(outputs)
        norms = (residuals**2).sum(2)
        if hidden is not None:
            back = (residuals @ weights[1][:, :-1].transpose(0, 2, 1)) * (hidden > 0)
            norms = norms * ((hidden**2).sum(2) + 1) + (back**2).sum(2) * squares[rows]
            scale = (1 / np.maximum(np.sqrt(norms), 1))[:, :, None]
            residuals *= scale
            back *= scale
            lower = np.concatenate([hidden.transpose(0, 2, 1) @ residuals, residuals.sum(1)[:, None]], axis=1)
            sums = [xb.T @ back, lower]
        else:
            residuals *= (1 / np.maximum(np.sqrt(norms * squares[rows]), 1))[:, :, None]
            sums = [xb.T @ residuals]
        added = noise[kind, t] * sigma[:, None]
        for i, part in enumerate(np.split(added, np.cumsum(sizes)[:-1], axis=1)):
            velocities[i] *= momenta[:, None, None]
            velocities[i] += (sums[i] + part.reshape(weights[i].shape)) / np.float32(first.users / first.steps)
            weights[i] += rates[:, t, None, None] * velocities[i]
    return np.stack([(forward(data.x[i], weights)[0].argmax(2) == data.y[i]).mean(1) for i in (1, 2)], axis=1)


def forward(x: Array, weights: Sequence[Array]) -> tuple[Array, Array | None]:
    """Outputs, shape (runs, rows, classes), and what the hidden layer says, if there is one."""
    first = np.matmul(x, weights[0])
    if len(weights) == 1:
        return first, None
    hidden = np.maximum(first, 0)
    return hidden @ weights[1][:, :-1] + weights[1][:, -1:], hidden


def softmax(outputs: Array) -> Array:
    """Over the last axis."""
    result = np.exp(outputs - outputs.max(2, keepdims=True))
    return np.asarray(result / result.sum(2, keepdims=True), np.float32)


WAYS: tuple[tuple[Schedule, float], ...] = (("constant", 0.0), ("constant", 0.9), ("linear", 0.9))
PROGRESS = (0.25, 0.5, 1.0, 2.0)
TUNE_SEEDS = (0, 1)


def candidates(users: int, turns: int) -> list[Recipe]:
    """What is tuned: three ways to descend, of each mechanism and sampling, in batches of several sizes."""
    kinds: list[tuple[str, Sampling, int]] = [
        ("dp-sgd", "none", 1),
        *(("dp-sgd", "poisson", steps) for steps in (3, 7, 20)),
    ]
    for steps, lams in ((3, (0.5, 0.7)), (7, (0.7, 0.9)), (20, (0.7, 0.9))):
        kinds += [*((f"lambda-cgd:{lam}", "none", steps) for lam in lams), (f"band-mf:{steps}", "none", steps)]
    kinds += ((f"lambda-cgd:{lam}", "balls-in-bins", steps) for steps in (7, 20) for lam in (0.5, 0.8))
    return [
        Recipe(
            mechanism=name, sampling=sampling, users=users, steps=steps, turns=turns, schedule=schedule, momentum=momentum
        )
        for name, sampling, steps in kinds
        for schedule, momentum in WAYS
    ]  # fmt: skip


def tune(name: str, epsilon: float, turns: int, done: set[str]) -> Iterator[dict[str, Any]]:
    """The validation accuracy of every candidate at every rate, a record for each recipe that is not `done`."""
    data = load(name)
    scale = len(data.x[0]) / gaussian.sigma(epsilon=epsilon, delta=DELTA)
    todo = [r for r in candidates(len(data.x[0]), turns) if identity(name, epsilon, r) not in done]
    for _, group in groupby(todo, key=lambda recipe: (recipe.sampling, recipe.steps)):
        recipes = list(group)
        runs = [(recipe, part * scale / unit_progress(recipe)) for recipe in recipes for part in PROGRESS]
        found = np.mean([train(data, runs, epsilon, seed) for seed in TUNE_SEEDS], axis=0)
        for recipe, row in zip(recipes, found.reshape(len(recipes), len(PROGRESS), 2), strict=True):
            yield {
                "set": name,
                "epsilon": epsilon,
                "recipe": asdict(recipe),
                "progress": [part * scale for part in PROGRESS],
                "validation": row[:, 0].round(4).tolist(),
            }


def identity(name: str, epsilon: float, recipe: Recipe) -> str:
    """A text for each record."""
    return json.dumps([name, epsilon, asdict(recipe)], sort_keys=True)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
CELLS = tuple(product((20, 5), (1.0, 4.0)))
"""Turns and ε."""
Cell = tuple[str, int, float]
"""Set, turns and ε."""


def read(out: Path) -> list[dict[str, Any]]:
    """The records so far."""
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []


@app.command("tune")
def tune_command(out: Path, only: str | None = None) -> None:
    """Tune on every set, and write what is found as it is found."""
    done = {identity(r["set"], r["epsilon"], Recipe(**r["recipe"])) for r in read(out) if "recipe" in r}
    with out.open("a", encoding="utf-8") as file:
        for name, (turns, epsilon) in product([only] if only else SETS, CELLS):
            for record in tune(name, epsilon, turns, done):
                print(json.dumps(record), file=file, flush=True)
            print(name, turns, epsilon, "done", flush=True)


BASELINES: dict[str, Callable[[Recipe], bool]] = {
    "full batch": lambda recipe: recipe.steps == 1,
    "poisson": lambda recipe: recipe.sampling == "poisson",
    "anything, nothing secret": lambda recipe: recipe.sampling == "none",
    "anything": lambda recipe: True,
}
SECRETS: dict[str, tuple[SecretSampling, ...]] = {"nothing": (), "poisson or bins": ("poisson", "balls-in-bins")}
TEST_SEEDS = range(1000, 1010)
Plan = Callable[[Question], Sequence[PlannedRecipe]]
"""Plans, best first."""


def judged(data: Set, recipe: Recipe, rate: float, epsilon: float, seeds: Sequence[int] = TEST_SEEDS) -> list[float]:
    """Test accuracies with seeds that nothing was chosen by."""
    return [round(float(train(data, [(recipe, rate)], epsilon, seed)[0, 1]), 4) for seed in seeds]


@app.command("judge")
def judge_command(out: Path, only: str | None = None) -> None:
    """On each set that is tuned: the planner's recipe at the planner's rate, and what is best by validation, on fresh seeds."""
    records = read(out)
    before = judgements(records)
    for (turns, epsilon), name in product(CELLS, [only] if only else SETS):
        tuned = [
            (Recipe(**r["recipe"]), r["progress"], r["validation"])
            for r in records
            if "recipe" in r and (r["set"], r["recipe"]["turns"], r["epsilon"]) == (name, turns, epsilon)
        ]
        if len(tuned) < len(candidates(1000, turns)):
            continue
        done, data, found = before.get((name, turns, epsilon), {}), load(name), dict[str, Any]()
        for label, allowed in BASELINES.items():
            if label not in done:
                recipe, progress, validation = max((t for t in tuned if allowed(t[0])), key=lambda t: max(t[2]))
                rate = progress[int(np.argmax(validation))] / unit_progress(recipe)
                found[label] = {"recipe": asdict(recipe), "test": judged(data, recipe, rate, epsilon)}
        for (label, secret), known in product(SECRETS.items(), (False, True)):
            title = plan_label(label, known=known)
            if title not in done:
                question = Question(
                    users=len(data.x[0]), epsilon=epsilon, delta=DELTA, secret=secret, turns=turns,
                    model=model_of(data) if known else None, network=known and bool(data.hidden),
                )  # fmt: skip
                found[title] = one_try(data, question, planner.plan_recipes)
        if found:
            keep(out, (name, turns, epsilon), found)


def one_try(data: Set, question: Question, plan: Plan, seeds: Sequence[int] = TEST_SEEDS) -> dict[str, Any]:
    """What is planned, how long that took, and how good it is at its own rate."""
    started = time.process_time()
    planned = plan(question)[0]
    seconds, rate = round(time.process_time() - started, 1), planned.outcome.learning_rate
    score = {"score": planned.score} if isinstance(planned, RehearsedRecipe) else {}
    test = judged(data, planned.recipe, rate, question.epsilon, seeds)
    return {"recipe": asdict(planned.recipe), "rate": rate} | score | {"seconds": seconds, "test": test}


def keep(out: Path, cell: Cell, found: dict[str, Any]) -> None:
    """Append what was judged, and print its means in percent."""
    with out.open("a", encoding="utf-8") as file:
        print(json.dumps(dict(zip(("set", "turns", "epsilon"), cell, strict=True)) | {"judged": found}), file=file)
    print(*cell, {label: round(100 * float(np.mean(one["test"])), 1) for label, one in found.items()}, flush=True)


PROXIES = {
    "digits+net": ("fashion+net", "tweets+net", "half"),
    "odd+net": ("fashion+net", "tweets+net", "half"),
    "fashion+net": ("digits+net", "tweets+net", "half"),
    "five+net": ("digits+net", "fashion+net", "half"),
}
"""Sets that stand for another as if they were public; half is half of the set itself, the best that a proxy can be."""


REPEATS = 4
"""Of a second try with the same proxies, but for tweets."""


def proxy_of(name: str, data: Set) -> ArrayProxy:
    """The examples to train and to validate of another set, or half of those to train of `data`."""
    other = data if name == "half" else load(name)
    parts = slice(len(data.x[0]) // 2) if name == "half" else slice(None)
    inputs, labels = np.concatenate(other.x[:2]), np.concatenate(other.y[:2])
    return ArrayProxy(inputs[parts, :-1], labels[parts], hidden=other.hidden)


@app.command("rehearse")
def rehearse_command(out: Path, only: str | None = None, repeats: int = 1) -> None:
    """Networks: what is best on a proxy, nothing secret, on the seeds that the plan of theory was tested with."""
    for (turns, epsilon), name in product(CELLS, [only] if only else PROXIES):
        done = judgements(read(out)).get((name, turns, epsilon), {})
        seeds = TEST_SEEDS[: len(done.get(plan_label("nothing", known=False), {"test": []})["test"])]
        for proxy in PROXIES[name]:
            if not seeds or proxy_label(proxy, repeats) in done:
                continue
            data = load(name)
            question = Question(users=len(data.x[0]), epsilon=epsilon, delta=DELTA, turns=turns)
            plan = partial(rehearse, train=proxy_of(proxy, data), public=True, repeats=repeats)
            found = one_try(data, question, plan, seeds)
            keep(out, (name, turns, epsilon), {proxy_label(proxy, repeats): found})


def relation(proxy: str, name: str) -> str:
    """What a proxy is to a set."""
    if proxy == "half":
        return "half of the set itself"
    kinds = {"tweets": "tweets", "five": "columns"}
    kind, other = (kinds.get(one.partition("+")[0], "pictures") for one in (proxy, name))
    return f"{kind} for {other}"


def proxy_label(proxy: str, repeats: int) -> str:
    """What the judgement of a rehearsed plan is called."""
    return f"rehearsed on {proxy}" + (f", {repeats} repeats" if repeats > 1 else "")


def behind(judged: dict[str, Any], label: str, planned: str) -> float:
    """By how many points the plan is behind what `label` names, over the seeds that both have."""
    best, plan = judged[label]["test"], judged[planned]["test"]
    both = min(len(best), len(plan))
    return 100 * float(np.mean(best[:both]) - np.mean(plan[:both]))


def plan_label(secret: str, *, known: bool) -> str:
    """What the judgement of a plan is called that knows a linear model's size, or that the model is a network."""
    return f"plan{', size known' if known else ''}, secret: {secret}"


def judgements(records: Sequence[dict[str, Any]]) -> dict[Cell, dict[str, Any]]:
    """(set, turns, ε) → all that was judged there, by label."""
    found: dict[Cell, dict[str, Any]] = {}
    for r in records:
        if "judged" in r:
            found.setdefault((r["set"], r["turns"], r["epsilon"]), {}).update(r["judged"])
    return found


@app.command("curve")
def curve_command(out: Path, cohort: int = 60, turns: int = 10) -> None:
    """Digits at many ε, in cohorts of 60: DP-SGD at the best of 24 candidates by validation, and the plan at its own rate."""
    data, rows = load("digits"), []
    users = len(data.x[0])
    for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0):
        scale, row = users / gaussian.sigma(epsilon=epsilon, delta=DELTA), dict[str, Any](epsilon=epsilon)
        samplings: dict[str, Sampling] = {"dp-sgd, nothing secret": "none", "dp-sgd, poisson": "poisson"}
        for label, sampling in samplings.items():
            runs = [
                (recipe, part * scale / unit_progress(recipe))
                for schedule, momentum in planner.WAYS
                for recipe in [Recipe(mechanism="dp-sgd", sampling=sampling, users=users, steps=users // cohort, turns=turns,
                                      schedule=schedule, momentum=momentum)]
                for part in (1 / 16, 1 / 8, *PROGRESS)
            ]  # fmt: skip
            tuned = np.mean([train(data, runs, epsilon, seed)[:, 0] for seed in (0, 1, 2)], axis=0)
            recipe, rate = runs[int(np.argmax(tuned))]
            row[label] = judged(data, recipe, rate, epsilon)
        question = Question(
            users=users, epsilon=epsilon, delta=DELTA, turns=turns, max_cohort=cohort, model=model_of(data)
        )
        one = next(one for one in planner.plan_recipes(question) if one.mechanism.name == "lambda-cgd")
        row["plan, nothing secret"] = judged(data, one.recipe, one.outcome.learning_rate, epsilon)
        row["plan"] = asdict(one.recipe) | {"rate": one.outcome.learning_rate}
        rows.append(row)
    out.write_text(json.dumps(rows) + "\n", encoding="utf-8")


@app.command("table")
def table_command(out: Path) -> None:
    """The judgements as a table in Markdown: accuracies in percent, and how far the plan is behind each."""
    cells = judgements(read(out))
    cells = {cell: each for cell, each in cells.items() if cell[0] != "hastie+net"}  # which nothing learned
    show(cells, [*BASELINES, *(plan_label(label, known=known) for label in SECRETS for known in (False, True))])
    compared = (
        ("nothing", "anything, nothing secret"), ("nothing", "full batch"), ("nothing", "poisson"),
        ("poisson or bins", "poisson"), ("poisson or bins", "anything"),
    )  # fmt: skip
    linear, networks = ([name for name in SETS if ("+" in name) == hidden] for hidden in (False, True))
    groups = (("all", SETS), ("linear", linear), ("networks", networks), ("held out", HELD_OUT))
    for (secret, label), known, (which, chosen) in product(compared, (False, True), groups):
        plan = plan_label(secret, known=known)
        lost = [behind(each, label, plan) for (name, *_), each in cells.items() if name in chosen]
        if lost:
            print(summary(f"{plan}, behind {label}, {which}", lost))
    proxies = list(dict.fromkeys(proxy for each in PROXIES.values() for proxy in each))
    rehearsed = {cell: each for cell, each in cells.items() if any(proxy_label(proxy, 1) in each for proxy in proxies)}
    tried = {proxy_label(proxy, repeats): (proxy, repeats) for repeats, proxy in product((1, REPEATS), proxies)}
    baseline, theory = "anything, nothing secret", plan_label("nothing", known=False)
    show(rehearsed, [baseline, theory, *tried])
    pairs: dict[str, list[tuple[float, float]]] = {}
    for ((name, *_), each), (label, (proxy, repeats)) in product(rehearsed.items(), tried.items()):
        if label in each:
            title = f"{relation(proxy, name)}, repeats: {repeats}"
            pairs.setdefault(title, []).append((behind(each, baseline, label), behind(each, baseline, theory)))
    for title, both in pairs.items():
        for place, who in enumerate(("rehearsed", "theory")):
            print(summary(f"{title}, {who}", [pair[place] for pair in both]))


def show(cells: dict[Cell, dict[str, Any]], labels: Sequence[str]) -> None:
    """Mean accuracies in percent, a row for each cell; a dash for what was not judged there."""
    rows = [
        [name, str(turns), f"{epsilon:g}"]
        + [f"{100 * np.mean(each[label]['test']):.1f}" if label in each else "–" for label in labels]
        for (name, turns, epsilon), each in cells.items()
    ]
    print(markdown(["set", "turns", "ε", *labels], rows), end="")


def summary(title: str, lost: Sequence[float]) -> str:
    """How far behind in points, over all cells."""
    points = np.array(lost)
    return (
        f"{title} ({len(points)}): mean {points.mean():+.2f}, worst {points.max():+.1f}, best gain {-points.min():.1f}; "
        f"within 0.5: {np.mean(points <= 0.5):.0%}, within 1: {np.mean(points <= 1):.0%}"
    )


if __name__ == "__main__":
    app()
