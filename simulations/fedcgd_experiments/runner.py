"""Runs what is missing of a study: one process or many, resumable, with progress."""

import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedcgd_experiments.results import Results, Row, known
from fedcgd_experiments.study import Point, Study, missing

P = TypeVar("P")


class Trainer(Protocol):
    """How the points of a study are trained. It is pickled to the processes that train."""

    @property
    def point(self) -> type[Any]:
        """The class of its points."""

    def groups(self, points: Sequence[Any]) -> list[list[Any]]:
        """`points` in groups that are trained together."""

    def train(self, points: Sequence[Any], rows: Sequence[Row]) -> list[Row]:
        """A row for each point of a group; `rows` are those of earlier runs, which may spare a calibration."""


def grouped(points: Sequence[P], alike: Callable[[P], Hashable | None], *, most: int) -> list[list[P]]:
    """`points` that are `alike`, up to `most` of them at once, and each that is like no other (None) by itself."""
    groups: dict[Hashable, list[P]] = {}
    for number, point in enumerate(points):
        key = alike(point)
        groups.setdefault(number if key is None else key, []).append(point)
    return [group[first : first + most] for group in groups.values() for first in range(0, len(group), most)]


class PausedError(Exception):
    """Time was up before the end of a training that goes on from its checkpoint the next time."""


@dataclass(frozen=True)
class Deadline:
    """Whether a time of the machine's clock (`time.monotonic`) is over; the same in all processes."""

    end: float = float("inf")

    def __call__(self) -> bool:
        return time.monotonic() > self.end


NEVER = Deadline()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a call of `carry_out` ended: what failed, a line each, and how many trainings are still missing, at least."""

    failures: tuple[str, ...]
    left: int


def carry_out(
    study: Study,
    results: Results,
    trainer: Trainer,
    *,
    processes: int = 1,
    console: Console,
    late: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run what `results` lacks of `study`; what is there is not run again, and results are kept as they come.

    Ends before the next group of trainings when `late()` says so. A group that fails is reported, and the others go on; call
    again to retry.
    """
    failures: list[str] = []
    failed: set[Point] = set()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console) as progress:
        while todo := [p for p in missing(study, known(results.rows(), trainer.point)) if p not in failed]:
            bar = progress.add_task(study.name, total=len(todo))
            for group, rows in _trained(trainer, trainer.groups(todo), results.rows(), processes, late):
                if isinstance(rows, PausedError):
                    continue
                if isinstance(rows, Exception):
                    failed.update(group)
                    failures.append(
                        f"{study.name}: {type(rows).__name__}: {rows}; {len(group)} trainings as {group[0]}"
                    )
                else:
                    results.append(rows)
                progress.advance(bar, len(group))
            if late():
                break
    return Outcome(failures=tuple(failures), left=len(missing(study, known(results.rows(), trainer.point))))


def _trained(
    trainer: Trainer, groups: Sequence[list[Point]], rows: Sequence[Row], processes: int, late: Callable[[], bool]
) -> Iterator[tuple[list[Point], list[Row] | Exception]]:
    if processes == 1:
        for group in groups:
            if late():
                return
            try:
                yield group, trainer.train(group, rows)
            except Exception as error:  # one group's failure must not end the study
                yield group, error
        return
    nice = os.nice(0)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_start, initargs=(nice,)) as pool:
        futures = {pool.submit(trainer.train, group, rows): group for group in groups}
        for future in as_completed(futures):
            if late():
                pool.shutdown(cancel_futures=True)
            if not future.cancelled():
                raised = future.exception()
                yield futures[future], raised if isinstance(raised, Exception) else future.result()


def _start(nice: int) -> None:
    """A process of the pool is as nice as its parent, and takes one core."""
    os.nice(max(0, nice - os.nice(0)))
    os.environ["OMP_NUM_THREADS"] = "1"


def within(minutes: float | None) -> Deadline:
    """Whether so many minutes have gone since this call; never for None."""
    return NEVER if minutes is None else Deadline(time.monotonic() + 60 * minutes)
