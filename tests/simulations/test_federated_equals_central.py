"""One example per user, the same key and the same batches: federated and central training give the same model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from app_runs import released_by_the_app
from fake_grid import FakeGrid, FakeNode, is_training
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvgM
from oracles_softmax import train_softmax
from plans import make_plan

from fedcgd import DPSGD, LambdaCGD, NoiseKey, Normalized, Participation
from fedcgd.clipping.flat_models import flatten
from fedcgd_flower import CorrelatedNoise
from fedcgd_simulations.client_app import app as client_app
from fedcgd_simulations.flower_runs import local_superlink, run_app
from fedcgd_simulations.tasks import get_task

KEY = NoiseKey.simulation(3)
ROUNDS, COHORT, LEARNING_RATE = 10, 60, 2.0
RUN_CONFIG = {
    "task": "digits", "model": "", "data-dir": "", "users": "examples", "local-epochs": 0, "augmentations": 0, "seed": 0,
}  # fmt: skip

PARTICIPATIONS = {
    "none": Participation(rounds=ROUNDS, min_separation=5),
    "balls-in-bins": Participation(rounds=ROUNDS, min_separation=5, sampling="balls-in-bins"),
    "poisson": Participation(rounds=ROUNDS, sampling="poisson", sampling_rate=COHORT / 1260),
    "cyclic-poisson": Participation(
        rounds=ROUNDS, min_separation=4, sampling="cyclic-poisson", sampling_rate=4 * COHORT / 1260
    ),
}


def federated(mechanism, participation) -> tuple[CorrelatedNoise, torch.Tensor, list[np.ndarray]]:
    """The strategy, its final model and each round's users, from 2 nodes that host 1260 users."""
    model = get_task("digits").model(0)
    grid = FakeGrid(
        {i + 1: FakeNode(client_app, {"partition-id": i, "num-partitions": 2}) for i in range(2)}, RUN_CONFIG
    )
    plan = make_plan(mechanism, participation, noise_multiplier=3.0)
    strategy = CorrelatedNoise(FedAvgM(server_learning_rate=LEARNING_RATE), plan, cohort_size=COHORT, key=KEY)
    result = strategy.start(grid, ArrayRecord(model.state_dict()))
    batches: list[list[int]] = [[] for _ in range(ROUNDS)]
    for message in grid.sent:
        if is_training(message):
            task = message.content["fedcgd"]
            batches[task["round"]] += [int(user) for user in task["users"]]
    model.load_state_dict(result.arrays.to_torch_state_dict())
    return strategy, flatten(model), [np.array(batch, dtype=np.intp) for batch in batches]


@pytest.mark.parametrize("sampling", PARTICIPATIONS)
def test_same_key_same_batches_same_model(sampling: str) -> None:
    mechanism = DPSGD() if "poisson" in sampling else Normalized(LambdaCGD(0.8))
    strategy, final, batches = federated(mechanism, PARTICIPATIONS[sampling])
    central = train_softmax(
        strategy.plan, get_task("digits").load().train, batches,
        key=KEY.noise, learning_rate=LEARNING_RATE, planned_cohort=COHORT,
    )[-1]  # fmt: skip
    assert strategy.releases == ROUNDS
    assert sum(len(batch) for batch in batches) > ROUNDS
    assert final.abs().max() > 0.1  # it did move, from zeros
    assert np.abs(final.numpy() - central).max() < 1e-5


@pytest.mark.flower
def test_flwr_run_on_ray_trains_the_same_model_as_the_app_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real thing: SuperLink, Ray, two nodes. What the app in one process releases is compared with central training above."""
    asked = {"participations": 1, "rounds": 10, "seed": 3}
    with local_superlink(tmp_path / "flwr") as environment:
        figures = run_app(environment, asked | {"results": str(tmp_path / "run.json")}, timeout=240)
    _, here = released_by_the_app(asked, tmp_path, monkeypatch)
    assert figures["releases"] == 10
    np.testing.assert_allclose(figures["accuracy"], here["accuracy"], atol=1e-6)
    assert figures["accuracy"][-1] > figures["accuracy"][0] + 0.1
    assert (tmp_path / "run.png").stat().st_size > 10_000
