"""A federated training run whose users are people: what it is, and what is known of it before it begins."""

import tomllib
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from fedcgd.accounting import Guarantee
from fedcgd.mechanisms.schedule import Schedule
from fedcgd.mechanisms.workload import Workload
from fedcgd.participation import Participation, scheme_of
from fedcgd.plan import Plan
from fedcgd_experiments.results import Row
from fedcgd_simulations.partitions import Indices, partition
from fedcgd_simulations.server_optimizer import check_descent
from fedcgd_simulations.settings import Settings
from fedcgd_simulations.task import Data, Task
from fedcgd_simulations.tasks import get_task


@dataclass(frozen=True, kw_only=True)
class PeoplePoint:
    """A training run over people. Its fields are the app's settings (docs/simulations.md); `split` says which examples judge it.

    The work of a person is `participations`·`local_epochs`: the passes that it makes over its examples.
    """

    task: str
    model: str = ""
    users: str
    cohort: int
    participations: int
    sampling: str = "none"
    mechanism: str
    epsilon: float
    delta: float = 1e-5
    clip_norm: float
    learning_rate: float = 1.0
    momentum: float = 0.0
    schedule: Schedule = "constant"
    local_epochs: int = 1
    local_batch: int = 10
    local_learning_rate: float
    proximal: float = 0.0
    seed: int
    split: Literal["validation", "test"] = "validation"

    def __post_init__(self) -> None:
        if self.split not in ("validation", "test"):
            raise ValueError(f"split must be validation or test, got {self.split!r}")
        scheme_of(self.sampling)  # refuses an unknown one
        check_descent("sgd", self.momentum, self.schedule)

    @property
    def run_config(self) -> dict[str, Any]:
        """What `flwr run` is given for this training."""
        return {name.replace("_", "-"): value for name, value in asdict(self).items() if name != "split"}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is known of a training before it begins."""

    config: dict[str, Any]
    settings: Settings
    parts: list[Indices]
    plan: Plan
    guarantee: Guarantee

    def row(self, point: PeoplePoint, accuracy: float) -> Row:
        """What is kept of the training, but for the processor time that it took."""
        participation, guarantee = self.plan.participation, self.guarantee
        return {
            **asdict(point),
            "users_drawn": len(self.parts),
            "rounds": participation.rounds,
            "noise_multiplier": guarantee.noise_multiplier,
            "adjacency": guarantee.adjacency,
            "method": guarantee.proof.method,
            "accuracy": round(accuracy, 6),
        }


def prepared(point: PeoplePoint, *, data_dir: str = "") -> Prepared:
    """The people of `point` and its plan. Raises ValueError for settings that make no sense."""
    config = app_defaults() | point.run_config | {"data-dir": data_dir}
    settings = Settings.read(config)
    parts = _parts(point.task, point.model, data_dir, settings.users, settings.seed)
    participation = settings.participation(len(parts))
    workload = settings.workload(participation.rounds)
    plan, guarantee = _calibrated(
        settings.mechanism, participation, point.clip_norm, point.epsilon, point.delta, workload
    )
    return Prepared(config=config, settings=settings, parts=parts, plan=plan, guarantee=guarantee)


@cache
def app_defaults() -> dict[str, Any]:
    """The app's settings that `flwr run` is given unless it is told others."""
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    defaults: dict[str, Any] = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    return defaults


@cache
def loaded(task: str, model: str, data_dir: str) -> tuple[Task, Data]:
    """The task and its data, read once."""
    torch.set_num_threads(1)
    made = get_task(task, model=model or None, data_dir=data_dir)
    return made, made.load()


@cache
def _parts(task: str, model: str, data_dir: str, users: str, seed: int) -> list[Indices]:
    return partition(users, loaded(task, model, data_dir)[1].train, seed=seed)


@cache
def _calibrated(
    mechanism: str, participation: Participation, clip_norm: float, epsilon: float, delta: float, workload: Workload
) -> tuple[Plan, Guarantee]:
    plan = Plan.calibrated(
        mechanism, participation, clip_norm=clip_norm, epsilon=epsilon, delta=delta, workload=workload
    )
    return plan, plan.guarantee()
