"""One fresh secret round in each epoch: both directions against quadrature and draws, and that runs do what is accounted for."""

import itertools
import math

import numpy as np
import pytest
from oracles_b_min_sep import deltas
from oracles_random_allocation import by_draws, patterns
from scipy.stats import lognorm

from fedcgd import BSR, DPSGD, LambdaCGD, Normalized, Participation
from fedcgd.accounting import accountant, gaussian
from fedcgd.accounting.log_normal_means import log_normal_mean
from fedcgd.accounting.losses import Composition
from fedcgd.accounting.sampled import OneOf
from fedcgd.accounting.selection import select_mechanism
from fedcgd.mechanisms import BandedToeplitz, Mechanism, matrix
from fedcgd.optimisation import catalogue
from fedcgd.participation.cohorts import rounds_of


def epochs(number: int, rounds: int) -> Participation:
    return Participation(rounds=number * rounds, max_participations=number, sampling="random-allocation")


def both_deltas(sigma: float, rounds: int, number: int, epsilon: float) -> list[float]:
    """Removing, adding."""
    losses = OneOf(((1.0, rounds),)).losses(sigma, 1e-4, 1e-20)
    return [Composition([(loss, number)]).delta(epsilon) for loss in losses]


@pytest.mark.parametrize(("rounds", "points"), [(2, 1500), (3, 180)])
@pytest.mark.parametrize(("sigma", "epsilon"), [(0.5, 2.0), (1.0, 0.4), (1.0, 2.0), (3.0, 0.1)])
def test_one_epoch_by_quadrature(rounds: int, points: int, sigma: float, epsilon: float) -> None:
    law = {(t,): 1 / rounds for t in range(rounds)}
    for bound, truth in zip(
        both_deltas(sigma, rounds, 1, epsilon), deltas(np.eye(rounds), law, sigma, epsilon, points), strict=True
    ):
        assert truth * (1 - 2e-4) <= bound <= truth * (1 + 3e-3) + 1e-9


def test_means_of_two_kinds_are_larger_in_the_convex_order() -> None:
    """(V_1 + V_2 + V_2′)/3 by quadrature over V_1 and V_2, V_2′: every mean of (x − a)₊ and of (a − x)₊."""
    found = log_normal_mean([(0.8, 1), (1.5, 2)], 1e-20)
    u = (np.arange(250) + 0.5) / 250
    first, second = (lognorm(s, scale=math.exp(-s * s / 2)).ppf(u) for s in (0.8, 1.5))
    s = (first[:, None, None] + second[None, :, None] + second[None, None, :]).ravel() / 3
    for a in (0.05, 0.2, 0.5, 0.9, 1.5, 3.0):
        put = float(np.maximum(a - s, 0).mean())  # of bounded values: the midpoints of 250 parts do
        mine = float(found.chances @ np.maximum(a - found.values, 0))
        assert put * (1 - 2e-3) - 1e-6 <= mine <= put * (1 + 4e-3) + 1e-6
        call = float(found.chances @ np.maximum(found.values - a, 0)) + found.infinite
        assert math.isclose(call - mine, 1 - a, abs_tol=1e-9)  # the mean stays 1


@pytest.mark.parametrize("kinds", [[(0.8, 1)], [(0.8, 1), (1.5, 2)], [(1.0, 37)]])
def test_what_lies_beyond_a_small_grid_is_counted(kinds: list[tuple[float, int]]) -> None:
    """With a tenth lost at each end all means are still at least the true ones, and that of S is 1."""
    small, whole = log_normal_mean(kinds, 0.1), log_normal_mean(kinds, 1e-20)
    assert len(small.values) < len(whole.values)
    assert math.isclose(small.values @ small.chances + small.infinite, 1, abs_tol=1e-9)
    assert math.isclose(small.chances.sum(), 1, abs_tol=1e-9)
    for loss in small.losses(0.01):
        assert loss.infinite > 1e-4
        assert math.isclose(loss.masses.sum() + loss.infinite, 1, abs_tol=1e-9)
    for a in np.geomspace(0.01, 20, 40):
        calls = [r.chances @ np.maximum(r.values - a, 0) + r.infinite for r in (small, whole)]
        puts = [r.chances @ np.maximum(a - r.values, 0) for r in (small, whole)]
        assert calls[0] >= calls[1] * (1 - 1e-3)
        assert puts[0] >= puts[1] * (1 - 1e-3)


@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_one_round_an_epoch_is_the_gaussian_mechanism(sigma: float) -> None:
    run = accountant(DPSGD(), epochs(6, 1))
    exact = gaussian.delta(epsilon=2.0, sigma=sigma / math.sqrt(6))
    assert exact * (1 - 1e-9) <= run.delta(noise_multiplier=sigma, epsilon=2.0).delta <= exact * (1 + 1e-9)
    assert all(exact * (1 - 1e-9) <= delta <= exact * 1.01 for delta in both_deltas(sigma, 1, 6, 2.0))


def test_calibrated_noise_is_enough_and_hardly_more() -> None:
    run, epsilon = accountant(DPSGD(), epochs(4, 25)), 0.5
    found = run.noise_multiplier(epsilon=epsilon, delta=1e-5)
    assert "each epoch" in found.proof.method
    sigma = found.noise_multiplier
    assert run.delta(noise_multiplier=sigma, epsilon=epsilon).delta <= 1e-5
    assert run.delta(noise_multiplier=sigma * 0.9995, epsilon=epsilon).delta > 1e-5
    assert math.isclose(run.epsilon(noise_multiplier=sigma, delta=1e-5).epsilon, epsilon, rel_tol=2e-3)


@pytest.mark.parametrize(("released", "points"), [(2, 500), (4, 40)])
@pytest.mark.parametrize(("sigma", "epsilon"), [(0.5, 2.0), (1.0, 0.4)])
def test_an_epoch_of_which_a_part_is_out_by_quadrature(
    released: int, points: int, sigma: float, epsilon: float
) -> None:
    """Epochs of three rounds: the round of the last may be still to come. δ was 2.1 to 2.5 times as much."""
    law: dict[tuple[int, ...], float] = {}
    for chosen in itertools.product(range(3), range(3, 6)):
        out = tuple(t for t in chosen if t < released)
        law[out] = law.get(out, 0.0) + 1 / 9
    truth = max(deltas(np.eye(released), law, sigma, epsilon, points))
    found = accountant(DPSGD(), epochs(2, 3)).delta(noise_multiplier=sigma, epsilon=epsilon, released=released).delta
    assert truth * (1 - 2e-3) <= found <= truth * 1.02 + 1e-9


def test_a_tiny_delta_is_found_where_losses_beyond_the_grid_would_be_larger() -> None:
    run = accountant(DPSGD(), epochs(2, 5))
    found = run.delta(noise_multiplier=1.0, epsilon=20.0).delta
    assert 0 < found < 1e-30
    assert found < gaussian.delta(epsilon=20.0, sigma=1 / math.sqrt(2)) / 20  # (1/5)², about


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        (BSR(4), r"at most 3 bands, .* bsr has 4"),
        (LambdaCGD(0.5), r"at most 3 bands, .* lambda-cgd has 12"),
        (BandedToeplitz((1.0, -0.5)), "an entry of C is -0.5"),
    ],
)
def test_what_is_refused(mechanism: Mechanism, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accountant(mechanism, epochs(4, 3)).check()


@pytest.mark.parametrize(("mechanism", "released"), [(BSR(2), 6), (BSR(3), 5), (BandedToeplitz((1.0, 1.0)), 6)])
@pytest.mark.parametrize("sigma", [0.9, 2.5])
def test_several_bands_cost_at_most_what_known_rounds_do_and_never_less_than_the_truth(
    mechanism: Mechanism, released: int, sigma: float
) -> None:
    """Two epochs of three rounds, some of them of neighbouring epochs next to each other."""
    c, law = matrix(mechanism, 6)[:released, :released], patterns(6, 3, released)
    truth, error = max(by_draws(c, law, sigma, 0.5, draws=400_000, seed=3))
    run = accountant(mechanism, epochs(2, 3))
    found = run.delta(noise_multiplier=sigma, epsilon=0.5, released=released).delta
    reach = max(float(np.linalg.norm(c[:, list(taken)].sum(axis=1))) for taken in law)
    assert truth - 4 * error <= found
    assert reach <= run.gaussian_mu(1.0, released).value
    assert found <= gaussian.delta(epsilon=0.5, sigma=sigma / run.gaussian_mu(1.0, released).value) * (1 + 1e-9)


def test_bands_are_optimised_as_if_turns_were_an_epoch_apart_and_chosen_up_to_an_epoch() -> None:
    known = catalogue.mechanism("band-mf:3", Participation(rounds=24, min_separation=6))
    np.testing.assert_array_equal(matrix(catalogue.mechanism("band-mf:3", epochs(4, 6)), 24), matrix(known, 24))
    chosen = select_mechanism("bsr", epochs(3, 3), epsilon=4, delta=1e-3)
    assert isinstance(chosen, BSR)
    assert 1 <= chosen.bands <= 3


def test_unit_columns_have_one_band_too() -> None:
    accountant(Normalized(DPSGD()), epochs(3, 4)).check()
    assert (
        accountant(Normalized(DPSGD()), epochs(3, 4)).delta(noise_multiplier=1.0, epsilon=1.0).proof.failure_probability
        == 0
    )


def test_each_user_draws_one_round_of_each_epoch_anew() -> None:
    run, key = epochs(3, 4), b"k" * 32
    users = [str(i) for i in range(4000)]
    drawn = np.array([rounds_of(user, run, key) for user in users])
    assert np.array_equal(drawn // 4, np.tile([0, 1, 2], (4000, 1)))
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (drawn[:, 0] % 4, drawn[:, 1] % 4), 1)
    assert np.all(np.abs(pairs - 250) < 5 * math.sqrt(250))  # uniform, and the second tells nothing of the first
