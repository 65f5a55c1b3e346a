"""Sweeps: many training runs, as Ray tasks, whose results are kept as they come so that nothing is run twice."""

import json
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import ray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedcgd_experiments.experiment import Point, Record, Setup, calibrate_setup, identity, run_point

Item = TypeVar("Item")
Work = Callable[[Item], Record]
Mapper = Callable[[Work[Any], Sequence[Any]], Iterator[tuple[Any, Record | Exception]]]
"""(work, items) → (item, its record or what it raised), in any order."""


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
        """The run of each point."""
        return {identity(to_point(r)): r for r in self.records if r["kind"] == "run"}


def to_point(record: Record) -> Point:
    """The point that a run's record is of."""
    return Point(**record["point"] | {"setup": Setup(**record["point"]["setup"])})


def one_by_one(work: Work[Any], items: Sequence[Any]) -> Iterator[tuple[Any, Record | Exception]]:
    """In this process, in order."""
    for item in items:
        try:
            yield item, work(item)
        except Exception as error:  # one point's failure must not end the sweep
            yield item, error


def on_ray(address: str | None, *, cpus: float, gpus: float) -> Mapper:
    """As Ray tasks of so many CPUs and GPUs each, on the cluster at `address` or on this machine alone (None)."""
    package = Path(__file__).resolve().parent
    if address is None:
        environment: dict[str, Any] = {"env_vars": {"PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}}
    else:
        environment = {"py_modules": [str(package)], "env_vars": {"OMP_NUM_THREADS": "1"}}

    def run(work: Work[Any], items: Sequence[Any]) -> Iterator[tuple[Any, Record | Exception]]:
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


def sweep(
    points: Sequence[Point], results: ResultsFile, mapper: Mapper, *, data_dir: str | None, console: Console
) -> list[str]:
    """Calibrate and run what `results` does not hold yet. Returns a line for each failure; call again to retry."""
    setups = {identity(point.setup): point.setup for point in points}
    missing = [setup for name, setup in setups.items() if name not in results.calibrations()]
    failures = _run_all("calibrate", calibrate_setup, missing, results, mapper, console)
    calibrations, runs = results.calibrations(), results.runs()

    def train(point: Point) -> Record:
        return run_point(point, calibrations[identity(point.setup)], data_dir=data_dir)

    ready = [p for p in points if identity(p) not in runs and identity(p.setup) in calibrations]
    return failures + _run_all("train", train, ready, results, mapper, console)


def _run_all(
    title: str, work: Work[Any], items: Sequence[Any], results: ResultsFile, mapper: Mapper, console: Console
) -> list[str]:
    failures: list[str] = []
    if not items:
        return failures
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task(title, total=len(items))
        for item, outcome in mapper(work, items):
            if isinstance(outcome, Exception):
                failures.append(f"{title} {identity(item)}: {type(outcome).__name__}: {outcome}")
            else:
                results.append(outcome)
            progress.advance(bar)
    return failures


def best_rates(runs: Iterable[Record]) -> dict[Setup, float]:
    """The learning rate of each setup with the highest mean accuracy on validation examples; of equals the smaller.

    Records judged by test examples are not looked at.
    """
    values: dict[Setup, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in runs:
        point = to_point(record)
        if point.split == "validation":
            values[point.setup][point.learning_rate].append(record["accuracy"])
    means = {setup: {rate: fmean(v) for rate, v in sorted(rates.items())} for setup, rates in values.items()}
    return {setup: max(rates, key=rates.__getitem__) for setup, rates in means.items()}


def tuned(runs: Iterable[Record], seeds: Iterable[int] | None = None) -> list[Point]:
    """For each setup and each of `seeds` the point at the setup's best learning rate, to be judged by the test examples.

    Without `seeds`, those of the validation records at that rate.
    """
    records = list(runs)
    rates = best_rates(records)
    best = [
        point
        for point in map(to_point, records)
        if point.split == "validation" and point.learning_rate == rates[point.setup]
    ]
    wanted = None if seeds is None else list(seeds)
    chosen: list[Point] = []
    for setup in rates:
        points = sorted((point for point in best if point.setup == setup), key=lambda point: point.seed)
        chosen += [replace(points[0], seed=seed, split="test") for seed in wanted or [point.seed for point in points]]
    return chosen
