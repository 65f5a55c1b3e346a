"""One federated training whose users are people: the app's strategy and nodes in this process, or Flower's own DP strategies."""

import math
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)

from fedcgd.accounting import Guarantee
from fedcgd.keys import NoiseKey
from fedcgd.participation import Participation
from fedcgd.participation.cohorts import History, cohort
from fedcgd.plan import Plan
from fedcgd.release import lattice_of
from fedcgd_experiments.experiment import Record
from fedcgd_experiments.in_process import AppGrid, NodeError, UserGrid
from fedcgd_flower import LocalTask, arrays_of, load_arrays
from fedcgd_flower.inner import warnings_only
from fedcgd_flower.layout import flatten, layout_of, unflatten
from fedcgd_simulations import client_app
from fedcgd_simulations.local_training import trained_models
from fedcgd_simulations.partitions import Indices, partition
from fedcgd_simulations.server_app import strategy_of
from fedcgd_simulations.settings import Settings
from fedcgd_simulations.task import Data, Task, evaluate
from fedcgd_simulations.tasks import get_task

FLOWER_FIXED, FLOWER_ADAPTIVE = "flower-fixed", "flower-adaptive"


@dataclass(frozen=True, kw_only=True)
class PeoplePoint:
    """A training run over people. Its fields are the app's settings (docs/simulations.md), and:

    - `mechanism` may also be "flower-fixed" or "flower-adaptive": Flower's own wrappers around FedAvg, with the same cohorts and
      σ from this project's accountant. They have no server learning rate: their noise would not grow with it.
    - `quantile` is the target of "flower-adaptive", and `clip_norm` its first norm.
    - `population` stands for so many users, with cohorts that are larger in the same proportion: the noise in the mean is smaller
      by that factor, and the users who train stay those that there are. An extrapolation.
    - `split` says which examples judge the last model.
    """

    task: str
    model: str = ""
    users: str
    cohort: int
    participations: int
    sampling: Literal["none", "balls-in-bins", "poisson"] = "none"
    mechanism: str
    epsilon: float
    delta: float = 1e-5
    clip_norm: float
    learning_rate: float = 1.0
    local_epochs: int = 1
    local_batch: int = 10
    local_learning_rate: float
    proximal: float = 0.0
    quantile: float = 0.5
    population: int = 0
    seed: int
    split: Literal["validation", "test"] = "validation"

    def __post_init__(self) -> None:
        if self.split not in ("validation", "test"):
            raise ValueError(f"split must be validation or test, got {self.split!r}")
        if self.sampling not in ("none", "balls-in-bins", "poisson"):
            raise ValueError(f"sampling must be none, balls-in-bins or poisson, got {self.sampling!r}")
        if self.sampling != "none" and self.mechanism in (FLOWER_FIXED, FLOWER_ADAPTIVE):
            raise ValueError(
                f"{self.mechanism} divides by the number of users drawn, which is secret with sampling = {self.sampling!r}; take "
                "sampling = 'none'"
            )

    @property
    def run_config(self) -> dict[str, Any]:
        """What `flwr run` is given for this training, where it is one of the app's."""
        names = (
            "task", "model", "users", "cohort", "participations", "sampling", "epsilon", "delta", "clip_norm", "learning_rate",
            "local_epochs", "local_batch", "local_learning_rate", "proximal", "seed",
        )  # fmt: skip
        mechanism = "dp-sgd" if self.mechanism in (FLOWER_FIXED, FLOWER_ADAPTIVE) else self.mechanism
        return {name.replace("_", "-"): getattr(self, name) for name in names} | {"mechanism": mechanism}


@cache
def app_defaults() -> dict[str, Any]:
    """The app's settings that `flwr run` is given unless it is told others."""
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    defaults: dict[str, Any] = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    return defaults


class PeerError(RuntimeError):
    """Flower's own strategy raised; says what."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is known of a training before it begins. `plan` has the noise that is drawn, `guarantee` the σ that ε is of."""

    config: dict[str, Any]
    settings: Settings
    parts: list[Indices]
    plan: Plan
    guarantee: Guarantee


def prepared(point: PeoplePoint, *, data_dir: str = "") -> Prepared:
    """The people of `point` and its plan. Raises ValueError for settings that make no sense."""
    config = app_defaults() | point.run_config | {"data-dir": data_dir}
    settings = Settings.read(config)
    parts = _parts(point.task, point.model, data_dir, settings.users, settings.seed)
    plan, guarantee = _calibrated(
        settings.mechanism, settings.participation(len(parts)), point.clip_norm, point.epsilon, point.delta
    )
    if point.population:
        if point.population < len(parts):
            raise ValueError(
                f"population must be 0 or at least the {len(parts)} users that there are, got {point.population}"
            )
        plan = replace(plan, noise_multiplier=plan.noise_multiplier * len(parts) / point.population)
    return Prepared(config=config, settings=settings, parts=parts, plan=plan, guarantee=guarantee)


@warnings_only()
def run_people(point: PeoplePoint, *, data_dir: str = "") -> Record:
    """Train as `point` says; a record with the `accuracy` of the last model on its split.

    The seed decides who has which examples, the initial model, the cohorts and the noise, so mechanisms are compared on the same.
    A model that diverged has the accuracy that it has. A training in which Flower's strategy raises has none (null), and its
    `failure` says why. Raises ValueError for settings that make no sense.
    """
    started = time.process_time()
    task, data = loaded(point.task, point.model, data_dir)
    made = prepared(point, data_dir=data_dir)
    model, accuracy, failure = task.model(point.seed), None, ""
    judged = data.validation if point.split == "validation" else data.test
    try:
        if point.mechanism in (FLOWER_FIXED, FLOWER_ADAPTIVE):
            last = _flowers_own(point, made, model)
        else:
            strategy = strategy_of(made.settings, made.plan, len(made.parts))
            last = strategy.start(AppGrid(client_app.app, made.config), arrays_of(model)).arrays
        load_arrays(model, last)
        accuracy = evaluate(model, task, judged)
    except PeerError as error:
        failure = str(error)
    record = record_of(point, made, accuracy, failure)
    return record | {"cpu_seconds": round(time.process_time() - started, 2)}


def record_of(point: PeoplePoint, made: Prepared, accuracy: float | None, failure: str = "") -> Record:
    """What is kept of a training, but for the processor time that it took."""
    participation, guarantee = made.plan.participation, made.guarantee
    return {
        "kind": "people",
        "point": asdict(point),
        "accuracy": accuracy,
        "failure": failure,
        "users": len(made.parts),
        "rounds": participation.rounds,
        "min_separation": participation.min_separation,
        "noise_multiplier": guarantee.noise_multiplier,
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "adjacency": guarantee.adjacency,
        "sampling": guarantee.sampling,
        "method": guarantee.method,
    }


@cache
def _parts(task: str, model: str, data_dir: str, users: str, seed: int) -> list[Indices]:
    return partition(users, loaded(task, model, data_dir)[1].train, seed=seed)


@cache
def _calibrated(
    mechanism: str, participation: Participation, clip_norm: float, epsilon: float, delta: float
) -> tuple[Plan, Guarantee]:
    plan = Plan.calibrated(mechanism, participation, clip_norm=clip_norm, epsilon=epsilon, delta=delta)
    return plan, plan.guarantee()


@cache
def loaded(task: str, model: str, data_dir: str) -> tuple[Task, Data]:
    """The task and its data, read once."""
    torch.set_num_threads(1)
    made = get_task(task, model=model or None, data_dir=data_dir)
    return made, made.load()


class _PlannedCohorts(FedAvg):
    """FedAvg over the cohorts that `cohort` draws, where FedAvg would draw its own without any promise about k and b."""

    def __init__(self, participation: Participation, users: int, cohort_size: int, key: NoiseKey) -> None:
        super().__init__()
        self._participation, self._users, self._cohort_size, self._key = participation, users, cohort_size, key
        self._history = History()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        everyone = [str(user) for user in range(self._users)]
        round = server_round - 1
        drawn = cohort(
            self._participation, round, everyone, self._history, cohort_size=self._cohort_size, key=self._key.choices
        )
        assert drawn is not None  # all users are always there
        self._history = self._history.with_round(round, drawn)
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: ConfigRecord()})
        return self._construct_messages(record, [int(user) + 1 for user in drawn], "train")

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return []  # as with fraction_evaluate=0, which warns in every training


def flower_adaptive_noise(sigma: float, cohort_size: int) -> tuple[float, float]:
    """(noise_multiplier, clipped_count_stddev) under which a round of Flower's adaptive clipping costs what σ = `sigma` costs.

    A round releases a sum with noise zC and, of at most 1 from each user, the number of clipped users with noise s: together one
    Gaussian with 1/σ² = 1/z² + 1/s². Flower sets z from 1/z² = 1/multiplier² − 1/(2s)², as if a user moved the number by a half
    (Andrew et al., arXiv:1905.03871, count ±1/2; Flower counts 0 or 1). s is their cohort/20, or 2σ for small cohorts.
    """
    stddev = max(cohort_size / 20, 2 * sigma)
    return (sigma**-2 - 0.75 * stddev**-2) ** -0.5, stddev


def _flowers_own(point: PeoplePoint, made: Prepared, model: torch.nn.Module) -> ArrayRecord:
    """The last model of Flower's own strategy; its noise is NumPy's, seeded. Raises PeerError if the strategy raises."""
    settings, plan, users = made.settings, made.plan, len(made.parts)
    participation, key = plan.participation, settings.key()
    inner = _PlannedCohorts(participation, users, settings.cohort, key)
    if point.mechanism == FLOWER_FIXED:
        strategy: Any = DifferentialPrivacyServerSideFixedClipping(
            inner, plan.noise_multiplier, point.clip_norm, settings.cohort
        )
    else:
        multiplier, stddev = flower_adaptive_noise(plan.noise_multiplier, settings.cohort)
        strategy = DifferentialPrivacyServerSideAdaptiveClipping(
            inner,
            multiplier,
            settings.cohort,
            initial_clipping_norm=point.clip_norm,
            target_clipped_quantile=point.quantile,
            clipped_count_stddev=stddev,
        )
    # Flower draws its noise there.
    np.random.seed(point.seed)
    task = loaded(point.task, point.model, settings.data_dir)[0]
    examples, part = client_app.examples_of(made.config)

    def train(messages: Sequence[Message]) -> list[RecordDict]:
        arrays = messages[0].content.array_records["arrays"]
        layout = layout_of(arrays)
        asked = tuple(str(message.metadata.dst_node_id - 1) for message in messages)
        work = LocalTask(
            model=flatten(arrays, layout),
            layout=layout,
            users=asked,
            clip_norm=point.clip_norm,
            grid=lattice_of(plan, layout.size),
            config=ConfigRecord(),
        )
        trained = {
            user: row
            for some, rows in trained_models(task, work, examples, part, settings.local)
            for user, row in zip(some, rows, strict=True)
        }
        return [
            RecordDict({"arrays": unflatten(trained[user], layout), "metrics": MetricRecord({"num-examples": 1})})
            for user in asked
        ]

    try:
        result = strategy.start(
            UserGrid(users, train), arrays_of(model), num_rounds=participation.rounds, timeout=math.inf
        )
    except NodeError:  # what this project's nodes raise is no failure of Flower's
        raise
    except Exception as error:
        raise PeerError(f"{type(error).__name__}: {error}") from error
    last: ArrayRecord = result.arrays
    return last
