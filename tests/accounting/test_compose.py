"""Several runs together: exact for Gaussian mechanisms, and never below quadrature for sampled ones."""

import math

import numpy as np
import oracles_accounting as oracles
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from scipy.special import ndtr

from fedcgd import DPSGD, LambdaCGD, Participation
from fedcgd.accounting import PastRun, calibrate, compose, compute_delta, compute_epsilon
from fedcgd.accounting.poisson import PoissonAccountant
from fedcgd.accounting.profile import pmf_of_profile

SILOS = Participation(rounds=12, min_separation=4)
COINS = Participation(rounds=100, sampling="poisson", sampling_rate=0.05)
TWO_BINS = Participation(rounds=2, min_separation=2, sampling="balls-in-bins")


def run_of(mechanism=None, participation=SILOS, sigma: float = 3.0, released: int | None = None) -> PastRun:
    return PastRun(
        mechanism=mechanism or LambdaCGD(0.5), participation=participation, noise_multiplier=sigma, released=released
    )


def test_two_runs_of_epsilon_8_are_12_point_26_together() -> None:
    """By the textbook formula with 2000 bits: two Gaussian mechanisms of μ are one of √2·μ."""
    sigma = calibrate(LambdaCGD(0.5), SILOS, epsilon=8, delta=1e-5).noise_multiplier
    joint = compose([run_of(sigma=sigma)] * 2, delta=1e-5)
    assert joint.epsilon == pytest.approx(12.26, abs=0.01)
    unit = calibrate(DPSGD(), Participation(rounds=1), epsilon=8, delta=1e-5).noise_multiplier / math.sqrt(2)
    assert oracles.gaussian_log_delta(joint.epsilon, unit) == pytest.approx(math.log(1e-5), abs=1e-7)
    assert joint.exact
    assert joint.failure_probability == 0
    assert str(joint).startswith("ε ≤ 12.3 at δ = 1e-05 for 24 rounds of 2 runs together, true only if which runs")


def test_one_run_alone_is_what_it_was_and_parts_cost_less() -> None:
    alone = compute_epsilon(LambdaCGD(0.5), SILOS, noise_multiplier=3.0, delta=1e-5, released=5).epsilon
    assert compose([run_of(released=5)], delta=1e-5).epsilon == pytest.approx(alone, rel=1e-9)
    assert compose([run_of(released=5), run_of(released=0)], delta=1e-5).epsilon == pytest.approx(alone, rel=1e-9)
    assert alone < compose([run_of(), run_of(released=5)], delta=1e-5).epsilon
    assert compose([run_of(released=0)], delta=1e-5).epsilon == 0
    assert compose([], delta=1e-5).epsilon == 0


def test_what_draws_may_mislead_is_a_part_of_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run_of(DPSGD(), COINS, 1.0), run_of(DPSGD(), COINS, 0.8)]
    without, less = (compose(runs, delta=delta).epsilon for delta in (1e-5, 4e-6))
    original = PoissonAccountant.loss_distribution
    monkeypatch.setattr(PoissonAccountant, "loss_distribution", lambda *asked: (original(*asked)[0], 3e-6))
    found = compose(runs, delta=1e-5)
    assert found.failure_probability == pytest.approx(6e-6)
    assert found.epsilon == pytest.approx(less, rel=1e-4)
    assert found.epsilon > 1.01 * without


def test_poisson_runs_agree_with_dp_accounting() -> None:
    """With a run without sampling beside them, by dp-accounting's own accountant."""
    accountant = PLDAccountant()
    for rate, sigma, rounds in ((0.05, 1.0, 200), (0.05, 0.8, 40)):
        event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
        accountant.compose(dp_event.SelfComposedDpEvent(event, rounds))
    accountant.compose(dp_event.GaussianDpEvent(2.0))
    runs = [run_of(DPSGD(), COINS, 1.0)] * 2 + [run_of(DPSGD(), COINS, 0.8, 40)]
    runs.append(run_of(DPSGD(), Participation(rounds=1), 2.0))
    found = compose(runs, delta=1e-5)
    assert 0.9999 * accountant.get_epsilon(1e-5) <= found.epsilon <= 1.005 * accountant.get_epsilon(1e-5)
    assert not found.exact


@pytest.mark.parametrize("mechanism", [DPSGD(), LambdaCGD(0.5)])
def test_a_balls_in_bins_run_beside_a_gaussian_one_by_quadrature(mechanism) -> None:
    """E of the Gaussian's δ at ε less the loss of the bins, on a grid in the plane of m_0 and m_1, in both directions."""
    lam = getattr(mechanism, "lam", 0.0)
    sigma, mu = 1.2, 0.7
    axis = np.linspace(-9, 10, 801)
    x, y = np.meshgrid(axis, axis, indexing="ij")
    plain = np.exp(-(x**2 + y**2) / 2) / (2 * math.pi)
    means = [(1 / sigma, lam / sigma), (0.0, 1 / sigma)]
    mixture = sum(np.exp(-((x - u) ** 2 + (y - v) ** 2) / 2) for u, v in means) / 2 / (2 * math.pi)
    cell = (axis[1] - axis[0]) ** 2

    def truth(epsilon: float) -> float:
        found = []
        for p, q in ((mixture, plain), (plain, mixture)):
            left = epsilon - np.log(p / q)
            delta = ndtr(mu / 2 - left / mu) - np.exp(np.minimum(left, 300)) * ndtr(-mu / 2 - left / mu)
            found.append(float((p * delta).sum() * cell))
        return max(found)

    joint = compose([run_of(mechanism, TWO_BINS, sigma), run_of(DPSGD(), Participation(rounds=1), 1 / mu)], delta=1e-4)
    assert truth(joint.epsilon) <= 1e-4
    assert truth(joint.epsilon * 0.97) > 1e-4
    known = compose(
        [
            run_of(mechanism, Participation(rounds=2, min_separation=2), sigma),
            run_of(DPSGD(), Participation(rounds=1), 1 / mu),
        ],
        delta=1e-4,
    )
    assert joint.epsilon < known.epsilon


def test_what_is_too_small_or_too_large_for_a_grid_is_composed_as_if_the_rounds_were_known() -> None:
    runs = [run_of(LambdaCGD(0.5), Participation(rounds=4, min_separation=2, sampling="balls-in-bins"))] * 2
    known = [run_of(LambdaCGD(0.5), Participation(rounds=4, min_separation=2))] * 2
    assert compose(runs, delta=1e-13).epsilon == compose(known, delta=1e-13).epsilon
    often = [run_of(DPSGD(), COINS)] * 2
    always = [run_of(DPSGD(), Participation(rounds=100, min_separation=1))] * 2
    assert compose(often, delta=2e-11).epsilon < compose(always, delta=2e-11).epsilon
    assert compose(often, delta=9e-12).epsilon == pytest.approx(compose(always, delta=9e-12).epsilon, rel=1e-9)
    weak = run_of(DPSGD(), COINS, 1e-3)
    assert compose([weak], delta=1e-5).epsilon == pytest.approx(
        compose([run_of(DPSGD(), Participation(rounds=100), 1e-3)], delta=1e-5).epsilon
    )


def test_a_profile_is_dominated_between_its_points_too() -> None:
    """Of one Gaussian mechanism at eight ε: the distribution's δ is that at the points, and no less anywhere."""
    step = 0.01
    multiples = np.array([0, 20, 50, 90, 140, 200, 300, 420])
    plan = Participation(rounds=1)

    def delta(epsilon: float) -> float:
        return compute_delta(DPSGD(), plan, noise_multiplier=1.0, epsilon=epsilon).delta

    deltas = np.array([delta(m * step) for m in multiples])
    pmf = pmf_of_profile(multiples, deltas, step)
    for epsilon in np.linspace(0, 5, 101):
        assert pmf.get_delta_for_epsilon(float(epsilon)) >= delta(float(epsilon)) * (1 - 1e-9)
    for m, value in zip(multiples, deltas, strict=True):
        assert pmf.get_delta_for_epsilon(float(m * step)) == pytest.approx(value, rel=1e-9)
    # A point that lies too high, as draws may have it, changes nothing but itself.
    high = pmf_of_profile(multiples, deltas * np.where(multiples == 90, 1.5, 1.0), step)
    assert high.get_delta_for_epsilon(0.9) < 1.5 * deltas[3]
    assert high.get_delta_for_epsilon(0.9) >= deltas[3]
    gammas = np.exp(multiples * step)
    for i in range(1, len(multiples) - 1):  # the hull is there the line between its neighbours
        spoilt = pmf_of_profile(multiples, np.where(np.arange(len(deltas)) == i, 1.5 * deltas, deltas), step)
        part = (gammas[i] - gammas[i - 1]) / (gammas[i + 1] - gammas[i - 1])
        line = deltas[i - 1] + part * (deltas[i + 1] - deltas[i - 1])
        assert spoilt.get_delta_for_epsilon(float(multiples[i] * step)) == pytest.approx(min(line, 1.5 * deltas[i]))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="delta must be in"):
        compose([run_of()], delta=0)
    with pytest.raises(ValueError, match="without noise"):
        compose([run_of(sigma=0.0)], delta=1e-5)
    with pytest.raises(ValueError, match=r"released must be in 0 … 12"):
        compose([run_of(released=13)], delta=1e-5)
