"""Balls-in-Bins against quadrature, an independent Monte Carlo, and what is known at the ends."""

import math
from dataclasses import replace

import numpy as np
import pytest
from oracles_b_min_sep import ONE_OF_TWO, deltas

from fedcgd import Participation, Plan
from fedcgd.accounting import accountant, calibrate, compute_delta, compute_epsilon
from fedcgd.accounting.balls_in_bins.gram import bin_gram
from fedcgd.accounting.balls_in_bins.law import BinLaw, Bins
from fedcgd.accounting.gaussian import GaussianAccountant
from fedcgd.accounting.guarantee import Bound, Proof
from fedcgd.accounting.random_participation import monte_carlo
from fedcgd.accounting.random_participation.add import AddDirection, draw_log_ratios
from fedcgd.mechanisms import BISR, BSR, DPSGD, LambdaCGD, Mechanism, Normalized, matrix


def bins(rounds: int, b: int) -> Participation:
    return Participation(rounds=rounds, min_separation=b, sampling="balls-in-bins")


@pytest.mark.parametrize("released", [1, 2, 4, 6, 11, 12])
@pytest.mark.parametrize("mechanism", [DPSGD(), LambdaCGD(0.7), Normalized(LambdaCGD(0.7)), BSR(5)])
def test_gram_matrix_of_the_first_rounds(mechanism, released: int) -> None:
    """Also within the first epoch, where some bins have not had a round; and of all, with the last bin beside the next epoch."""
    n, b = 12, 3
    c = matrix(mechanism, n)[:released]
    m = np.stack([c[:, j::b].sum(axis=1) for j in range(b)])
    np.testing.assert_allclose(bin_gram(mechanism, bins(n, b), released), m @ m.T, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("overlap", "sigma", "target"), [(0.9999999, 0.25, 30.0), (0.99, 1.0, 5.0), (0.99, 1.0, 1.0), (0.3, 1.0, 1.0)]
)
def test_adding_a_user_alone(overlap: float, sigma: float, target: float) -> None:
    """Two bins, also nearly equal ones: δ of adding by quadrature, also where it is too rare to be drawn."""
    gram = np.array([[1.0, overlap], [overlap, 1.0]])
    x = np.linspace(-12, 12, 24_001)
    truth = 0.0
    for z, weight in zip(*np.polynomial.hermite_e.hermegauss(61), strict=True):
        along, apart = math.sqrt((1 + overlap) / 2) * x / sigma, math.sqrt((1 - overlap) / 2) * z / sigma
        ratio = np.exp(along - 0.5 / sigma**2) * math.cosh(apart)
        excess = np.maximum(1 - math.exp(target) * ratio, 0) * np.exp(-(x**2) / 2)
        truth += weight * excess.sum() * (x[1] - x[0]) / (2 * math.pi)
    of = Bins(gram)
    drawn = draw_log_ratios(of, BinLaw(2).likelihood(of, sigma), sigma, 2**16, (3, 0))
    if truth > 1e-3:  # what is rarer is not drawn
        values = (drawn.chances * np.maximum(1 - np.exp(target + drawn.lower), 0)).sum(axis=0)
        error = values.std() / 2**8
        assert truth - 4 * error <= values.mean() <= truth * 1.003 + 4 * error
    direction = AddDirection.from_pilot(drawn, target, 2**16, 1e-3)
    assert truth <= direction.confirm(drawn) <= direction.expected <= 2 * truth


@pytest.mark.parametrize("mechanism", [DPSGD(), LambdaCGD(0.5)])
def test_no_epsilon_where_delta_alone_is_enough(mechanism) -> None:
    found = compute_epsilon(mechanism, bins(12, 12), noise_multiplier=20.0, delta=0.1)
    assert found.epsilon <= 1.5e-6


def test_equal_bins_draw_nothing() -> None:
    """Of C = I the law itself is composed, also for a σ that mechanisms are compared by."""
    run = accountant(DPSGD(), bins(12, 4))
    found = run.noise_multiplier(epsilon=2, delta=1e-5)
    assert found.proof.failure_probability == 0
    assert run.rough_noise_multiplier(epsilon=2, delta=1e-5) == pytest.approx(found.noise_multiplier, rel=1e-5)
    assert calibrate(LambdaCGD(0.5), bins(12, 3), epsilon=2, delta=1e-5).proof.failure_probability == 1e-12


def test_an_epsilon_that_its_budget_answers_may_fail_as_either_search_may():
    """σ comes from the draws of the calibration, and ε is asked of other draws before the budget takes its place."""
    found = calibrate(LambdaCGD(0.6), bins(12, 3), epsilon=2, delta=1e-5)
    again = compute_epsilon(LambdaCGD(0.6), bins(12, 3), noise_multiplier=found.noise_multiplier, delta=1e-5)
    assert again.epsilon == 2
    assert again.proof.failure_probability == 1e-12


def test_one_bin_is_the_gaussian_mechanism() -> None:
    guarantee = calibrate(LambdaCGD(0.5), bins(5, 1), epsilon=1, delta=1e-5)
    plain = calibrate(LambdaCGD(0.5), Participation(rounds=5), epsilon=1, delta=1e-5)
    assert plain.noise_multiplier <= guarantee.noise_multiplier <= plain.noise_multiplier * 1.00001  # six digits


def test_calibrated_noise_is_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monte_carlo, "calibrate", lambda *_, **asked: Bound(1.2345612, Proof("draws")))
    assert calibrate(LambdaCGD(0.5), bins(6, 3), epsilon=1, delta=1e-5).noise_multiplier == 1.23457


def delta_of_two_bins(mechanism: Mechanism, rounds: int, released: int | None, sigma: float, epsilon: float) -> float:
    """The larger of both directions, in the plane of m_0 and m_1."""
    c = matrix(mechanism, rounds)[:released]
    m = np.stack([c[:, j::2].sum(axis=1) for j in range(2)])
    return max(deltas(np.linalg.cholesky(m @ m.T + 1e-12 * np.eye(2)).T, ONE_OF_TWO, sigma, epsilon, 1101))


@pytest.mark.parametrize("mechanism", [LambdaCGD(0.7), Normalized(LambdaCGD(0.7)), BSR(3), DPSGD()])
@pytest.mark.parametrize("released", [1, 3, 5, 8])
def test_part_of_an_epoch_by_quadrature(mechanism, released: int) -> None:
    """Two bins, cut at the rounds that are out."""
    truth = delta_of_two_bins(mechanism, 8, released, 2.0, 1.0)
    found = compute_delta(mechanism, bins(8, 2), noise_multiplier=2.0, epsilon=1, released=released).delta
    assert truth * (1 - 1e-4) <= found <= truth * 1.1


@pytest.mark.parametrize(
    ("mechanism", "rounds", "released", "asked"),
    [
        (LambdaCGD(0.9), 6, None, {"epsilon": 1.0, "delta": 1e-4}),
        (BSR(3), 4, None, {"epsilon": 4.0, "delta": 1e-6}),
        (BISR(3), 8, 5, {"noise_multiplier": 3.0, "delta": 1e-5}),
        (Normalized(LambdaCGD(0.7)), 6, 1, {"noise_multiplier": 0.8, "delta": 1e-3}),
    ],
)
def test_answers_of_a_search_by_quadrature(mechanism, rounds: int, released: int | None, asked) -> None:
    """σ of a budget, and ε of a part of a run, for two bins: both directions in the plane of m_0 and m_1 are within δ."""
    participation = bins(rounds, 2)
    found = (
        calibrate(mechanism, participation, **asked)
        if "epsilon" in asked
        else compute_epsilon(mechanism, participation, released=released, **asked)
    )
    truth = delta_of_two_bins(mechanism, rounds, released, found.noise_multiplier, found.epsilon)
    assert truth * (1 - 1e-3) <= found.delta <= truth * 1.65  # 3 % of σ, where adding decides


@pytest.mark.parametrize("sigma", [1e5, 1e16, 1e50, 1e150])
def test_noise_beyond_any_use_hides_no_loss_in_rounding(sigma: float) -> None:
    """S − 1 tends to N(0, |ū|²), so that δ at ε = 0 tends to |ū|/√2π, ū the mean of the m_j/σ."""
    c = matrix(LambdaCGD(0.5), 6)
    mean = sum(c[:, j::3].sum(axis=1) for j in range(3)) / 3 / sigma
    truth = float(np.linalg.norm(mean)) / math.sqrt(2 * math.pi)
    found = compute_delta(LambdaCGD(0.5), bins(6, 3), noise_multiplier=sigma, epsilon=0).delta
    assert truth * (1 - 1e-6) <= found <= 1.3 * truth


@pytest.mark.parametrize("sampling", ["none", "balls-in-bins"])
def test_delta_is_never_zero_once_a_round_is_released(sampling) -> None:
    participation = Participation(rounds=12, min_separation=3, sampling=sampling)
    found = [
        compute_delta(LambdaCGD(0.9), participation, noise_multiplier=6.0, epsilon=100, released=t).delta
        for t in (0, 1)
    ]
    assert found[0] == 0
    assert min(found[1:]) > 0


def test_quick_guarantee_is_an_upper_bound_too() -> None:
    plan = Plan(mechanism=LambdaCGD(0.5), participation=bins(60, 5), clip_norm=1.0, noise_multiplier=4.0, delta=1e-4)
    for released in (1, 5, 41, 60):
        quick = plan.quick_guarantee(released=released)
        assert plan.guarantee(released=released).epsilon <= quick.epsilon <= plan.guarantee().epsilon
        assert quick.sampling == "balls-in-bins"
    assert "without amplification" in str(plan.quick_guarantee(released=1))
    known = replace(plan, participation=Participation(rounds=60, min_separation=5))
    assert known.quick_guarantee(released=20) == known.guarantee(released=20)


# An independent Monte Carlo with importance sampling (standard error 0.1 %): n = 3900, b = 390, k = 10, δ = 1e-5; ε: σ.
REFERENCE = [
    (BISR(4), {8: 1.544505, 4: 2.043099, 2: 2.548055, 1: 3.128388, 0.5: 4.217812, 0.25: 7.092941}),
    (BSR(2), {8: 1.353478, 4: 1.776709, 2: 2.17032, 1: 2.547459, 0.5: 2.988928, 0.25: 3.911978}),
    (BSR(64), {8: 1.89501, 4: 2.643454, 2: 3.769191, 1: 5.847333, 0.5: 10.299562, 0.25: 19.185623}),
    (DPSGD(), {8: 1.210277, 4: 1.587684, 2: 1.934452, 1: 2.258091, 0.5: 2.608915, 0.25: 3.158093}),
    (LambdaCGD(0.9), {8: 2.926637, 4: 4.100825, 2: 5.494643, 1: 7.476348, 0.5: 11.911967, 0.25: 21.54827}),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mechanism", "target", "sigma"),
    [(mechanism, target, sigma) for mechanism, row in REFERENCE for target, sigma in row.items()],
)
def test_agrees_with_an_independent_estimate(mechanism, target: float, sigma: float) -> None:
    found = calibrate(mechanism, bins(3900, 390), epsilon=target, delta=1e-5).noise_multiplier
    assert 0.997 * sigma <= found <= (1.012 if target >= 1 else 1.045) * sigma


def test_what_is_said_at_once_of_a_part_is_not_called_exact() -> None:
    """It is that of an adversary who knows the bins: an upper bound here, where they are secret."""
    plan = Participation(rounds=6, min_separation=3, sampling="balls-in-bins")
    found = accountant(DPSGD(), plan)
    whole = GaussianAccountant(DPSGD(), replace(plan, sampling="none")).epsilon(noise_multiplier=0.1, delta=1e-5)
    part = found.quick_epsilon(replace(whole, noise_multiplier=1.0), 1)
    assert part.epsilon < whole.epsilon
    assert not part.proof.exact
    assert part.sampling == "balls-in-bins"
    assert "without amplification" in part.proof.method


def test_agrees_with_jax_privacy() -> None:
    """jax-privacy 2.0.0: the mean of (1 − e^(1 − L))₊ over 50 000 losses L from get_privacy_loss_sample(
    BallsInBinsSampling(iterations=60, cycle_length=20), 2.0, 0.5 ** np.arange(60.0), seed=1, positive_sample=True,
    num_samples=50000) is 0.00284846 ± 0.00012085 for removing, which is larger than for adding.
    """
    drawn = compute_delta(LambdaCGD(0.5), bins(60, 20), noise_multiplier=2.0, epsilon=1.0).delta
    assert drawn == pytest.approx(0.00284846, abs=3 * 0.00012085)


def test_extremes_fall_back_on_the_gaussian_mechanism() -> None:
    """Where squares would overflow amplification is left out: the answer is finite, and larger than it need be."""
    participation, known = bins(12, 3), Participation(rounds=12, min_separation=3)
    found = calibrate(LambdaCGD(0.5), participation, epsilon=1e-200, delta=1e-200).noise_multiplier
    plain = calibrate(LambdaCGD(0.5), known, epsilon=1e-200, delta=1e-200).noise_multiplier
    assert found == pytest.approx(plain, rel=1e-6)
    for sigma, least, most in ((1e160, 0, 1e-150), (1e-140, 1e250, 1e300)):
        assert (
            least
            <= compute_epsilon(LambdaCGD(0.5), participation, noise_multiplier=sigma, delta=1e-200).epsilon
            <= most
        )
        assert compute_delta(LambdaCGD(0.5), participation, noise_multiplier=sigma, epsilon=1).delta <= 1
