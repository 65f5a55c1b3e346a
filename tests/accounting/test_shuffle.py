"""Shuffled batches are accounted for without amplification: by the worst of all orders, which are enumerated here."""

from itertools import product

import numpy as np
import pytest

from fedcgd import DPSGD, Participation, compute_epsilon
from fedcgd.mechanisms import BISR, BSR, LambdaCGD, Mechanism, matrix


def worst(c: np.ndarray, steps: int, block: int, epochs: int = 3) -> float:
    """max ‖Σ_e C[:, t_e]‖ over one round t_e of each epoch, all in the same block of `block` rounds."""
    rounds = (
        [epoch * steps + start + place for epoch, place in enumerate(places)]
        for start in range(0, steps, block)
        for places in product(range(block), repeat=epochs)
    )
    return max(float(np.linalg.norm(c[:, taken].sum(axis=1))) for taken in rounds)


@pytest.mark.parametrize("block", [1, 2, 4])
@pytest.mark.parametrize("mechanism", [DPSGD(), LambdaCGD(0.7), BSR(3), BISR(2)], ids=str)
def test_no_order_moves_more_than_is_accounted_for(mechanism: Mechanism, block: int) -> None:
    """3 epochs of 4 rounds."""
    run = Participation(rounds=12, min_separation=5 - block, max_participations=3, sampling="shuffle")
    found = compute_epsilon(mechanism, run, noise_multiplier=2.0, delta=1e-5)
    assert found.proof.sensitivity is not None
    assert found.proof.sensitivity >= worst(matrix(mechanism, 12), 4, block) * (1 - 1e-12)
    known = Participation(rounds=12, min_separation=5 - block, max_participations=3)
    assert found.epsilon == compute_epsilon(mechanism, known, noise_multiplier=2.0, delta=1e-5).epsilon
    assert found.proof.failure_probability == 0


@pytest.mark.parametrize("released", range(1, 12))
@pytest.mark.parametrize("mechanism", [DPSGD(), LambdaCGD(0.7), BISR(2)], ids=str)
def test_first_rounds_hold_no_more_participations_than_epochs_that_have_begun(
    mechanism: Mechanism, released: int
) -> None:
    run = Participation(rounds=12, max_participations=3, sampling="shuffle")
    found = compute_epsilon(mechanism, run, noise_multiplier=2.0, delta=1e-5, released=released)
    assert found.proof.sensitivity is not None
    assert found.proof.sensitivity >= worst(matrix(mechanism, 12)[:released], 4, 4, 3) * (1 - 1e-12)
    if isinstance(mechanism, DPSGD):
        assert found.proof.sensitivity == pytest.approx((-(-released // 4)) ** 0.5)


def test_of_independent_noise_it_is_exact() -> None:
    run = Participation(rounds=12, max_participations=3, sampling="shuffle")
    found = compute_epsilon(DPSGD(), run, noise_multiplier=2.0, delta=1e-5)
    assert found.proof.exact
    assert found.proof.sensitivity == pytest.approx(worst(np.eye(12), 4, 4))
