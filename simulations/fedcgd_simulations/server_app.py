"""The server: DP-λCGD, or any other mechanism, around federated averaging; writes its figures when it is done."""

import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvgM

from fedcgd.mechanisms.error import error_norms
from fedcgd.optimisation.catalogue import spelling_of
from fedcgd.plan import Plan
from fedcgd_flower import CorrelatedNoise, arrays_of, load_arrays
from fedcgd_simulations.report import plot_accuracy, summary, write_json
from fedcgd_simulations.settings import Settings
from fedcgd_simulations.task import evaluate
from fedcgd_simulations.tasks import get_task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, evaluate each released model on the test examples, write results/….json and a plot beside it."""
    settings = Settings.read(context.run_config)  # refuses what it does not understand, before any work
    task = get_task(settings.task, model=settings.model or None, data_dir=settings.data_dir)
    data = task.load()
    users = len(data.train)
    participation = settings.participation(users)
    plan = Plan.calibrated(
        settings.mechanism,
        participation,
        clip_norm=settings.clip_norm,
        epsilon=settings.epsilon,
        delta=settings.delta,
    )
    model = task.model(settings.seed)
    strategy = CorrelatedNoise(
        FedAvgM(min_train_nodes=1, min_available_nodes=1, server_learning_rate=settings.learning_rate),
        plan,
        cohort_size=settings.cohort,
        key=settings.key(),
        ledger=settings.ledger(),
        expected_users=users,
    )
    accuracy: list[float] = []

    def evaluate_released(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        load_arrays(model, arrays)
        # The test examples belong to none of the users, so this costs no privacy.
        accuracy.append(evaluate(model, task, data.test))
        return MetricRecord({"test-accuracy": accuracy[-1]})

    started = time.monotonic()
    strategy.start(grid, arrays_of(model), evaluate_fn=evaluate_released, train_config=ConfigRecord(), timeout=600.0)
    guarantee = strategy.plan.guarantee()
    rounds = participation.rounds
    figures = {
        "label": spelling_of(plan.mechanism),
        "task": task.name,
        "users": users,
        "cohort": settings.cohort,
        "rounds": rounds,
        "releases": strategy.releases,
        "accuracy": accuracy,
        "mechanism": strategy.plan.to_description()["mechanism"],
        "participation": strategy.plan.to_description()["participation"],
        "clip_norm": settings.clip_norm,
        "learning_rate": settings.learning_rate,
        "seed": settings.seed,
        "private": bool(settings.key_file),
        "noise_multiplier": strategy.plan.noise_multiplier,
        "rmse": error_norms(plan.mechanism, rounds).rmse(strategy.plan.noise_multiplier),
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "adjacency": guarantee.adjacency,
        "sampling": guarantee.sampling,
        "method": guarantee.method,
        "seconds": time.monotonic() - started,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    name = f"{task.name}-{spelling_of(plan.mechanism).replace(':', '-')}-{context.run_id}"
    path = Path(settings.results or f"results/{name}.json").resolve()
    write_json(path, figures)
    plot = path.with_suffix(".png")
    plot_accuracy(plot, [figures])
    print(summary(figures), flush=True)
    print(f"Results: {path}\nPlot: {plot}", flush=True)
