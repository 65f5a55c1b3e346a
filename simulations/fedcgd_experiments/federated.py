"""Tuned points of a sweep trained again by the app, one user per example, to be set beside their central runs."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from fedcgd.optimisation.catalogue import from_description
from fedcgd.plan import Plan
from fedcgd_experiments.experiment import Point, Record, Setup, identity
from fedcgd_experiments.flower_command import run_config
from fedcgd_experiments.in_process import AppGrid
from fedcgd_experiments.people_run import app_defaults, loaded
from fedcgd_experiments.sweep import best_of_families, to_point, tuned
from fedcgd_flower import arrays_of, load_arrays
from fedcgd_flower.inner import warnings_only
from fedcgd_simulations import client_app
from fedcgd_simulations.server_app import strategy_of
from fedcgd_simulations.settings import Settings
from fedcgd_simulations.task import evaluate


def points_of(
    runs: Sequence[Record], seeds: int, *, families: Collection[str] = (), epsilons: Collection[float] = ()
) -> list[Point]:
    """The first `seeds` test points of each family at each budget, its number chosen on validation. None named: all."""
    best = best_of_families(runs)
    return [
        point
        for point in tuned(runs, seeds)
        if point.setup in best
        and (not families or point.setup.family in families)
        and (not epsilons or point.setup.epsilon in epsilons)
    ]


@warnings_only()
def train_federated(point: Point, calibration: Record, *, data_dir: str | None = None) -> Record:
    """A record with the test `accuracy` of what the app releases last under the settings that `federated` prints for `point`.

    Its strategy and a node that hosts all users are in this process. σ and the mechanism are those of the sweep's `calibration`.
    """
    started = time.process_time()
    task, data = loaded(point.task, point.model or "", data_dir or "")
    config = app_defaults() | run_config(point, users=len(data.train), data_dir=data_dir)
    settings = Settings.read(config)
    plan = Plan(
        mechanism=from_description(calibration["mechanism"]),
        participation=settings.participation(len(data.train)),
        clip_norm=point.clip_norm,
        noise_multiplier=calibration["noise_multiplier"],
        delta=point.setup.delta,
    )
    model = task.model(point.seed)
    result = strategy_of(settings, plan, len(data.train)).start(AppGrid(client_app.app, config), arrays_of(model))
    load_arrays(model, result.arrays)
    return {
        "kind": "federated",
        "point": asdict(point),
        "accuracy": evaluate(model, task, data.test),
        "releases": result.released,
        "seconds": round(time.process_time() - started, 2),
    }


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Test accuracies of a setup, federated and central, over the seeds that both have."""

    setup: Setup
    federated: float
    central: float
    largest: float
    """The largest difference at any seed."""
    seeds: int


def beside(records: Sequence[Record], runs: Mapping[str, Record]) -> list[Beside]:
    """The federated `records` beside the central `runs`, by the `identity` of their points; those without one are left out."""
    found: dict[Setup, list[tuple[float, float]]] = {}
    for record in records:
        point = to_point(record)
        if identity(point) in runs:
            found.setdefault(point.setup, []).append((record["accuracy"], runs[identity(point)]["accuracy"]))
    return [
        Beside(
            setup=setup,
            federated=fmean(ours for ours, _ in pairs),
            central=fmean(theirs for _, theirs in pairs),
            largest=max(abs(ours - theirs) for ours, theirs in pairs),
            seeds=len(pairs),
        )
        for setup, pairs in sorted(
            found.items(), key=lambda item: (item[0].sampling, item[0].epsilon, item[0].mechanism)
        )
    ]
