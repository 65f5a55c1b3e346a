"""The Gaussian mechanism: exact, on the safe side, and not broken by extreme numbers."""

import math

import oracles_accounting as oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcgd import DPSGD, LambdaCGD, Participation
from fedcgd.accounting import calibrate, compute_delta, compute_epsilon, gaussian
from fedcgd.accounting.guarantee import large_delta, rounded_up

DELTAS = (1e-300, 1e-100, 1e-10, 1e-5, 0.1, 0.5, 1 - 1e-9)


@pytest.mark.parametrize("sigma", [10.0**power for power in range(-8, 9, 2)])
@pytest.mark.parametrize("at", DELTAS)
def test_epsilon_is_the_smallest(sigma, at):
    found = gaussian.epsilon(sigma=sigma, delta=at)
    assert found == 0 or oracles.gaussian_log_delta(found * (1 - 1e-9), sigma) > math.log(at)
    assert oracles.gaussian_log_delta(found, sigma) <= math.log(at)


@pytest.mark.parametrize("budget", [1e-300, 1e-100, 1e-15, 1e-8, 1e-3, 0.1, 1.0, 8.0, 100.0, 1e8, 1e15])
@pytest.mark.parametrize("at", DELTAS)
def test_sigma_is_the_smallest(budget, at):
    found = gaussian.sigma(epsilon=budget, delta=at)
    assert oracles.gaussian_log_delta(budget, found) <= math.log(at)
    assert oracles.gaussian_log_delta(budget, found * (1 - 1e-9)) > math.log(at)
    assert gaussian.epsilon(sigma=found, delta=at) <= budget


@given(st.floats(-8, 8), st.floats(-3, 3))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_delta_is_the_textbook_formula(log_sigma, log_scale):
    sigma = 10**log_sigma
    budget = (0.5 / sigma**2) + 10**log_scale / sigma
    expected = oracles.gaussian_log_delta(budget, sigma)
    found = gaussian.delta(epsilon=budget, sigma=sigma)
    if expected < -700:
        assert found < 1e-300
        return
    # An error of one rounding in μ/2 − ε/μ, which is all that a double of ε can say.
    tolerance = 1e-11 + 1e-15 * max(1.0, 40 / sigma)
    assert math.log(found) == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("target", [-0.5, -1e-9, math.inf, math.nan])
def test_delta_is_asked_for_at_an_epsilon_from_0_on(target):
    with pytest.raises(ValueError, match=r"^epsilon"):
        gaussian.delta(epsilon=target, sigma=1.0)


def test_calibrate_epsilon_and_delta_are_inverse():
    plan = Participation(rounds=12, min_separation=4)
    sigma = calibrate(LambdaCGD(0.5), plan, epsilon=2, delta=1e-6).noise_multiplier
    back = compute_epsilon(LambdaCGD(0.5), plan, noise_multiplier=sigma, delta=1e-6).epsilon
    assert 2 * (1 - 1e-9) <= back <= 2 * (1 + 1e-9)
    assert compute_delta(LambdaCGD(0.5), plan, noise_multiplier=sigma, epsilon=back).delta == pytest.approx(
        1e-6, rel=1e-8
    )


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (1.2301, 3, "1.24"),
        (1.2399, 3, "1.24"),
        (1.24, 3, "1.24"),
        (9.991, 3, "10"),
        (1.0001e-5, 3, "1.01e-05"),
        (123456.2, 6, "123457"),
        (0.1 + 0.2, 3, "0.3"),  # above 0.3 by rounding alone
        (0.0, 3, "0"),
        (math.inf, 3, "∞"),
    ],
)
def test_what_is_printed_is_the_next_number_above(value, digits, text):
    assert rounded_up(value, digits) == text


def test_a_guarantee_reads_well():
    plan = Participation(rounds=1)
    found = compute_epsilon(DPSGD(), plan, noise_multiplier=1.2, delta=1e-5)
    assert oracles.gaussian_log_delta(found.epsilon, 1.2) == pytest.approx(math.log(1e-5), abs=1e-8)
    assert 3.54 < found.epsilon < 3.55  # people see it rounded up
    assert str(found) == "ε ≤ 3.55 at δ = 1e-05 (zero out one user; sampling: none; exact Gaussian mechanism)"


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        (calibrate, {"epsilon": 0.0, "delta": 1e-5}, "epsilon must be in"),
        (calibrate, {"epsilon": -1.0, "delta": 1e-5}, "got -1"),
        (calibrate, {"epsilon": math.nan, "delta": 1e-5}, "got nan"),
        (calibrate, {"epsilon": math.inf, "delta": 1e-5}, "got inf"),
        (calibrate, {"epsilon": 1e-301, "delta": 1e-5}, "1e-301"),
        (calibrate, {"epsilon": 1.0, "delta": 0.0}, "delta must be in"),
        (calibrate, {"epsilon": 1.0, "delta": 1.0}, "number of users"),
        (calibrate, {"epsilon": 1.0, "delta": 1e-301}, "1e-301"),
        (compute_epsilon, {"noise_multiplier": 0.0, "delta": 1e-5}, "without noise"),
        (compute_epsilon, {"noise_multiplier": math.inf, "delta": 1e-5}, "got inf"),
        (compute_delta, {"noise_multiplier": 1.0, "epsilon": -1.0}, "epsilon must be at least 0"),
    ],
)
def test_impossible_targets_are_refused(kind, values, says):
    for run in (Participation(rounds=4), Participation(rounds=4, sampling="poisson", sampling_rate=0.1)):
        with pytest.raises(ValueError, match=says):
            kind(DPSGD(), run, **values)


@pytest.mark.parametrize(
    ("mechanism", "participation"),
    [
        (0.9, Participation(rounds=4)),
        ("dp-sgd", Participation(rounds=4)),
        (LambdaCGD, Participation(rounds=4)),
        (DPSGD(), 4),
    ],
)
def test_what_is_no_mechanism_or_participation_is_refused(mechanism, participation):
    """Its number, its name, its class, which has all of a mechanism's methods; and how many rounds there are."""
    with pytest.raises(TypeError, match=r"such as (LambdaCGD\(0.9\)|Participation\(rounds)"):
        calibrate(mechanism, participation, epsilon=1.0, delta=1e-5)


def test_a_delta_that_allows_to_publish_somebodys_data_is_said():
    assert large_delta(1e-5, 1000) is None
    assert "0.5" in large_delta(1e-5, 50_000, exposed=0.4)
