"""How often the best attacker is right: against distributions of one or two rounds, written out and integrated."""

import numpy as np
import pytest
from oracles_b_min_sep import ONE_OF_TWO, deltas
from scipy.stats import norm

from fedcgd import DPSGD, Participation, accountant
from fedcgd.accounting.attacker import AttackerAccuracy, attacker_accuracy


def accuracy(participation: Participation, sigma: float) -> AttackerAccuracy:
    return attacker_accuracy(accountant(DPSGD(), participation), noise_multiplier=sigma)


def test_the_gaussian_with_mu_2083() -> None:
    """Φ(2.083/2) by a table of the normal distribution."""
    assert accuracy(Participation(rounds=1), 1 / 2.083).percent == "85.12"


@pytest.mark.parametrize("sigma", [0.3, 1.0, 5.0])
def test_one_gaussian(sigma: float) -> None:
    """The best test says "took part" above the middle, and is right with probability Φ(1/(2σ))."""
    found = accuracy(Participation(rounds=1), sigma)
    assert found.value == pytest.approx(norm.cdf(1 / (2 * sigma)), rel=1e-9)
    assert found.gaussian_mu == pytest.approx(1 / sigma)


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.1), (2.0, 0.01)])
def test_one_round_with_a_coin(sigma: float, rate: float) -> None:
    """(1 − q)·N(0, σ²) + q·N(1, σ²) against N(0, σ²): the distance is q times that without the coin."""
    found = accuracy(Participation(rounds=1, sampling="poisson", sampling_rate=rate), sigma)
    truth = 0.5 + rate * (2 * norm.cdf(1 / (2 * sigma)) - 1) / 2
    assert truth - 1e-12 <= found.value <= truth + 1e-4
    assert found.gaussian_mu is None


def test_one_of_two_random_participation() -> None:
    """½·N((1, 0), σ²) + ½·N((0, 1), σ²) against N(0, σ²), integrated over a fine lattice of the plane."""
    sigma = 1.0
    distance, _ = deltas(np.eye(2), ONE_OF_TWO, sigma, 0.0, 1201)
    found = accuracy(Participation(rounds=2, min_separation=2, sampling="balls-in-bins"), sigma)
    truth = (1 + distance) / 2
    assert truth - 1e-4 <= found.value <= truth + 0.02
    assert found.value < norm.cdf(1 / (2 * sigma)) - 0.01  # of an attacker who knows the round
