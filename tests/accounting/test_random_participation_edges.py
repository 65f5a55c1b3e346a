"""Secret rounds at the edges of what can be asked: one round, a sure coin, a rare one, b = n, columns that grow or are alike."""

import math

import numpy as np
import pytest
from oracles_b_min_sep import patterns as by_coins
from oracles_random_allocation import Law, by_draws
from oracles_random_allocation import patterns as by_epochs
from scipy.special import log_ndtr

from fedcgd.accounting import calibrate, compute_delta
from fedcgd.mechanisms import BSR, DPSGD, BandedToeplitz, Dense, LambdaCGD, Mechanism, matrix
from fedcgd.participation import Participation


def growing(n: int, bands: int) -> Mechanism:
    """The last column is e² times as long as the first, or more."""
    band = np.exp(2 * np.arange(n) / max(n - 1, 1))[:, None] * np.random.default_rng(n).uniform(0.3, 1.0, (n, bands))
    return Dense("band-mf", np.where(np.add.outer(np.arange(n), np.arange(bands)) < n, band, 0.0))


def alike(n: int) -> Mechanism:
    """All columns are nearly (0, …, 0, 1): which round it was makes no difference."""
    c = 0.01 * np.eye(n)
    c[-1] = 1.0
    return Dense("dense", np.array([np.pad(c[j:, j], (0, j)) for j in range(n)]))


def coins(n: int, b: int, rate: float, *, warm: bool = True) -> tuple[Participation, Law]:
    who = Participation(rounds=n, min_separation=b, sampling="b-min-sep", sampling_rate=rate, warm_start=warm)
    return who, by_coins(n, b, rate, warm=warm)


def epochs(n: int, length: int) -> tuple[Participation, Law]:
    who = Participation(rounds=n, max_participations=n // length, sampling="random-allocation")
    return who, by_epochs(n, length, n)


@pytest.mark.parametrize(
    ("mechanism", "asked", "sigma", "epsilon"),
    [
        (DPSGD(), coins(1, 1, 0.3), 0.7, 1.0),
        (DPSGD(), coins(1, 1, 1.0), 1.5, 0.5),
        (BSR(2), coins(5, 2, 1.0, warm=False), 2.5, 0.5),
        (BSR(2), coins(6, 2, 1.0), 2.5, 0.5),
        (LambdaCGD(0.7), coins(6, 3, 1.0), 2.0, 0.7),
        (LambdaCGD(0.7), coins(6, 2, 0.02), 1.0, 0.1),
        (growing(6, 2), coins(6, 6, 0.4), 4.0, 0.3),
        (growing(6, 2), coins(6, 2, 0.02), 4.0, 0.1),
        (growing(6, 6), coins(6, 2, 0.4), 10.0, 0.7),
        (alike(5), coins(5, 2, 0.4), 1.5, 0.7),
        (alike(5), coins(5, 5, 0.1), 0.8, 0.3),
        (BSR(3), epochs(3, 3), 0.8, 1.0),
        (BSR(1), epochs(4, 1), 2.0, 0.7),
        (growing(8, 4), epochs(8, 4), 5.0, 0.7),
        (growing(8, 2), epochs(8, 2), 5.0, 1.5),
        (alike(4), epochs(4, 4), 1.5, 0.5),
    ],
)
def test_delta_is_an_upper_bound(
    mechanism: Mechanism, asked: tuple[Participation, Law], sigma: float, epsilon: float
) -> None:
    """Beside draws from the law by enumeration, in both directions; and for a C that it follows exactly it is near."""
    participation, law = asked
    assert math.isclose(sum(law.values()), 1.0)
    c = matrix(mechanism, participation.rounds)
    truth, error = max(by_draws(c, law, sigma, epsilon, draws=200_000, seed=7))
    assert 0 < error < 0.05 * truth
    found = compute_delta(mechanism, participation, noise_multiplier=sigma, epsilon=epsilon).delta
    assert found >= truth - 4 * error
    banded = not np.tril(c, -participation.spacing).any()
    by_norm = participation.sampling == "random-allocation" and np.count_nonzero(np.tril(c, -1))
    if (banded or isinstance(mechanism, LambdaCGD)) and not by_norm:
        assert found <= truth * 1.15 + 4 * error


@pytest.mark.parametrize(("square", "epsilon"), [(500.0, 700.0), (500.0, 750.0), (690.0, 1035.0)])
def test_delta_is_an_upper_bound_where_the_ratio_is_beyond_every_float(square: float, epsilon: float) -> None:
    """C = I, one of two rounds by a fair coin: S = (u + v)/2, and (u/2 + v/2 − a)₊ ≥ (u/2 − a)₊ + (v/2 − a)₊."""
    norm = math.sqrt(square)  # |C1_P|/σ
    shifted = epsilon + math.log(2)
    first = log_ndtr(norm / 2 - shifted / norm)
    second = shifted + log_ndtr(-norm / 2 - shifted / norm)
    log_least = first + math.log(-math.expm1(second - first))
    participation, _ = coins(2, 2, 1.0)
    found = compute_delta(DPSGD(), participation, noise_multiplier=1 / norm, epsilon=epsilon).delta
    assert math.log(found) >= log_least


def test_a_tail_of_numbers_that_count_for_nothing_is_none() -> None:
    participation, _ = coins(4, 2, 0.3)
    with_tail, without = (
        compute_delta(BandedToeplitz(values), participation, noise_multiplier=1.0, epsilon=2.0).delta
        for values in ((1.0, 0.5, 1e-310), (1.0, 0.5))
    )
    assert with_tail == without


def test_what_draws_would_take_minutes_for_has_a_bound_without_them() -> None:
    """200,000 rounds: Poisson sampling by the same coins, whose σ is far below that of known rounds."""
    run = Participation(rounds=200_000, min_separation=10, sampling="b-min-sep", sampling_rate=0.01)
    found = calibrate(LambdaCGD(0.9), run, epsilon=8, delta=1e-5)
    known = calibrate(LambdaCGD(0.9), Participation(rounds=200_000, min_separation=10), epsilon=8, delta=1e-5)
    assert found.proof.failure_probability == 0
    assert found.noise_multiplier < 0.7 * known.noise_multiplier
