"""Adaptive against fixed clipping on handwritten digits at one ε, from initial norms that are far too small and far too large.

python benchmarks/adaptive_clipping.py [--seeds 3]

1260 users, one example each, DP-λCGD with λ = 0.8, ε = 4, δ = 1e-5; the strategy and the nodes of a simulation, in one process.
The tables are in docs/guides/adaptive_clipping.md.
"""

import argparse
import logging
import sys
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvgM
from flwr.supercore.task_identity import TaskIdentity
from torch import from_numpy

from fedcgd import NoiseKey, Participation, Plan
from fedcgd.clipping.per_sample_gradients import clipped_gradient_sum, example_loss
from fedcgd.mechanisms import LambdaCGD, inverse_matrix
from fedcgd.noise.quantisation import Integers
from fedcgd_flower import AdaptiveClipping, CorrelatedNoise, LocalTask, arrays_of, host_users, load_arrays
from fedcgd_flower.user_training import LocalEvaluation

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulations"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from fake_grid import FakeGrid, FakeNode

from fedcgd_simulations.task import evaluate
from fedcgd_simulations.tasks import get_task

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # Flower's Message asks which task it is made by

NORMS = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
COHORTS = {60: AdaptiveClipping(count_noise=0.15), 140: AdaptiveClipping(count_noise=0.05)}
LEARNING_RATE = 2.0


def node(evaluate: LocalEvaluation | None = None) -> FakeNode:
    """All users on one node. Their code is the benchmark's own, so they need no protection from each other."""
    task = get_task("digits", model=None, data_dir="")
    train, loss = task.load().train, example_loss(task.model(0), task.loss)

    def clipped_sum(work: LocalTask, context: Context) -> tuple[Integers, int]:
        rows = [int(user) for user in work.users]
        examples = train.inputs[rows], train.targets[rows]
        scale = {
            "clip_norm": (c := work.clipping).clip_norm,
            "grid": c.grid,
            "unit": c.update_scale,
            "indicator": c.indicator,
        }
        total, counted = clipped_gradient_sum(loss, from_numpy(work.model.copy()), examples, **scale)
        total[: work.layout.size].neg_()
        return total.numpy(), counted

    app = ClientApp()
    host_users(app, lambda context: [str(user) for user in range(len(train))], clipped_sum, evaluate=evaluate)
    return FakeNode(app)


def accuracy(plan: Plan, cohort: int, clipping: AdaptiveClipping | None, seed: int) -> tuple[float, list[float]]:
    """(accuracy of the last model on the test examples, the norms of all rounds)."""
    task = get_task("digits", model=None, data_dir="")
    data, model = task.load(), task.model(seed)

    def test(release: int, arrays: ArrayRecord) -> MetricRecord | None:
        if release < plan.participation.rounds:
            return None
        load_arrays(model, arrays)
        return MetricRecord({"accuracy": evaluate(model, task, data.test)})

    strategy = CorrelatedNoise(
        FedAvgM(server_learning_rate=LEARNING_RATE),
        plan,
        key=NoiseKey.simulation(seed),
        cohort_size=cohort,
        adaptive_clipping=clipping,
        patience=0.0,
    )
    result = strategy.start(FakeGrid({1: node()}), arrays_of(model), evaluate_fn=test)
    norms = [m.get("clip-norm", plan.clip_norm) for _, m in sorted(result.train_metrics_clientapp.items())]
    return float(result.evaluate_metrics_serverapp[result.released]["accuracy"]), [float(norm) for norm in norms]


def rmse(mechanism: LambdaCGD | None, norms: np.ndarray) -> float:
    """Of the noise in all released models, in units of σ: of ζ_0(C⁻¹Z)_0 + … + ζ_t(C⁻¹Z)_t over t."""
    n = len(norms)
    inverse = np.eye(n) if mechanism is None else inverse_matrix(mechanism, n)
    return float(np.sqrt((np.cumsum(norms[:, None] * inverse, axis=0) ** 2).sum() / n))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    mechanism = LambdaCGD(0.8)
    for cohort, clipping in COHORTS.items():
        separation = 1260 // cohort
        participation = Participation(rounds=10 * separation, min_separation=separation)
        sigma = Plan.calibrated(mechanism, participation, clip_norm=1, epsilon=4, delta=1e-5).noise_multiplier
        half = clipping.indicator_norm(sigma, cohort)
        print(
            f"\n{cohort} users a round, {participation.rounds} rounds, σ = {sigma:.3f}, count_noise {clipping.count_noise:g}: "
        )
        print(f"β = {2 * half:.2f}, noise on updates × {1 / np.sqrt(1 - half**2):.3f}\n")
        print("| initial norm | fixed | adaptive | last norm | cancellation, fixed | cancellation, adaptive |")
        print("|---|---|---|---|---|---|")
        for norm in NORMS:
            plan = Plan(
                mechanism=mechanism, participation=participation, clip_norm=norm, noise_multiplier=sigma, delta=1e-5
            )
            fixed = [accuracy(plan, cohort, None, seed)[0] for seed in seeds]
            runs = [accuracy(plan, cohort, clipping, seed) for seed in seeds]
            gains = [
                [rmse(None, path) / rmse(mechanism, path) for path in paths]
                for paths in ([np.ones(participation.rounds)], [np.array(path) for _, path in runs])
            ]
            cells = [np.mean(fixed), np.mean([a for a, _ in runs])]
            print(
                f"| {norm:g} | {cells[0]:.3f} | {cells[1]:.3f} | {np.mean([path[-1] for _, path in runs]):.2f} | "
                f"{np.mean(gains[0]):.2f} | {np.mean(gains[1]):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
