"""Bounds without draws: never below δ by enumeration of all coins and quadrature, and what they bring at small δ."""

import itertools
import math

import numpy as np
import pytest
from oracles_b_min_sep import deltas, patterns

from fedcgd import BSR, DPSGD, BandedToeplitz, LambdaCGD, Participation, calibrate
from fedcgd.accounting import PastRun, accountant, compose
from fedcgd.accounting.bounds import largest_singular_value
from fedcgd.accounting.random_participation.columns import columns_of
from fedcgd.mechanisms import matrix


def coins(rounds: int, apart: int, rate: float, *, warm: bool) -> Participation:
    return Participation(rounds=rounds, min_separation=apart, sampling="b-min-sep", sampling_rate=rate, warm_start=warm)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("apart", "rate"), [(1, 0.3), (2, 0.4), (3, 0.7), (2, 1.0)])
@pytest.mark.parametrize("mechanism", [DPSGD(), BSR(2), BSR(3), LambdaCGD(0.6)])
def test_each_bound_is_above_every_sequence_of_coins(mechanism, apart: int, rate: float, warm: bool) -> None:
    """Each of them alone, at two ε, in both directions."""
    laws = accountant(mechanism, coins(4, apart, rate, warm=warm)).laws(4)
    assert len(laws) == 1 + (1 < mechanism.bandwidth(4) <= apart)
    for sigma, epsilon in ((1.0, 1.0), (2.5, 0.3)):
        truth = deltas(matrix(mechanism, 4), patterns(4, apart, rate, warm=warm), sigma, epsilon, 36)
        for bound in laws:
            assert bound.delta(sigma, epsilon) >= max(truth) * (1 - 2e-3)


@pytest.mark.parametrize(
    ("mechanism", "sampling"),
    [(BSR(2), "random-allocation"), *((each, "balls-in-bins") for each in (BSR(2), BSR(3), LambdaCGD(0.5)))],
)
def test_the_norm_of_c_bounds_samplings_of_one_round_in_several(mechanism, sampling: str) -> None:
    """Four rounds: one of two bins for good, or one of two in each epoch."""
    if sampling == "balls-in-bins":
        run = Participation(rounds=4, min_separation=2, sampling=sampling)
        law = {(0, 2): 0.5, (1, 3): 0.5}
    else:
        run = Participation(rounds=4, max_participations=2, sampling=sampling)
        law = dict.fromkeys(itertools.product((0, 1), (2, 3)), 0.25)
    truth = deltas(matrix(mechanism, 4), law, 1.5, 0.7, 36)
    (bound,) = accountant(mechanism, run).laws(4)
    assert bound.delta(1.5, 0.7) >= max(truth) * (1 - 2e-3)


@pytest.mark.parametrize("band", [(1.0, 0.2), (1.0, 0.9, 0.8)])
def test_blocks_have_the_largest_overlap_of_two_rounds_and_no_less_than_half(band) -> None:
    """The last columns of C are cut and overlap less."""
    _, blocks = accountant(BandedToeplitz(band), coins(12, 3, 0.3, warm=False)).laws(12)
    c = matrix(BandedToeplitz(band), 12)
    overlaps = c.T @ c
    square = overlaps.diagonal().max()
    np.fill_diagonal(overlaps, 0.0)
    ((coin, times),) = blocks.releases
    assert coin.norm == pytest.approx(2 * math.sqrt(max(square / 2, overlaps.max())), rel=1e-6)
    assert (coin.rate, times) == (pytest.approx(1 - 0.7 ** (len(band) - 1)), math.ceil(12 / (len(band) - 1)))


@pytest.mark.parametrize("rounds", [1, 2, 7, 40])
@pytest.mark.parametrize("mechanism", [DPSGD(), BSR(4), LambdaCGD(0.9)])
def test_the_norm_is_at_least_that_of_the_matrix_and_hardly_more(mechanism, rounds: int) -> None:
    truth = float(np.linalg.norm(matrix(mechanism, rounds), 2))
    found = largest_singular_value(mechanism, columns_of(mechanism, rounds, 1, rounds))
    assert truth <= found <= 1.2 * truth


@pytest.mark.parametrize(
    ("mechanism", "rate", "epsilon", "delta", "most"),
    [
        (BSR(4), 0.1, 0.3, 1e-9, 38.8),  # was 106.4, that without any sampling
        (BSR(4), 0.1, 0.1, 1e-7, 90.9),
        (DPSGD(), 0.01, 0.3, 1e-9, 2.19),  # was 87.2
        (DPSGD(), 0.01, 0.5, 1e-12, 1.83),  # was 64.2
    ],
)
def test_amplification_stays_at_small_delta_and_the_method_says_how(mechanism, rate, epsilon, delta, most) -> None:
    found = calibrate(mechanism, coins(100, 4, rate, warm=True), epsilon=epsilon, delta=delta)
    assert found.noise_multiplier < most
    assert found.proof.failure_probability == 0
    assert "same coins" in found.proof.method
    known = calibrate(mechanism, Participation(rounds=100, min_separation=4), epsilon=epsilon, delta=delta)
    assert found.noise_multiplier < 0.5 * known.noise_multiplier


def test_blocks_bring_more_than_the_norm_where_bands_are_many_and_coins_rare() -> None:
    """√(bands) for the norm of one column against the sum of its entries."""
    run = coins(400, 40, 0.002, warm=True)
    coin, blocks = accountant(BSR(32), run).laws(400)
    sigma = 12.0
    assert blocks.delta(sigma, 1.0) < coin.delta(sigma, 1.0)


def test_joint_epsilon_uses_the_bound_without_draws_where_that_is_the_least() -> None:
    """Two runs by their coins are one of twice the rounds."""
    run = coins(100, 4, 0.01, warm=True)
    past = PastRun(mechanism=DPSGD(), participation=run, noise_multiplier=2.2)
    joint = compose([past, past], delta=1e-9)
    longer = Participation(rounds=200, sampling="poisson", sampling_rate=0.01)
    one = accountant(DPSGD(), longer).epsilon(noise_multiplier=2.2, delta=1e-9).epsilon
    assert joint.proof.failure_probability == 0
    assert joint.epsilon == pytest.approx(one, rel=1e-3)
