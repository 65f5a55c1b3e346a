"""Sweeps: many training runs, as Ray tasks, whose results are kept as they come so that nothing is run twice."""

import json
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import ray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedcgd_experiments.experiment import (
    TEST_SEEDS,
    Point,
    Record,
    Setup,
    batch_identity,
    calibrate_setup,
    identity,
    run_points,
    shared_identity,
)
from fedcgd_simulations.local_softmax import is_softmax
from fedcgd_simulations.tasks import get_task

SETUPS = 32
"""How many setups are trained at once: with 8000 weights and 1100 rounds, 8 mechanisms' noise takes 0.3 GB."""

Item = TypeVar("Item")
Kind = TypeVar("Kind")
Work = Callable[[Item], "Record | list[Record]"]
Outcome = Record | list[Record] | Exception
Mapper = Callable[[Work[Any], Sequence[Any]], Iterator[tuple[Any, Outcome]]]
"""(work, items) → (item, its record, or records, or what it raised), in any order."""


class ResultsFile:
    """Records as JSON lines, appended as they come; a line that was cut off by a crash is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.records: list[Record] = []
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            try:
                self.records.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        if text and not text.endswith("\n"):
            with path.open("a") as file:
                file.write("\n")

    def append(self, record: Record) -> None:
        """Keep `record`, here and in the file."""
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.records.append(record)

    def calibrations(self) -> dict[str, Record]:
        """The calibration of each setup."""
        return {identity(Setup(**r["setup"])): r for r in self.records if r["kind"] == "calibration"}

    def runs(self) -> dict[str, Record]:
        """The run of each point, with its `point` and `accuracy`."""
        return {identity(to_point(run)): run for run in runs_of(self.records)}


def runs_of(records: Iterable[Record]) -> list[Record]:
    """A record of kind "run" for each learning rate of the records of kind "runs"; other kinds are left out."""
    return [
        {"kind": "run", "point": record["point"] | {"learning_rate": rate}, "accuracy": accuracy}
        for record in records
        if record["kind"] == "runs"
        for rate, accuracy in zip(record["learning_rates"], record["accuracies"], strict=True)
    ]


def to_point(record: Record) -> Point:
    """The point that a run's record is of."""
    point = record["point"]
    return Point(**point | {"setup": _setup(tuple(point["setup"].items()))})


@cache
def _setup(items: tuple[tuple[str, Any], ...]) -> Setup:
    """One for the thousands of records of a setup: to check it takes longer than to look it up."""
    return Setup(**dict(items))


def on_ray(address: str | None, *, cpus: float, gpus: float) -> Mapper:
    """As Ray tasks of so many CPUs and GPUs each, on the cluster at `address` or on this machine alone (None)."""
    package = Path(__file__).resolve().parent
    if address is None:
        environment: dict[str, Any] = {"env_vars": {"PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}}
    else:
        environment = {"py_modules": [str(package)], "env_vars": {"OMP_NUM_THREADS": "1"}}

    def run(work: Work[Any], items: Sequence[Any]) -> Iterator[tuple[Any, Outcome]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Ray's tips about its future defaults
            ray.init(
                address=address or "local",
                runtime_env=environment,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        try:
            task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=1)(work)
            waiting = {task.remote(item): item for item in items}
            while waiting:
                (ready,), _ = ray.wait(list(waiting), num_returns=1)
                item = waiting.pop(ready)
                try:
                    yield item, ray.get(ready)
                except Exception as error:  # whatever the task raised, and the death of its worker
                    yield item, error
        finally:
            ray.shutdown()

    return run


def here(work: Work[Any], items: Sequence[Any]) -> Iterator[tuple[Any, Outcome]]:
    """In this process, one by one, in order."""
    for item in items:
        try:
            yield item, work(item)
        except Exception as error:  # one item's failure must not end the sweep
            yield item, error


def sweep(
    points: Sequence[Point],
    results: ResultsFile,
    mapper: Mapper,
    *,
    data_dir: str | None,
    console: Console,
    physical_batch: int = 512,
) -> list[str]:
    """Calibrate and run what `results` does not hold yet. Returns a line for each failure; call again to retry."""
    setups = {identity(point.setup): point.setup for point in points}
    missing = [setup for name, setup in setups.items() if name not in results.calibrations()]
    failures = gather("calibrate", calibrate_setup, missing, results, mapper, console)
    calibrations, runs = results.calibrations(), results.runs()

    def train(together: Sequence[Point]) -> list[Record]:
        mine = {identity(point.setup): calibrations[identity(point.setup)] for point in together}
        return run_points(together, mine, data_dir=data_dir, physical_batch=physical_batch)

    ready = [p for p in points if identity(p) not in runs and identity(p.setup) in calibrations]
    return failures + gather("train", train, _together(ready, data_dir), results, mapper, console)


def _together(points: Sequence[Point], data_dir: str | None) -> list[list[Point]]:
    """What is trained at once: softmax regression for up to `SETUPS` setups and all their rates, another model for one setup."""
    groups: dict[str, dict[Setup, list[Point]]] = defaultdict(lambda: defaultdict(list))
    softmax: dict[tuple[str, str | None], bool] = {}
    for point in points:
        kind = point.task, point.model
        if kind not in softmax:
            try:
                task = get_task(point.task, model=point.model, data_dir=data_dir)
                softmax[kind] = is_softmax(task.model(0), task.loss)
            except ValueError:  # an unknown model is the failure of its points
                softmax[kind] = False
        groups[batch_identity(point) if softmax[kind] else shared_identity(point)][point.setup].append(point)
    made = []
    for group in groups.values():
        setups = sorted(group, key=lambda setup: (setup.mechanism, setup.epsilon))  # budgets of a mechanism share C⁻¹Z
        made += [
            [point for setup in setups[first : first + SETUPS] for point in group[setup]]
            for first in range(0, len(setups), SETUPS)
        ]
    return made


def edges(runs: Iterable[Record]) -> dict[Setup, tuple[float, float]]:
    """For each budget (as the setup of DP-SGD there) whose grid of learning rates has an optimum at an edge: the rates beyond.

    One more is asked for below or above by a factor of two, and for all mechanisms at that budget; where only one side needs
    it, the other entry is what is there already.
    """
    best = best_rates(runs)
    grids: dict[Setup, set[float]] = defaultdict(set)
    for point in map(to_point, runs):
        if point.split == "validation":
            grids[point.setup.budget].add(point.learning_rate)
    wanted: dict[Setup, tuple[float, float]] = {}
    for setup, rate in best.items():
        grid = grids[setup.budget]
        low, high = wanted.get(setup.budget, (min(grid), max(grid)))
        if rate in (min(grid), max(grid)):
            low, high = (min(grid) / 2, high) if rate == min(grid) else (low, max(grid) * 2)
            wanted[setup.budget] = low, high
    return wanted


def tune(
    points: Sequence[Point],
    results: ResultsFile,
    mapper: Mapper,
    *,
    extensions: int,
    **options: Any,
) -> list[str]:
    """`sweep`, and again with more learning rates at the budgets where an optimum is at the edge of those tried, for all there.

    Returns a line for each failure, and for each budget whose optimum is still at an edge after so many `extensions`.
    """
    failures = sweep(points, results, mapper, **options)
    for left in range(extensions, -1, -1):
        mine = {point.setup for point in points}
        runs = [run for run in results.runs().values() if to_point(run).setup in mine]
        beyond = edges(runs)
        if failures or not beyond:
            return failures
        if not left:
            return [f"an optimum is at the edge of the learning rates at {identity(setup)}" for setup in beyond]
        more = {
            identity(extended): extended
            for point in points
            for rate in beyond.get(point.setup.budget, ())
            for extended in [replace(point, learning_rate=rate)]
        }
        known = results.runs()
        points = [*points, *(point for name, point in more.items() if name not in known)]
        failures = sweep(points, results, mapper, **options)
    return failures


def gather(
    title: str, work: Work[Any], items: Sequence[Any], results: ResultsFile, mapper: Mapper, console: Console
) -> list[str]:
    """Append the record that `work` makes of each item to `results`, with a progress bar; returns a line for each failure."""
    failures: list[str] = []
    if not items:
        return failures
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task(title, total=len(items))
        for item, outcome in mapper(work, items):
            if isinstance(outcome, Exception):
                failures.append(f"{title} {_name(item)}: {type(outcome).__name__}: {outcome}")
            else:
                for record in outcome if isinstance(outcome, list) else [outcome]:
                    results.append(record)
            progress.advance(bar)
    return failures


def _name(item: Setup | Point | Sequence[Any]) -> str:
    if isinstance(item, Setup | Point):
        return identity(item)
    return shared_identity(item[0]) if isinstance(item[0], Point) else str(item)


def named(run: Record) -> str:
    """What is shown together: the task, with the model where one was named."""
    point = run["point"]
    return str(point["task"]) + (f"-{point['model']}" if point["model"] else "")


def best_rates(runs: Iterable[Record]) -> dict[Setup, float]:
    """The learning rate of each setup with the highest mean accuracy on validation examples; of equals the smaller.

    Records judged by test examples are not looked at.
    """
    return best_rates_of(runs, lambda setup: setup)


def best_rates_of(runs: Iterable[Record], kind: Callable[[Setup], Kind]) -> dict[Kind, float]:
    """As `best_rates`, where setups of one `kind` are tuned together."""
    values: dict[Kind, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in runs:
        point = to_point(record)
        if point.split == "validation":
            values[kind(point.setup)][point.learning_rate].append(record["accuracy"])
    means = {key: {rate: fmean(v) for rate, v in sorted(rates.items())} for key, rates in values.items()}
    return {key: max(rates, key=rates.__getitem__) for key, rates in means.items()}


def best_of_families(runs: Iterable[Record]) -> set[Setup]:
    """Of each family (a mechanism whose number is tuned) at each budget the setup with the best mean validation accuracy."""
    runs = list(runs)
    rates = best_rates(runs)
    values: dict[Setup, list[float]] = defaultdict(list)
    for record in runs:
        point = to_point(record)
        if point.split == "validation" and point.learning_rate == rates[point.setup]:
            values[point.setup].append(record["accuracy"])
    groups: dict[tuple[Setup, str], dict[Setup, float]] = defaultdict(dict)
    for setup, accuracies in values.items():
        groups[setup.budget, setup.family][setup] = fmean(accuracies)
    return {max(sorted(group, key=identity), key=group.__getitem__) for group in groups.values()}


def tuned(runs: Iterable[Record], seeds: int) -> list[Point]:
    """For each setup, at its best learning rate, the points of so many test seeds, to be judged by the test examples."""
    records = list(runs)
    rates = best_rates(records)
    likes = {point.setup: point for point in map(to_point, records) if point.split == "validation"}
    return [
        replace(likes[setup], learning_rate=rate, seed=TEST_SEEDS + seed, split="test")
        for setup, rate in rates.items()
        for seed in range(seeds)
    ]
