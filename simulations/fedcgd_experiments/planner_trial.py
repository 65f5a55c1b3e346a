"""Does `fedcgd plan` name the best recipe? Candidates of all kinds, tuned with equal budgets, on sets it has not seen.

    python -m fedcgd_experiments.planner_trial tune benchmarks/results/planner.jsonl [--only digits]
    python -m fedcgd_experiments.planner_trial judge benchmarks/results/planner.jsonl
    python -m fedcgd_experiments.planner_trial table benchmarks/results/planner.jsonl
    python -m fedcgd_experiments.planner_trial curve benchmarks/results/planner-digits.json
    python -m fedcgd_experiments.planner_trial noise benchmarks/results/planner-noise.jsonl

Softmax regression and small networks, for examples and for people, many learning rates, mechanisms and seeds at once
(`batched_descent`). The noise is that of each mechanism at its σ, from a seeded generator: no key, no lattice. `--device cuda` is
for a GPU. Goes on where it was stopped.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from sklearn import datasets

from fedcgd.accounting import calibrate, gaussian
from fedcgd.cli.declare import Argument
from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.schedule import Schedule
from fedcgd.optimisation import catalogue
from fedcgd.participation import Participation
from fedcgd.planning import planner
from fedcgd.planning.landscape import LinearModel
from fedcgd.planning.problem import PlanningProblem
from fedcgd.planning.recipe import Recipe
from fedcgd.planning.rules import RULES
from fedcgd.planning.theory import unit_progress
from fedcgd_experiments.batched_descent import Labelled, People, Rounds, Run, accuracies
from fedcgd_experiments.central_softmax import inverse_of
from fedcgd_experiments.tables import markdown
from fedcgd_simulations.commands import group_of
from fedcgd_simulations.tasks import fashion_mnist, tweets
from fedcgd_simulations.text import hashed_bag

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Trial:
    """How all is tried: δ, the parts of users/σ₁ that rates move a model by, seeds, (participations, ε)."""

    delta: float = 1e-5
    progress: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    tuning: range = range(4)
    tests: range = range(1000, 1040)
    cells: tuple[tuple[int, float], ...] = tuple(product((20, 5), (1.0, 4.0)))


TRIAL = Trial()


@dataclass(frozen=True)
class Set:
    """Inputs of unit norm with a one behind, and labels: to train, to validate, to test."""

    name: str
    x: tuple[Array, Array, Array]
    y: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
    model: "Model"

    @property
    def classes(self) -> int:
        return int(self.y[0].max()) + 1

    @property
    def hidden(self) -> tuple[int, ...]:
        """Units of the hidden layers."""
        return self.model.hidden

    @property
    def labelled(self) -> Labelled:
        """What is trained on, validated and tested."""
        looked_at = tuple(zip(self.x[1:], self.y[1:], strict=True))
        return Labelled(self.x[0], self.y[0], looked_at, self.classes, self.hidden, self.model.scaled)

    @property
    def people(self) -> People | None:
        """How people train, if those to train are people."""
        return People() if self.x[0].ndim == 3 else None


@dataclass(frozen=True)
class Model:
    """Units of the hidden layers, and how the weights start."""

    hidden: tuple[int, ...] = ()
    scaled: bool = True


MODELS = {
    "": Model(), "net": Model((32,)), "wide": Model((128,)), "deep": Model((64, 32)), "plain": Model((32,), scaled=False),
}  # fmt: skip
"""What stands behind the + in a name; plain is a network that starts as PyTorch's layers do."""


def split(name: str, x: NDArray[Any], y: NDArray[Any], train: int, test: int = 2000, seed: int = 0) -> Set:
    """`train` examples to train, a third of the rest (at most `test`) to validate, and others to test."""
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order].astype(np.float32), y[order].astype(np.int64)
    x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    x = np.hstack([x, np.ones((len(x), 1), np.float32)])
    rest = len(x) - train
    a, b = train + min(rest // 3, test), min(len(x), train + min(rest // 3, test) + test)
    return Set(name, (x[:train], x[train:a], x[a:b]), (y[:train], y[train:a], y[a:b]), MODELS[name.partition("+")[2]])


def as_people(data: Set, people: int) -> Set:
    """Those to train are people, each with as many examples of a few classes."""
    x, y = data.x[0], data.y[0]
    generator = np.random.default_rng(2)
    order = np.argsort(y + 1.5 * generator.normal(size=len(y)))[: len(y) // people * people]
    order = order.reshape(people, -1)[generator.permutation(people)]
    return replace(data, x=(x[order], *data.x[1:]), y=(y[order], *data.y[1:]))


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
    "moons": (3000, partial(datasets.make_moons, 4000, noise=0.2, random_state=8)),
    "three": (4000, blend(8000, 40, 15, 3, 10)),
    "rings": (3000, partial(datasets.make_circles, 5000, noise=0.15, factor=0.6, random_state=11)),
    "gauss": (5000, blobs(8000, 60, 4, 14.0, 12)),
    "maze": (6000, blend(10000, 16, 9, 5, 31, n_clusters_per_class=5)),
    "small": (800, blend(3000, 25, 9, 4, 32, n_clusters_per_class=2)),
    "crowd": (20000, blend(26000, 30, 12, 8, 33, n_clusters_per_class=3)),
    "shells": (
        4000,
        partial(datasets.make_gaussian_quantiles, n_samples=8000, n_features=10, n_classes=5, random_state=34),
    ),
    "knots": (5000, blend(9000, 24, 10, 3, 41, n_clusters_per_class=4)),
    "tiny": (1500, blend(4000, 40, 12, 6, 42)),
    "clouds": (5000, blobs(9000, 30, 20, 9.0, 43)),
    "spheres": (
        4000,
        partial(datasets.make_gaussian_quantiles, n_samples=9000, n_features=5, n_classes=4, random_state=44),
    ),
}
"""Sets of scikit-learn: so many to train, and how they are made."""


@lru_cache(maxsize=4)
def load(name: str) -> Set:
    """A set by its name."""
    base = name.partition("+")[0]
    if base == "people":
        return as_people(replace(load("fashion-all" + name.removeprefix(base)), name=name), 1000)
    if base in ("digits", "odd"):
        return digits(name)
    if base == "cancer":
        raw = datasets.load_breast_cancer()
        return split(name, standard(raw.data), raw.target, 369)
    if base in ("fashion", "fashion-all"):
        users, test, count = (6000, 2000, 12000) if base == "fashion" else (50000, 6000, 60000)
        folder = fashion_mnist.find_folder(None)
        images = fashion_mnist.read_idx(folder, "train-images-idx3-ubyte").reshape(-1, 784)[:count] / 255
        images = images.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196)  # 14 × 14, to be trained in seconds
        labels = fashion_mnist.read_idx(folder, "train-labels-idx1-ubyte")[:count]
        return split(name, images, labels, users, test)
    if base == "tweets":
        texts, classes = tweets.read_tweets(tweets.find_file(None))
        rows = np.random.default_rng(1).permutation(len(texts))[:8000]
        bag = hashed_bag([texts[i] for i in rows], features=256).numpy()
        return split(name, bag, np.array(classes)[rows], 4000)
    train, make = GENERATED[base]
    x, y = make()
    if base not in ("quantiles", "moons", "rings", "shells", "spheres"):
        return split(name, standard(x), y, train)
    generator = np.random.default_rng(9)  # random cosines, which make curved borders straight
    x = np.cos(x @ generator.normal(size=(x.shape[1], 200)) * 0.7 + generator.uniform(0, 6.28, 200))
    return split(name, x, y, train)


def digits(name: str, seed: int = 0) -> Set:
    """The digits, or whether they are odd; by `seed` others are held out."""
    raw = datasets.load_digits()
    return split(name, raw.data / 16, raw.target % 2 if name.startswith("odd") else raw.target, 1260, seed=seed)


LINEAR = (
    "digits", "cancer", "two", "five", "wide", "noisy", "blobs", "quantiles", "moons", "tweets", "fashion", "three", "rings",
    "gauss", "people", "fashion-all",
)  # fmt: skip
NETWORKS = (
    "digits+net", "five+net", "fashion+net", "odd+net",
    "maze+net", "crowd+net", "blobs+net", "rings+net", "small+plain", "shells+plain", "moons+plain", "quantiles+plain",
    "odd+wide", "fashion+deep", "digits+deep", "people+plain", "fashion-all+plain",
    "knots+plain", "tiny+net", "odd+deep", "cancer+plain", "tweets+plain", "blobs+deep", "clouds+plain", "spheres+wide",
)  # fmt: skip
SETS = LINEAR + NETWORKS
HELD_OUT = ("three", "rings", "gauss", "people", "fashion-all", *NETWORKS[-8:])
"""Sets that the constants of the planner have never seen."""
UNCENTRED = ("digits", "fashion", "fashion-all", "people", "moons", "rings")
"""Linear models of these have inputs with a large mean: pixels, and cosines that vary slowly."""


def model_of(data: Set) -> LinearModel | None:
    """What the plan may know of a linear model."""
    if data.hidden:
        return None
    return LinearModel(
        classes=data.classes, features=data.x[0].shape[-1] - 1, mean_share=0.9 if data.name in UNCENTRED else 0.0
    )


@lru_cache(maxsize=4096)
def sigma_of(mechanism: Mechanism, participation: Participation, epsilon: float) -> float:
    """σ at (ε, δ)."""
    return calibrate(mechanism, participation, epsilon=epsilon, delta=TRIAL.delta).noise_multiplier


@lru_cache(maxsize=128)
def noise_of(recipe: Recipe, epsilon: float) -> tuple[Array, float]:
    """(C⁻¹, σ) of a recipe at (ε, δ)."""
    mechanism = catalogue.mechanism(recipe.mechanism, recipe.participation, workload=recipe.workload)
    sigma = sigma_of(mechanism, recipe.participation, epsilon)
    return inverse_of(mechanism, recipe.rounds), sigma


def trained(
    data: Set, runs: Sequence[tuple[Recipe, float]], epsilon: float, seeds: Sequence[int], device: str
) -> NDArray[np.float64]:
    """(validation, test) accuracy of each run (a recipe and its learning rate) and seed, shape (len(runs), len(seeds), 2)."""
    found = np.empty((len(runs), len(seeds), 2))
    groups: dict[Rounds, list[int]] = {}
    for place, (recipe, _) in enumerate(runs):
        groups.setdefault(Rounds(recipe.rounds, recipe.steps, recipe.sampling), []).append(place)
    for when, places in groups.items():
        kinds = list(dict.fromkeys(runs[place][0] for place in places))
        noises = [
            (inverse * sigma).astype(np.float32) for inverse, sigma in (noise_of(kind, epsilon) for kind in kinds)
        ]
        moved = [
            Run(kinds.index(recipe), rate * recipe.workload.rates(recipe.rounds), recipe.momentum)
            for recipe, rate in (runs[place] for place in places)
        ]
        found[places] = accuracies(data.labelled, when, moved, noises, seeds, people=data.people, device=device)
    return found


WAYS: tuple[tuple[Schedule, float], ...] = (("constant", 0.0), ("constant", 0.9), ("linear", 0.9))


def candidates(users: int, participations: int) -> list[Recipe]:
    """What is tuned: three ways to descend, of each mechanism and sampling, in batches of several sizes."""
    kinds: list[tuple[str, str, int]] = [
        ("dp-sgd", "none", 1),
        *(("dp-sgd", "poisson", steps) for steps in (3, 7, 20)),
    ]
    for steps, lams in ((3, (0.5, 0.7)), (7, (0.7, 0.9)), (20, (0.7, 0.9))):
        kinds += [*((f"lambda-cgd:{lam}", "none", steps) for lam in lams), (f"band-mf:{steps}", "none", steps)]
    kinds += ((f"lambda-cgd:{lam}", "balls-in-bins", steps) for steps in (7, 20) for lam in (0.5, 0.8))
    return [
        Recipe(
            mechanism=name, sampling=sampling, users=users, steps=steps, participations=participations,
            schedule=schedule, momentum=momentum
        )
        for name, sampling, steps in kinds
        for schedule, momentum in WAYS
    ]  # fmt: skip


def tune(name: str, epsilon: float, participations: int, done: set[str], device: str) -> Iterator[dict[str, Any]]:
    """The validation accuracy of every candidate at every rate, a record for each recipe that is not `done`."""
    data = load(name)
    scale = len(data.x[0]) / gaussian.sigma(epsilon=epsilon, delta=TRIAL.delta)
    recipes = [r for r in candidates(len(data.x[0]), participations) if identity(name, epsilon, r) not in done]
    runs = [(recipe, part * scale / unit_progress(recipe)) for recipe in recipes for part in TRIAL.progress]
    found = trained(data, runs, epsilon, TRIAL.tuning, device)[:, :, 0].mean(axis=1)
    for recipe, row in zip(recipes, found.reshape(-1, len(TRIAL.progress)), strict=True):
        yield {
            "set": name,
            "epsilon": epsilon,
            "recipe": asdict(recipe),
            "progress": [part * scale for part in TRIAL.progress],
            "validation": row.round(4).tolist(),
        }


def identity(name: str, epsilon: float, recipe: Recipe) -> str:
    """A text for each record."""
    return json.dumps([name, epsilon, asdict(recipe)], sort_keys=True)


Out = Annotated[Path, Argument(help="JSON lines, appended")]
Cell = tuple[str, int, float]
"""Set, participations and ε."""


def read(out: Path) -> list[dict[str, Any]]:
    """The records so far."""
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []


def tune_command(out: Out, only: str | None = None, device: str = "cpu") -> None:
    """Tune on every set, and write what is found as it is found."""
    done = {identity(r["set"], r["epsilon"], Recipe(**r["recipe"])) for r in read(out) if "recipe" in r}
    with out.open("a", encoding="utf-8") as file:
        for name, (participations, epsilon) in product([only] if only else SETS, TRIAL.cells):
            for record in tune(name, epsilon, participations, done, device):
                print(json.dumps(record), file=file, flush=True)
            print(name, participations, epsilon, "done", flush=True)


BASELINES: dict[str, Callable[[Recipe], bool]] = {
    "full batch": lambda recipe: recipe.steps == 1,
    "poisson": lambda recipe: recipe.sampling == "poisson",
    "anything, without amplification": lambda recipe: recipe.sampling == "none",
    "anything": lambda recipe: True,
}
SECRETS: dict[str, tuple[str, ...]] = {"nothing": (), "poisson or bins": ("poisson", "balls-in-bins")}


Try = tuple[Recipe, float, dict[str, Any]]
"""A recipe, its learning rate, and what else is known."""


def judged(data: Set, tries: dict[str, Try], epsilon: float, device: str) -> dict[str, Any]:
    """Test accuracies with seeds that nothing was chosen by."""
    runs = [(recipe, rate) for recipe, rate, _ in tries.values()]
    found = trained(data, runs, epsilon, TRIAL.tests, device)[:, :, 1].round(4).tolist()
    return {
        label: {"recipe": asdict(recipe), "rate": rate} | more | {"test": test}
        for (label, (recipe, rate, more)), test in zip(tries.items(), found, strict=True)
    }


def best_tuned(records: Sequence[dict[str, Any]], cell: Cell) -> dict[str, Try]:
    """The best of each baseline by validation, if all candidates are tuned."""
    tuned = [
        (Recipe(**r["recipe"]), r["progress"], r["validation"])
        for r in records
        if "recipe" in r and (r["set"], r["recipe"]["participations"], r["epsilon"]) == cell
    ]
    if len(tuned) < len(candidates(1000, cell[1])):
        return {}
    found: dict[str, Try] = {}
    for label, allowed in BASELINES.items():
        recipe, progress, validation = max((t for t in tuned if allowed(t[0])), key=lambda t: max(t[2]))
        found[label] = recipe, progress[int(np.argmax(validation))] / unit_progress(recipe), {}
    return found


def planned(data: Set, epsilon: float, participations: int) -> dict[str, Try]:
    """One try of the planner for each that can be secret, told of the model and not."""
    found: dict[str, Try] = {}
    made: dict[PlanningProblem, Try] = {}
    for (label, secret), known in product(SECRETS.items(), (False, True)):
        question = PlanningProblem(
            users=len(data.x[0]), epsilon=epsilon, delta=TRIAL.delta, secret=secret, participations=participations,
            model=model_of(data) if known else None,
            hidden_layers=len(data.hidden) if known and len(data.hidden) > 1 else None,
        )  # fmt: skip
        if question not in made:
            made[question] = one_try(question)
        found[plan_label(label, known=known)] = made[question]
    return found


def one_try(question: PlanningProblem) -> Try:
    """What is planned, its rate, and how long that took."""
    started = time.process_time()
    best = planner.plan_recipes(question)[0]
    return best.recipe, best.outcome.learning_rate, {"seconds": round(time.process_time() - started, 1)}


def judge_command(out: Out, only: str | None = None, device: str = "cpu") -> None:
    """On each set that is tuned: the planner's recipe at the planner's rate, and what is best by validation, on fresh seeds."""
    records = read(out)
    before = judgements(records)
    for (participations, epsilon), name in product(TRIAL.cells, [only] if only else SETS):
        cell = (name, participations, epsilon)
        best = best_tuned(records, cell)
        if best and plan_label("nothing", known=True) not in before.get(cell, {}):
            data = load(name)
            keep(out, cell, judged(data, best | planned(data, epsilon, participations), epsilon, device))


def keep(out: Path, cell: Cell, found: dict[str, Any]) -> None:
    """Append what was judged, and print its means in percent."""
    with out.open("a", encoding="utf-8") as file:
        print(
            json.dumps(dict(zip(("set", "participations", "epsilon"), cell, strict=True)) | {"judged": found}),
            file=file,
        )
    print(*cell, {label: round(100 * float(np.mean(one["test"])), 1) for label, one in found.items()}, flush=True)


def behind(judged: dict[str, Any], label: str, planned: str) -> float:
    """By how many points the plan is behind what `label` names, over the seeds that both have."""
    best, plan = judged[label]["test"], judged[planned]["test"]
    both = min(len(best), len(plan))
    return 100 * float(np.mean(best[:both]) - np.mean(plan[:both]))


def plan_label(secret: str, *, known: bool) -> str:
    """What the judgement of a plan is called that knows a linear model's size, or that the model is a network."""
    return f"plan{', size known' if known else ''}, secret: {secret}"


def judgements(records: Sequence[dict[str, Any]]) -> dict[Cell, dict[str, Any]]:
    """(set, participations, ε) → all that was judged there, by label."""
    found: dict[Cell, dict[str, Any]] = {}
    for r in records:
        if "judged" in r:
            found.setdefault((r["set"], r["participations"], r["epsilon"]), {}).update(r["judged"])
    return found


def curve_command(out: Out, cohort: int = 60, participations: int = 10) -> None:
    """Digits at many ε: DP-SGD at the best of 24 candidates by validation, in cohorts of 60 and of all; the plan at its own rate.

    Each of 20 seeds trains on and holds out other digits: between ten such draws alone accuracies differ by five points.
    """
    data, rows = load("digits"), []
    users = len(data.x[0])
    baselines: dict[str, tuple[str, int]] = {
        "dp-sgd, nothing secret": ("none", users // cohort),
        "dp-sgd, poisson": ("poisson", users // cohort),
        "dp-sgd, full batch": ("none", 1),
    }
    for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0):
        scale, row = users / gaussian.sigma(epsilon=epsilon, delta=TRIAL.delta), dict[str, Any](epsilon=epsilon)
        tries: dict[str, tuple[Recipe, float]] = {}
        for label, (sampling, steps) in baselines.items():
            runs = [
                (recipe, part * scale / unit_progress(recipe))
                for schedule, momentum in RULES.tried.ways
                for recipe in [Recipe(mechanism="dp-sgd", sampling=sampling, users=users, steps=steps,
                                      participations=participations, schedule=schedule, momentum=momentum)]
                for part in (1 / 16, 1 / 8, *TRIAL.progress)
            ]  # fmt: skip
            tries[label] = runs[int(np.argmax(trained(data, runs, epsilon, range(3), "cpu")[:, :, 0].mean(axis=1)))]
        question = PlanningProblem(
            users=users,
            epsilon=epsilon,
            delta=TRIAL.delta,
            participations=participations,
            max_cohort=cohort,
            model=model_of(data),
        )
        one = next(one for one in planner.plan_recipes(question) if one.mechanism.name == "lambda-cgd")
        tries["plan, nothing secret"] = one.recipe, one.outcome.learning_rate
        tests = [
            trained(digits("digits", seed), list(tries.values()), epsilon, [seed], "cpu")[:, 0, 1]
            for seed in TRIAL.tests[:20]
        ]
        row |= {label: test.round(4).tolist() for label, test in zip(tries, np.transpose(tests), strict=True)}
        row["plan"] = asdict(one.recipe) | {"rate": one.outcome.learning_rate}
        rows.append(row)
        print(epsilon, {label: round(100 * float(np.mean(row[label])), 1) for label in tries}, flush=True)
    out.write_text(json.dumps(rows) + "\n", encoding="utf-8")


def noise_command(out: Out) -> None:
    """How much of what a model gains over guessing is kept, against the signal to noise of its plan, with few users.

    Without noise is the best of three rates at ε = 1000.
    """
    rows = []
    for name, users in product(("digits", "five", "blobs", "wide", "digits+net", "five+net"), (10, 30, 100, 300, 1000)):
        whole = load(name)
        data = replace(whole, x=(whole.x[0][:users], *whole.x[1:]), y=(whole.y[0][:users], *whole.y[1:]))
        question = PlanningProblem(
            users=users, epsilon=1000.0, delta=TRIAL.delta, participations=10, model=model_of(whole)
        )
        guessing = float(np.bincount(data.y[2]).max()) / len(data.y[2])
        loud = planner.recommended(planner.plan_recipes(question))
        rates = [(loud.recipe, factor * loud.outcome.learning_rate) for factor in (0.3, 1, 3)]
        best = float(trained(data, rates, 1000.0, TRIAL.tests[:3], "cpu")[:, :, 1].mean(axis=1).max())
        for epsilon in (0.3, 1.0, 3.0, 8.0):
            one = planner.recommended(planner.plan_recipes(replace(question, epsilon=epsilon)))
            run = [(one.recipe, one.outcome.learning_rate)]
            test = float(trained(data, run, epsilon, TRIAL.tests[:10], "cpu")[0, :, 1].mean())
            rows.append(
                {"set": name, "users": users, "epsilon": epsilon, "recipe": asdict(one.recipe),
                 "signal_to_noise": round(one.outcome.signal_to_noise, 2), "guessing": round(guessing, 4),
                 "without_noise": round(best, 4), "test": round(test, 4)}
            )  # fmt: skip
        out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def table_command(out: Out) -> None:
    """The judgements as a table in Markdown: accuracies in percent, and how far the plan is behind each."""
    cells = judgements(read(out))
    show(cells, [*BASELINES, *(plan_label(label, known=known) for label in SECRETS for known in (False, True))])
    compared = (
        ("nothing", "anything, without amplification"), ("nothing", "full batch"), ("nothing", "poisson"),
        ("poisson or bins", "poisson"), ("poisson or bins", "anything"),
    )  # fmt: skip
    groups = (
        ("all", SETS), ("linear", LINEAR), ("networks", NETWORKS),
        ("linear, held out", set(LINEAR) & set(HELD_OUT)), ("networks, held out", set(NETWORKS) & set(HELD_OUT)),
    )  # fmt: skip
    for (secret, label), known, (which, chosen) in product(compared, (False, True), groups):
        plan = plan_label(secret, known=known)
        lost = [behind(each, label, plan) for (name, *_), each in cells.items() if name in chosen]
        if lost:
            print(summary(f"{plan}, behind {label}, {which}", lost))


def show(cells: dict[Cell, dict[str, Any]], labels: Sequence[str]) -> None:
    """Mean accuracies in percent, a row for each cell; a dash for what was not judged there."""
    rows = [
        [name, str(participations), f"{epsilon:g}"]
        + [f"{100 * np.mean(each[label]['test']):.1f}" if label in each else "–" for label in labels]
        for (name, participations, epsilon), each in cells.items()
    ]
    print(markdown(["set", "participations", "ε", *labels], rows), end="")


def summary(title: str, lost: Sequence[float]) -> str:
    """How far behind in points, over all cells."""
    points = np.array(lost)
    return (
        f"{title} ({len(points)}): mean {points.mean():+.2f}, worst {points.max():+.1f}, best gain {-points.min():.1f}; "
        f"within 0.5: {np.mean(points <= 0.5):.0%}, within 1: {np.mean(points <= 1):.0%}"
    )


app = group_of(
    {
        "tune": tune_command,
        "judge": judge_command,
        "curve": curve_command,
        "noise": noise_command,
        "table": table_command,
    },
    help=__doc__ or "",
)

if __name__ == "__main__":
    app()
