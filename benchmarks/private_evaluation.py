"""The private accuracy beside the true one: digits, 1260 users, trained at ε = 4 and evaluated ten times at ε = 1.

python benchmarks/private_evaluation.py

The table is in docs/guides/adaptive_clipping.md. The true accuracy, over all users, is printed because this is a simulation.
"""

import logging

import torch
from adaptive_clipping import LEARNING_RATE, node  # also sets the paths that the imports below need
from fake_grid import FakeGrid
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedAvgM

from fedcgd import DPSGD, NoiseKey, Participation, Plan
from fedcgd_flower import CorrelatedNoise, PrivateEvaluation, arrays_of, load_arrays
from fedcgd_simulations.task import evaluate
from fedcgd_simulations.tasks import get_task


def main() -> None:
    """Train, and print release, private accuracy, true accuracy."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    task = get_task("digits", model=None, data_dir="")
    train, model = task.load().train, task.model(0)

    def correct(arrays: ArrayRecord, user: str, *_: object) -> dict[str, float]:
        load_arrays(model, arrays)
        with torch.no_grad():
            return {"accuracy": float(model(train.inputs[[int(user)]]).argmax() == train.targets[int(user)])}

    def true(release: int, arrays: ArrayRecord) -> MetricRecord | None:
        load_arrays(model, arrays)
        return None if release % 21 or not release else MetricRecord({"accuracy": evaluate(model, task, train)})

    participation = Participation(rounds=210, min_separation=21)
    plan = Plan.calibrated("lambda-cgd:0.8", participation, clip_norm=1.0, epsilon=4.0, delta=1e-5)
    evaluations = Participation(rounds=10, min_separation=3)
    private = PrivateEvaluation(
        plan=Plan.calibrated(DPSGD(), evaluations, clip_norm=1.0, epsilon=1.0, delta=1e-5),
        bounds={"accuracy": 1.0},
        every=21,
        cohort_size=420,
    )
    strategy = CorrelatedNoise(
        FedAvgM(server_learning_rate=LEARNING_RATE),
        plan,
        key=NoiseKey.simulation(0),
        cohort_size=60,
        evaluation=private,
    )
    result = strategy.start(FakeGrid({1: node(evaluate=correct)}), arrays_of(model), evaluate_fn=true)
    print(f"noise of standard deviation {private.noise(420)['accuracy']:.4f}\n")
    print("| release | private accuracy | true accuracy |\n|---|---|---|")
    for release, metrics in sorted(result.evaluate_metrics_clientapp.items()):
        told, found = metrics["accuracy"], result.evaluate_metrics_serverapp[release]["accuracy"]
        print(f"| {release} | {told:.3f} | {found:.3f} |")
    joint = metrics["epsilon-with-training"]
    print(f"\ntraining alone ε = {plan.guarantee().epsilon:.3f}, with evaluations ε = {joint:.3f} at δ = 1e-5")


if __name__ == "__main__":
    main()
