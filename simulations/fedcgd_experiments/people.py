"""Trains over people: softmax regression for many points at once, other models through the app's strategy and nodes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fedcgd_experiments.in_process import AppGrid
from fedcgd_experiments.people_point import PeoplePoint, loaded, prepared
from fedcgd_experiments.people_softmax import train_people
from fedcgd_experiments.results import Row
from fedcgd_experiments.runner import grouped
from fedcgd_flower import arrays_of, load_arrays
from fedcgd_flower.inner import warnings_only
from fedcgd_simulations import client_app
from fedcgd_simulations.local_softmax import is_softmax
from fedcgd_simulations.server_app import strategy_of
from fedcgd_simulations.task import evaluate

TOGETHER = 48  # models, whose weights are read in every round


@dataclass(frozen=True, kw_only=True)
class PeopleTrainer:
    """Trains `PeoplePoint`s on the data in `data_dir`."""

    data_dir: str = ""

    @property
    def point(self) -> type[PeoplePoint]:
        return PeoplePoint

    def groups(self, points: Sequence[PeoplePoint]) -> list[list[PeoplePoint]]:
        """Points of softmax regression with the same people in the same rounds, up to `TOGETHER`; others by themselves."""
        return grouped(points, self.shared, most=TOGETHER)

    def shared(self, point: PeoplePoint) -> str | None:
        """Equal for points that are trained together; None for one that is trained by itself."""
        task, _ = loaded(point.task, point.model, self.data_dir)
        alike = (
            "task", "model", "users", "cohort", "participations", "sampling", "local_epochs", "local_batch", "seed", "split"
        )  # fmt: skip
        return str([getattr(point, name) for name in alike]) if is_softmax(task.model(0), task.loss) else None

    def train(self, points: Sequence[PeoplePoint], rows: Sequence[Row] = ()) -> list[Row]:
        """A row for each of `points`; `seconds` is processor time, in equal parts."""
        began = time.process_time()
        if self.shared(points[0]):
            made = train_people(points, data_dir=self.data_dir)
        else:
            made = [run_people(point, data_dir=self.data_dir) for point in points]
        seconds = round((time.process_time() - began) / len(points), 4)
        return [row | {"seconds": seconds} for row in made]


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
