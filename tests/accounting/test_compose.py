"""Several runs together: exact for Gaussian mechanisms, and never below quadrature for sampled ones."""

import math
from dataclasses import replace

import numpy as np
import oracles_accounting as oracles
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from oracles_b_min_sep import ONE_OF_TWO, deltas

from fedcgd import DPSGD, LambdaCGD, Participation
from fedcgd.accounting import PastRun, calibrate, compose, compute_delta, compute_epsilon
from fedcgd.accounting.losses import Composition
from fedcgd.accounting.poisson import PoissonAccountant
from fedcgd.accounting.sampled import Profile

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
    assert joint.proof.exact
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
    original = PoissonAccountant.releases
    monkeypatch.setattr(PoissonAccountant, "releases", lambda *asked: (original(*asked)[0], 3e-6))
    found = compose(runs, delta=1e-5)
    assert found.proof.failure_probability == pytest.approx(6e-6)
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
    assert not found.proof.exact


@pytest.mark.parametrize("mechanism", [DPSGD(), LambdaCGD(0.5)])
def test_a_balls_in_bins_run_beside_a_gaussian_one_by_quadrature(mechanism) -> None:
    """On a grid in the plane of m_0 and m_1 and along the Gaussian release, in which whoever takes part does so for sure."""
    lam, sigma, mu = getattr(mechanism, "lam", 0.0), 1.2, 0.7
    columns = np.array([[1 / sigma, 0.0], [lam / sigma, 1 / sigma], [mu, mu]])

    def truth(epsilon: float) -> float:
        return max(deltas(columns, ONE_OF_TWO, 1.0, epsilon, 200))

    release = run_of(DPSGD(), Participation(rounds=1), 1 / mu)
    joint = compose([run_of(mechanism, TWO_BINS, sigma), release], delta=1e-4)
    assert not joint.proof.exact
    assert truth(joint.epsilon) <= 1e-4
    assert truth(joint.epsilon * 0.97) > 1e-4
    known = compose([run_of(mechanism, replace(TWO_BINS, sampling="none"), sigma), release], delta=1e-4)
    assert joint.epsilon < known.epsilon


@pytest.mark.parametrize("delta", [1e-9, 1e-13, 1e-20])
def test_amplification_stays_at_every_delta(delta: float) -> None:
    """Runs of one law are one longer run of it: Poisson, random allocation, and b-min-sep without overlap by its coins."""
    for few, many in (
        (Participation(rounds=50, sampling="poisson", sampling_rate=0.1),) * 2,
        (Participation(rounds=40, max_participations=2, sampling="random-allocation"),) * 2,
    ):
        many = replace(few, rounds=2 * few.rounds, max_participations=few.max_participations and 4)
        one = compute_epsilon(DPSGD(), many, noise_multiplier=2.0, delta=delta).epsilon
        assert compose([run_of(DPSGD(), few, 2.0)] * 2, delta=delta).epsilon == pytest.approx(one, rel=1e-3)


def test_noise_too_small_for_a_grid_is_composed_as_if_the_rounds_were_known() -> None:
    weak, known = run_of(DPSGD(), COINS, 1e-4), run_of(DPSGD(), Participation(rounds=100), 1e-4)
    found = compose([weak], delta=1e-5)
    assert not found.proof.exact
    assert found.epsilon == pytest.approx(compose([known], delta=1e-5).epsilon)
    assert "without the" in found.proof.method
    # Another run keeps what it has.
    both = compose([run_of(DPSGD(), COINS, 1.0), run_of(DPSGD(), COINS, 5e-4)], delta=1e-5)
    assert both.epsilon <= compose([known], delta=1e-5).epsilon


def test_a_profile_is_dominated_between_its_points_too() -> None:
    """Of one Gaussian mechanism at eight ε: the distribution's δ is that at the points, and no less anywhere."""
    step, plan = 0.01, Participation(rounds=1)
    epsilons = np.array([0, 20, 50, 90, 140, 200, 300, 420]) * step

    def delta(epsilon: float) -> float:
        return compute_delta(DPSGD(), plan, noise_multiplier=1.0, epsilon=epsilon).delta

    deltas = np.array([delta(e) for e in epsilons])

    def dominating(values: np.ndarray) -> Composition:
        profile = Profile(tuple(zip(epsilons.tolist(), values.tolist(), strict=True)))
        return Composition([(profile.losses(1.0, step, 1e-20)[0], 1)])

    whole = dominating(deltas)
    for epsilon in np.linspace(0, 5, 101):
        assert whole.delta(float(epsilon)) >= delta(float(epsilon)) * (1 - 1e-9)
    for epsilon, value in zip(epsilons, deltas, strict=True):
        assert whole.delta(float(epsilon) + 1e-12) == pytest.approx(value, rel=1e-6)
    # A point that lies too high, as draws may have it, changes nothing but itself.
    high = dominating(deltas * np.where(epsilons == 0.9, 1.5, 1.0))
    assert deltas[3] <= high.delta(0.9) < 1.5 * deltas[3]
    gammas = np.exp(epsilons)
    for i in range(1, len(epsilons) - 1):  # the hull is there the line between its neighbours
        spoilt = dominating(np.where(np.arange(len(deltas)) == i, 1.5 * deltas, deltas))
        part = (gammas[i] - gammas[i - 1]) / (gammas[i + 1] - gammas[i - 1])
        line = deltas[i - 1] + part * (deltas[i + 1] - deltas[i - 1])
        assert spoilt.delta(float(epsilons[i]) + 1e-12) == pytest.approx(min(line, 1.5 * deltas[i]), rel=1e-5)


def test_a_profile_between_points_of_a_coarser_grid_errs_upwards() -> None:
    """δ at ε holds at every larger ε: points are moved to the next multiple of the step."""
    plan = Participation(rounds=1)
    epsilons = [0.013 * i for i in range(200)]
    points = [(e, compute_delta(DPSGD(), plan, noise_multiplier=1.0, epsilon=e).delta) for e in epsilons]
    loss = Composition([(Profile(tuple(points)).losses(1.0, 0.05, 1e-20)[0], 1)])
    assert all(loss.delta(epsilon) >= delta * (1 - 1e-9) for epsilon, delta in points)
    for epsilon, delta in points:  # at −ε it is that of the other direction, which decides where other releases follow
        assert loss.delta(-epsilon) >= (1 - math.exp(-epsilon) + math.exp(-epsilon) * delta) * (1 - 1e-9)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"^delta"):
        compose([run_of()], delta=0)
    with pytest.raises(ValueError, match="without noise"):
        compose([run_of(sigma=0.0)], delta=1e-5)
    with pytest.raises(ValueError, match=r"^released .*12"):
        compose([run_of(released=13)], delta=1e-5)
