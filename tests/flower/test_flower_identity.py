"""What of an inner strategy makes a run: what changes training, and nothing else."""

from pathlib import Path

import numpy as np
import pytest
from fake_grid import FakeGrid
from flower_runs import node
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedProx
from shared import record

from fedcgd import DPSGD, NoiseKey, Participation, Plan
from fedcgd_flower import CorrelatedNoise
from fedcgd_flower.inner import scheduled, settings

PLAN = Plan.calibrated(DPSGD(), Participation(rounds=4), clip_norm=0.5, epsilon=8, delta=1e-5)


class Warm(FedAvgM):
    training_settings = ("warmup", "betas")

    def __init__(self, warmup: int = 3, betas: tuple[float, ...] = (0.9, 0.99)) -> None:
        super().__init__(server_learning_rate=0.5)
        self.warmup, self.betas = np.int64(warmup), betas


def run(path: Path, key: NoiseKey, inner: FedAvg) -> CorrelatedNoise:
    strategy = CorrelatedNoise(inner, PLAN, key=key, ledger=path, cohort_size=2, patience=0.0, trusted_nodes=True)
    strategy.start(FakeGrid({1: node(["ann", "bob"])}), record(np.zeros(6)), num_rounds=1)
    return strategy


class SeesItsRate(FedAvgM):
    seen: tuple[float, ...] = ()

    def aggregate_train(self, server_round, replies):
        self.seen = (*self.seen, self.server_learning_rate)
        return None, None


def test_a_scheduled_rate_falls_from_round_to_round_and_stays_as_a_setting() -> None:
    inner = scheduled(SeesItsRate, "linear", rounds=4)(server_learning_rate=2.0)
    for server_round in (1, 2, 3, 4, 5):
        inner.aggregate_train(server_round, [])
    assert inner.seen == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.5])
    assert inner.server_learning_rate == 2.0


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (FedAvg(), FedAdam(), "strategy: FedAvg → FedAdam"),
        (Warm(warmup=3), Warm(warmup=4), "warmup: 3 → 4"),
        (Warm(), Warm(betas=(0.9, 0.9)), r"betas: \[0.9, 0.99\] → \[0.9, 0.9\]"),
        (
            scheduled(FedAvgM, "linear", rounds=4)(server_momentum=0.0),
            scheduled(FedAvgM, "cosine", rounds=4)(server_momentum=0.0),
            "rate_schedule: linear",
        ),
    ],
)
def test_what_changes_training_is_another_run(first: FedAvg, second: FedAvg, words: str, tmp_path: Path) -> None:
    path, key = tmp_path / "run.db", NoiseKey.generate()
    run(path, key, first)
    with pytest.raises(ValueError, match=words):
        run(path, key, second)


def test_what_is_kept_of_flowers_and_of_ones_own() -> None:
    assert settings(FedAvg(fraction_train=0.3)) == {"strategy": "FedAvg", "training": {}}
    assert settings(FedAdam(eta=0.5))["training"] == {
        "eta": 0.5,
        "eta_l": 0.1,
        "tau": 0.001,
        "beta_1": 0.9,
        "beta_2": 0.99,
    }
    assert settings(Warm())["training"] == {
        "server_learning_rate": 0.5,
        "server_momentum": 0.0,
        "warmup": 3,
        "betas": [0.9, 0.99],
    }
    assert settings(FedProx(proximal_mu=0.1))["training"] == {"proximal_mu": 0.1}
    wrong = FedAvg()
    for value, words in (
        (("lr",), "training_settings of FedAvg names 'lr', which it does not have"),
        ("lr", r"must be names, for example \('lr',\); got one text"),
    ):
        wrong.training_settings = value
        with pytest.raises((TypeError, ValueError), match=words):
            settings(wrong)
    wrong.training_settings, wrong.lr = ("lr",), object()
    with pytest.raises(ValueError, match="object, which"):
        settings(wrong)
