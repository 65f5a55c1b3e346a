"""Run as a program: four rounds of a server and a node whose model is NumPy, recorded in the ledger at the path that is given."""

import sys
from pathlib import Path

import numpy as np
from fake_grid import FakeGrid, FakeNode
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from fedcgd import LambdaCGD, NoiseKey, Participation, Plan
from fedcgd_flower import CorrelatedNoise, host_users, sequential_training


def train(model, user, config, context):
    return ArrayRecord({"w": Array(model["w"].numpy() + np.random.standard_normal(6).astype(np.float32))})


def main(path: Path) -> None:
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    client = ClientApp()
    host_users(client, lambda context: [f"u{i}" for i in range(8)], sequential_training(train))
    participation = Participation(rounds=4, min_separation=2)
    plan = Plan.calibrated(LambdaCGD(0.5), participation, clip_norm=0.5, epsilon=8, delta=1e-5)
    inner = FedAvg(min_available_nodes=1, min_train_nodes=1, fraction_evaluate=0.0)
    strategy = CorrelatedNoise(
        inner, plan, key=NoiseKey.generate(), ledger=path, cohort_size=4, patience=0.0, trusted_nodes=True
    )
    strategy.start(FakeGrid({1: FakeNode(client)}), ArrayRecord({"w": Array(np.zeros(6, np.float32))}), num_rounds=4)
    assert strategy.releases == 4


if __name__ == "__main__":
    main(Path(sys.argv[1]))
