"""The server: DP-λCGD, or any other mechanism, around federated averaging; writes its figures when it is done."""

import re
import time
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log
from torch import nn

from fedcgd.mechanisms.error import error_norms
from fedcgd.optimisation.catalogue import spelling_of
from fedcgd.plan import Plan
from fedcgd_flower import CorrelatedNoise, IncompleteRunError, arrays_of, load_arrays
from fedcgd_simulations.partitions import partition
from fedcgd_simulations.report import plot_accuracy, summary, write_json
from fedcgd_simulations.server_optimizer import server_strategy
from fedcgd_simulations.settings import Settings
from fedcgd_simulations.task import Examples, Task, average_of, evaluate
from fedcgd_simulations.tasks import get_task

app = ServerApp()

ACCURACY = "test-accuracy"


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, evaluate each released model on the test examples, write results/….json and a plot next to it.

    A run that does not release every planned round raises, and leaves ….failed.json in place of the results.
    """
    settings = Settings.read(context.run_config)  # refuses what it does not understand, before any work
    name = f"{settings.task}-{re.sub('[:/]+', '-', settings.mechanism)}-{context.run_id}"
    path = Path(settings.results or f"results/{name}.json").resolve()
    failed = path.with_suffix(".failed.json")
    for old in (path, failed):  # what is there when this run ends is this run's
        old.unlink(missing_ok=True)
    started = time.monotonic()
    try:
        figures = train(settings, grid)
    except Exception as error:
        released = error.result.released if isinstance(error, IncompleteRunError) else None
        write_json(
            failed,
            {"failure": f"{type(error).__name__}: {error}", "releases": released, "mechanism": settings.mechanism},
        )
        raise
    figures["seconds"] = time.monotonic() - started
    write_json(path, figures)
    plot = path.with_suffix(".png")
    plot_accuracy(plot, [figures])
    print(summary(figures), flush=True)
    print(f"Results: {path}\nPlot: {plot}", flush=True)


def strategy_of(settings: Settings, plan: Plan, users: int) -> CorrelatedNoise:
    """The strategy that carries out `plan` over `users` users."""
    return CorrelatedNoise(
        server_strategy(
            settings.optimizer,
            learning_rate=settings.learning_rate,
            momentum=settings.momentum,
            schedule=settings.schedule,
            rounds=plan.participation.rounds,
            warmup=settings.warmup,
        ),
        plan,
        cohort_size=settings.cohort,
        key=settings.key(),
        ledger=settings.ledger(),
        expected_users=users,
        trusted_nodes=settings.trusted_nodes,
    )


def _warn_of_slow_evaluation(model: nn.Module, task: Task, test: Examples) -> None:
    """A vision transformer on a processor needs an hour for 10,000 examples, before the first round and after each."""
    few, slow = test.take(np.arange(min(4, len(test)))), 60.0  # seconds
    started = time.monotonic()
    evaluate(model, task, few)
    seconds = (time.monotonic() - started) * len(test) / len(few)
    if seconds > slow:
        log(
            WARNING,
            "evaluating %d test examples will take about %.0f s, before the first round and after each; test-examples = %d "
            "takes a minute",
            len(test),
            seconds,
            max(1, int(len(test) * slow / seconds)),
        )


def some_of(examples: Examples, number: int, seed: int) -> Examples:
    """So many of `examples`, drawn by the seed, in their order (files may be sorted by class); all of them for 0."""
    if not 0 < number < len(examples):
        return examples
    return examples.take(np.sort(np.random.default_rng(seed).choice(len(examples), number, replace=False)))


def train(settings: Settings, grid: Grid) -> dict[str, Any]:
    """The figures of a run, all of whose rounds are released. Raises IncompleteRunError otherwise."""
    task = get_task(settings.task, model=settings.model or None, data_dir=settings.data_dir)
    data = task.load()
    task.augmented(data.train.inputs[:1], settings.augmentations)  # refuses what has none
    users = len(partition(settings.users, data.train, seed=settings.seed))
    participation = settings.participation(users)
    plan = Plan.calibrated(
        settings.mechanism,
        participation,
        clip_norm=settings.clip_norm,
        epsilon=settings.epsilon,
        delta=settings.delta,
        workload=settings.workload(participation.rounds),
    )
    model = task.model(settings.seed)
    average = average_of(model, settings.average)
    strategy = strategy_of(settings, plan, users)

    test = some_of(data.test, settings.test_examples, settings.seed)
    _warn_of_slow_evaluation(model, task, test)

    def evaluate_released(release: int, arrays: ArrayRecord) -> MetricRecord:
        load_arrays(model, arrays)
        average.update_parameters(model)
        # The test examples belong to none of the users, so this costs no privacy.
        return MetricRecord({ACCURACY: evaluate(average.module, task, test)})

    result = strategy.start(
        grid,
        arrays_of(model),
        evaluate_fn=evaluate_released,
        train_config=ConfigRecord(),
        timeout=settings.reply_timeout,
    )
    guarantee = plan.guarantee()
    return {
        "label": spelling_of(plan.mechanism),
        "task": task.name,
        "users": users,
        "cohort": settings.cohort,
        "rounds": result.planned,
        "releases": result.released,
        "accuracy": [metrics[ACCURACY] for _, metrics in sorted(result.evaluate_metrics_serverapp.items())],
        "mechanism": plan.to_description()["mechanism"],
        "participation": plan.to_description()["participation"],
        "clip_norm": settings.clip_norm,
        "learning_rate": settings.learning_rate,
        "seed": settings.seed,
        "private": bool(settings.key_file),
        "noise_multiplier": plan.noise_multiplier,
        "rmse": error_norms(plan.mechanism, result.planned).rmse(plan.noise_multiplier),
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "adjacency": guarantee.adjacency,
        "sampling": guarantee.sampling,
        "method": guarantee.proof.method,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
