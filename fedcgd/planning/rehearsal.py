"""Rehearsals of planned recipes on a public task with simulated noise: what learns best there, by successive halving.

Successive halving is that of Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization",
2016, arXiv:1502.07943: each level halves the candidates and doubles what each of them is given.
"""

import hashlib
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcgd.mechanisms.streaming import State, correlate
from fedcgd.planning.planner import PlannedRecipe, Progress, shortlist
from fedcgd.planning.problem import PlanningProblem
from fedcgd.planning.rules import RULES
from fedcgd.planning.theory import outcome_at
from fedcgd.support.numbers import duration

Floats = NDArray[np.float32]
Rows = NDArray[np.intp]


@dataclass(frozen=True)
class Rehearsal:
    """One training of the public proxy, as a recipe would train, with noise that protects nobody.

    Attributes:
        planned: the recipe, its mechanism and σ; `planned.outcome.learning_rate` is the rate that is tried.
        seed: of everything random.
        share: the part of the proxy's examples to train on.
    """

    planned: PlannedRecipe
    seed: int
    share: float = 1.0

    def descend(self, start: Floats, gradient: Callable[[Floats, Rows], Floats], examples: int) -> Floats:
        """The last model: the recipe's rounds, mechanism, schedule, momentum and learning rate.

        A round has the same *part* of the proxy's examples as the real round has of the users, and the noise in its mean is that
        of the real run, ζσ/cohort with the real cohort: so signal and noise are those of the real run, however many examples
        there are. Of a proxy with more examples than users, as many as users are drawn.

        Args:
            start: the parameters before training, flat, shape (d,).
            gradient: (parameters, rows) → the mean of the gradients of the examples `rows`, each clipped to norm 1, shape (d,).
            examples: how many the proxy has to train on.

        Returns:
            The parameters after the last round, float32, shape (d,).

        Raises:
            ValueError: for no example, and if `gradient` returns another shape.
        """
        if examples < 1:
            raise ValueError(f"a proxy needs an example to train on, got {examples}")
        planned, recipe = self.planned, self.planned.recipe
        generator = np.random.default_rng(self.seed)
        order = generator.permutation(examples)[: max(1, round(self.share * min(examples, recipe.users)))]
        cohort = max(1, len(order) // recipe.steps)
        stddev = np.float32(planned.noise_multiplier / recipe.cohort)
        weights, velocity, state = np.array(start, np.float32), np.zeros_like(start, np.float32), State()
        for t, part in enumerate(recipe.workload.rates(recipe.rounds)):
            z = generator.standard_normal(weights.shape, dtype=np.float32)
            noise, state = correlate(planned.mechanism, recipe.rounds, z, state)
            rows = order[np.arange(t * cohort, (t + 1) * cohort) % len(order)]
            step = np.asarray(gradient(weights, rows), np.float32)
            if step.shape != weights.shape:
                raise ValueError(
                    f"gradient must return shape {weights.shape}, as the parameters have, got {step.shape}"
                )
            velocity = np.float32(recipe.momentum) * velocity + step + stddev * noise
            weights = weights - np.float32(planned.outcome.learning_rate * part) * velocity
        return weights


Train = Callable[[Rehearsal], float]
"""What the user gives: trains the public proxy as the rehearsal says, and returns a score; more is better."""


@dataclass(frozen=True)
class RehearsedRecipe(PlannedRecipe):
    """A planned recipe at the learning rate that was best on the proxy; `outcome` is theory's, at that rate.

    Attributes:
        score: the mean over `rehearsals` with all examples, of the proxy's score.
        error: the standard error of that mean; NaN for one rehearsal.
        rehearsals: how many.
    """

    score: float
    error: float
    rehearsals: int


def rehearse(
    problem: PlanningProblem,
    train: Train,
    *,
    public: bool,
    recipes: int = 6,
    repeats: int = 1,
    record: Path | None = None,
    processes: int = 1,
    progress: Progress = lambda _: None,
) -> list[RehearsedRecipe]:
    """The recipes that learn best on a public task, among the best of theory at five learning rates each; best first.

    Candidates are the recipes that theory holds for nearly as good as its best, each at a third of the planned rate to three
    times it. In a first level each gets a quarter of the proxy's examples; the better half then get half of them; the better half
    of those all; then two more seeds, then four more. So each level costs about the same, and 30 candidates as much as 38
    trainings with all examples. All candidates of a level have the same seeds.

    Guarantee: none of its own. The answer costs no privacy if, and only if, nothing that `train` looks at is private.

    Args:
        problem: as for `plan_recipes`.
        train: trains the public proxy as a `Rehearsal` says, mostly by its `descend`, and returns a score; more is better.
        public: True says that nobody's private data are in the proxy.
        recipes: how many of theory's recipes are tried at most.
        repeats: how many seeds a candidate gets in the first three levels; more where scores of one candidate differ much.
        record: a JSONL file of what was tried, made if it is missing: what is in it is not tried again. One file for one proxy.
        processes: how many rehearsals run at once. `train` must then be importable: no lambda.
        progress: hears how far it is, and about how much time is left.

    Returns:
        One for each recipe that came as far as all examples, at its best rate.

    Raises:
        ValueError: unless `public`; for fewer than one recipe or process; if no rehearsal has a finite score; as `plan_recipes`.
    """
    if not public:
        raise ValueError(
            "a proxy decides how private data are trained on, so it must not be made of them: tuning on private data costs "
            "privacy that ε would not count. If nobody's private data are in it, say so with public=True; else take what "
            "plan_recipes says"
        )
    for name, value in (("recipes", recipes), ("repeats", repeats), ("processes", processes)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    planned = shortlist(problem, recipes, progress=progress)
    candidates = [
        _at(one, part * one.outcome.learning_rate, problem) for one in planned for part in RULES.rates.rehearsed
    ]
    levels = list(_levels(len(candidates), repeats))
    work = round(4 * sum(left * share * len(seeds) for left, share, seeds in levels))
    alive, found = list(range(len(candidates))), dict[int, list[float]]()
    with _Runner(train, record, processes, progress, work) as runner:
        for left, share, seeds in levels:
            alive = alive[:left]
            scores = runner.scores([Rehearsal(candidates[i], seed, share) for i in alive for seed in seeds])
            rows = np.reshape(scores, (len(alive), len(seeds)))
            if share < 1:
                latest = dict(zip(alive, rows.mean(axis=1).tolist(), strict=True))
            else:
                for i, row in zip(alive, rows, strict=True):
                    found.setdefault(i, []).extend(row.tolist())
                    latest[i] = float(np.mean(found[i]))
            alive.sort(key=latest.__getitem__, reverse=True)
    best: dict[int, RehearsedRecipe] = {}
    for i in sorted(found, key=lambda i: (len(found[i]), latest[i]), reverse=True):
        best.setdefault(i // len(RULES.rates.rehearsed), _rehearsed(candidates[i], found[i]))
    if not math.isfinite(next(iter(best.values())).score):
        raise ValueError("no rehearsal ended with a finite score: train must return a number, more of which is better")
    return list(best.values())


def _at(planned: PlannedRecipe, rate: float, problem: PlanningProblem) -> PlannedRecipe:
    """The recipe at another learning rate, with what theory expects there."""
    outcome = outcome_at(planned.recipe, planned.mechanism, planned.noise_multiplier, problem.landscape, rate)
    return replace(planned, outcome=outcome)


def _rehearsed(planned: PlannedRecipe, scores: Sequence[float]) -> RehearsedRecipe:
    mean, count = float(np.mean(scores)), len(scores)
    error = float(np.std(scores, ddof=1)) / math.sqrt(count) if count > 1 and math.isfinite(mean) else math.nan
    parts = {part.name: getattr(planned, part.name) for part in fields(planned)}
    return RehearsedRecipe(**parts, score=mean, error=error, rehearsals=count)


def _levels(candidates: int, repeats: int) -> Iterator[tuple[int, float, range]]:
    """(how many candidates are left, part of the examples, seeds) of each level, each of about the same work."""
    left = candidates
    for share, first, last in ((0.25, 0, 1), (0.5, 0, 1), (1.0, 0, 1), (1.0, 1, 3), (1.0, 3, 7)):
        yield left, share, range(first * repeats, last * repeats)
        left = max(2, math.ceil(left / 2))


class _Runner:
    """Where rehearsals happen: in this process or in several, with a record of what was tried."""

    def __init__(self, train: Train, record: Path | None, processes: int, progress: Progress, work: int) -> None:
        self._train, self._record, self._progress = train, record, progress
        self._known = _read(record) if record is not None else {}
        self._left, self._done, self._begun = work, 0, time.monotonic()
        spawn = multiprocessing.get_context("spawn")  # threads, of torch for example, do not survive a fork
        self._pool = ProcessPoolExecutor(processes, mp_context=spawn) if processes > 1 else None

    def __enter__(self) -> "_Runner":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def scores(self, rehearsals: Sequence[Rehearsal]) -> list[float]:
        """The score of each, from the record or by training; −∞ for what is not finite."""
        known = [_identity(one) in self._known for one in rehearsals]
        todo = [one for one, there in zip(rehearsals, known, strict=True) if not there]
        self._left -= sum(map(_work, rehearsals)) - sum(map(_work, todo))
        self._say()
        trained = (map if self._pool is None else self._pool.map)(self._train, todo)
        for one, score in zip(todo, trained, strict=True):
            self._keep(one, float(score))
            self._left, self._done = self._left - _work(one), self._done + _work(one)
            self._say()
        return [self._known[_identity(one)] for one in rehearsals]

    def _keep(self, rehearsal: Rehearsal, score: float) -> None:
        name, planned = _identity(rehearsal), rehearsal.planned
        self._known[name] = score if math.isfinite(score) else -math.inf
        if self._record is not None:
            line = {
                "rehearsal": name, "score": self._known[name], "recipe": asdict(planned.recipe),
                "learning_rate": planned.outcome.learning_rate, "share": rehearsal.share, "seed": rehearsal.seed,
            }  # fmt: skip
            with self._record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _say(self) -> None:
        part = self._done / (self._done + self._left) if self._left else 1.0
        seconds = (time.monotonic() - self._begun) * self._left / self._done if self._done else math.nan
        left = "" if math.isnan(seconds) else f", about {duration(seconds)} left"
        self._progress(f"{part:.0%} of the rehearsals{left}")


def _work(rehearsal: Rehearsal) -> int:
    """Quarters of the examples."""
    return round(4 * rehearsal.share)


def _identity(rehearsal: Rehearsal) -> str:
    """The same for the same rehearsal, whatever proxy it is of."""
    planned = rehearsal.planned
    numbers = (planned.noise_multiplier, planned.outcome.learning_rate, rehearsal.share)
    text = json.dumps(
        [asdict(planned.recipe), *(f"{number:.6g}" for number in numbers), rehearsal.seed], sort_keys=True
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(record: Path) -> dict[str, float]:
    """What is on record; a last line that was cut off is not."""
    if not record.exists():
        return {}
    *lines, last = record.read_text(encoding="utf-8").split("\n")
    if last:
        record.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    found = [json.loads(line) for line in lines]
    return {line["rehearsal"]: line["score"] for line in found}
