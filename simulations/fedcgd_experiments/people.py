"""Trains over people, by the app's strategy and nodes in this process."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fedcgd_experiments.in_process import AppGrid
from fedcgd_experiments.people_point import PeoplePoint, loaded, prepared
from fedcgd_experiments.results import Row
from fedcgd_flower import arrays_of, load_arrays
from fedcgd_flower.inner import warnings_only
from fedcgd_simulations import client_app
from fedcgd_simulations.server_app import strategy_of
from fedcgd_simulations.task import evaluate


@dataclass(frozen=True, kw_only=True)
class PeopleTrainer:
    """Trains `PeoplePoint`s on the data in `data_dir`."""

    data_dir: str = ""

    @property
    def point(self) -> type[PeoplePoint]:
        return PeoplePoint

    def groups(self, points: Sequence[PeoplePoint]) -> list[list[PeoplePoint]]:
        """Each point by itself."""
        return [[point] for point in points]

    def train(self, points: Sequence[PeoplePoint], rows: Sequence[Row] = ()) -> list[Row]:
        """A row for each of `points`; `seconds` is processor time."""
        made = []
        for point in points:
            began = time.process_time()
            row = run_people(point, data_dir=self.data_dir)
            made.append(row | {"seconds": round(time.process_time() - began, 4)})
        return made


@warnings_only()
def run_people(point: PeoplePoint, *, data_dir: str = "") -> Row:
    """Train as `point` says, by the app in this process; a row with the accuracy of the last model on its split.

    The seed decides who has which examples, the initial model, the cohorts and the noise, so mechanisms are compared on the same.
    A model that diverged has the accuracy that it has. Raises ValueError for settings that make no sense.
    """
    task, data = loaded(point.task, point.model, data_dir)
    made = prepared(point, data_dir=data_dir)
    model = task.model(point.seed)
    strategy = strategy_of(made.settings, made.plan, len(made.parts))
    last = strategy.start(AppGrid(client_app.app, made.config), arrays_of(model)).arrays
    load_arrays(model, last)
    return made.row(point, evaluate(model, task, data.validation if point.split == "validation" else data.test))
