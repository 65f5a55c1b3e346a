"""One federated run with canary users: the honest run passes, and broken runs are refuted by the canaries' scores."""

from dataclasses import replace

import numpy as np
import pytest
from fake_grid import FakeGrid
from flower_runs import asked_users, hosting, make
from shared import record

from fedcgd import DPSGD, LambdaCGD, Mechanism, NoiseKey, Normalized, Participation, calibrate
from fedcgd.audit.audit import AuditResult, audit_canaries, canary_scores
from fedcgd_flower import sequential_training
from fedcgd_flower.clipping import clipped_update

PARTICIPATION = Participation(rounds=8, min_separation=4)
CANARIES = 240
CLIP = 0.5


def run(mechanism: Mechanism, claim: float, names_each: int = 1) -> AuditResult:
    """Canary j pulls along coordinate j, 20 times as far as allowed; a fair coin says which ones are there."""
    coin = np.random.default_rng(3).random(CANARIES) < 0.5
    present = [f"canary {j} {name}" for j in np.flatnonzero(coin) for name in range(names_each)]

    def train(model, user, config, context):
        values = model["w"].numpy().copy()
        values[int(user.split()[1])] += 20 * CLIP
        return record(values)

    grid = FakeGrid({1: hosting(present, sequential_training(train))})
    sigma = calibrate(mechanism, PARTICIPATION, epsilon=claim, delta=1e-5).noise_multiplier
    strategy = make(
        mechanism=mechanism, participation=PARTICIPATION, clip_norm=CLIP, noise_multiplier=sigma,
        cohort_size=len(present) // 4, key=NoiseKey.simulation(13),
    )  # fmt: skip
    models = []
    strategy.start(grid, record(np.zeros(CANARIES)), evaluate_fn=lambda r, a: models.append(a["w"].numpy().copy()))
    assert strategy.releases == PARTICIPATION.rounds

    asked = [[int(user.split()[1]) for user in users] for users in asked_users(grid)]
    patterns = [
        tuple(t for t, canaries in enumerate(asked) for canary in canaries if canary == j) for j in range(CANARIES)
    ]
    took_part = np.array([bool(pattern) for pattern in patterns])
    some = next(pattern for pattern in patterns if pattern)
    released = np.diff(np.array(models, np.float64), axis=0) * strategy.cohort_size
    scores = canary_scores(mechanism, released, [pattern or some for pattern in patterns], clip_norm=CLIP)
    return audit_canaries(scores[took_part], scores[~coin], epsilon=claim, delta=1e-5)


@pytest.mark.parametrize("mechanism", [DPSGD(), LambdaCGD(0.8), Normalized(LambdaCGD(0.8))])
def test_the_honest_run_passes_and_says_something(mechanism: Mechanism) -> None:
    result = run(mechanism, 8.0)
    assert result.passed
    assert result.epsilon_lower > 3.0
    assert result.bounds["one-run guesses"] > 1.0


def test_clipping_left_out_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    def unclipped(trained, model, clipping):
        return clipped_update(trained, model, replace(clipping, clip_norm=1e6))

    monkeypatch.setattr("fedcgd_flower.user_training.clipped_update", unclipped)
    assert not run(LambdaCGD(0.8), 8.0).passed


def test_users_taking_part_more_often_than_k_are_refuted() -> None:
    """Each is registered under four names, and takes part k times under each."""
    result = run(LambdaCGD(0.8), 8.0, names_each=4)
    assert not result.passed
