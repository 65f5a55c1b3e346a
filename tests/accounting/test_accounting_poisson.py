"""Poisson sampling against other accountants, and what it refuses."""

import math
import warnings

import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

from fedcgd import BSR, DPSGD, BandedToeplitz, Normalized, Participation
from fedcgd.accounting import accountant, calibrate, compute_delta, compute_epsilon, gaussian
from fedcgd.accounting.coverage import column_norm
from fedcgd.accounting.guarantee import WITHOUT_AMPLIFICATION
from fedcgd.accounting.losses import Composition
from fedcgd.accounting.sampled import Coin, Sampled


def poisson(rounds: int, rate: float) -> Participation:
    return Participation(rounds=rounds, sampling="poisson", sampling_rate=rate)


def poisson_delta(epsilon: float, sigma: float, participation: Participation) -> float:
    return compute_delta(DPSGD(), participation, noise_multiplier=sigma, epsilon=epsilon).delta


def poisson_epsilon(delta: float, sigma: float, participation: Participation) -> float:
    return compute_epsilon(DPSGD(), participation, noise_multiplier=sigma, delta=delta).epsilon


@pytest.mark.parametrize(
    ("sigma", "rate", "step"), [(0.5, 0.01, 1e-3), (1.0, 0.3, 1e-3), (5.0, 0.9, 1e-4), (2.0, 1.0, 1e-3)]
)
def test_the_grid_of_one_round_is_that_of_dp_accounting(sigma: float, rate: float, step: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # theirs: logs of zero probabilities
        theirs = from_gaussian_mechanism(sigma, value_discretization_interval=step, sampling_prob=rate)
    for epsilon in (0.0, 0.1, 1.0, 4.0):
        ours = max(Composition([(loss, 1)]).delta(epsilon) for loss in Coin(rate).losses(sigma, step, 1e-20))
        assert ours == pytest.approx(theirs.get_delta_for_epsilon(epsilon), rel=1e-6, abs=1e-14)


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("rate", [0.01, 0.5])
@pytest.mark.parametrize("budget", [(8.0, 1e-5), (1.0, 1e-6)])
def test_few_rounds_take_few_steps(monkeypatch: pytest.MonkeyPatch, rounds: int, rate: float, budget) -> None:
    """A search that walked in steps of 0.5 % took 300 of them, and up to 90 s."""
    tried = []
    delta = Sampled.delta
    monkeypatch.setattr(Sampled, "delta", lambda *given: tried.append(given[1]) or delta(*given))
    law = Sampled(((Coin(rate), rounds),), "")
    sigma = law.noise_multiplier(*budget, gaussian.sigma(epsilon=budget[0], delta=budget[1]) * math.sqrt(rounds))
    assert 3 <= len(tried) <= 40
    assert delta(law, sigma, budget[0]) <= budget[1]
    assert delta(law, sigma * (1 - 1e-4), budget[0]) > budget[1]


@pytest.mark.parametrize("sigma", [8.0, 0.3])
def test_everybody_always_is_the_gaussian_mechanism(sigma: float) -> None:
    found = poisson_epsilon(1e-5, sigma, poisson(16, 1.0))
    assert found == pytest.approx(gaussian.epsilon(sigma=sigma / 4.0, delta=1e-5), rel=2e-3)
    assert found >= gaussian.epsilon(sigma=sigma / 4.0, delta=1e-5) * (1 - 1e-9)


def test_bands_in_turns_is_dp_sgd_with_fewer_rounds_at_a_higher_rate() -> None:
    """arXiv:2405.15913, Proposition 2.1: σ(BandMF; q, n) = σ(DP-SGD; p·q, n/p) for unit columns."""
    cyclic = Participation(rounds=120, min_separation=4, sampling="cyclic-poisson", sampling_rate=0.2)
    unit = calibrate(Normalized(BSR(4)), cyclic, epsilon=2, delta=1e-5)
    plain = calibrate(DPSGD(), poisson(30, 0.2), epsilon=2, delta=1e-5)
    assert unit.noise_multiplier == pytest.approx(plain.noise_multiplier, rel=1e-4)
    long = calibrate(BSR(4), cyclic, epsilon=2, delta=1e-5)
    norm = math.sqrt(1 + 1 / 4 + 9 / 64 + 25 / 256)  # of BSR's coefficients 1, 1/2, 3/8, 5/16
    assert column_norm(BSR(4), cyclic) == pytest.approx(norm)
    assert long.noise_multiplier == pytest.approx(plain.noise_multiplier * norm, rel=1e-4)


def test_known_rounds_cost_what_a_gaussian_mechanism_does() -> None:
    """A user in every turn: releases that share nothing, each of the column norm √(1 + ¼) over σ, so that squares add up."""
    turns = Participation(rounds=30, min_separation=3, sampling="cyclic-poisson", sampling_rate=0.1)
    mechanism = BandedToeplitz((1.0, 0.5))
    for released, eligible in ((30, 10), (7, 3), (1, 1)):
        loss = accountant(mechanism, turns).gaussian_mu(4.0, released).value
        assert loss == pytest.approx(math.sqrt(eligible * 1.25) / 4.0, rel=1e-12)


@pytest.mark.parametrize(
    "participation",
    [
        poisson(100, 0.1),
        Participation(rounds=100, min_separation=50),
        Participation(rounds=100, min_separation=50, sampling="balls-in-bins"),
    ],
)
def test_nothing_released_costs_nothing_and_no_run_has_more_rounds(participation) -> None:
    assert compute_epsilon(DPSGD(), participation, noise_multiplier=2.0, delta=1e-5, released=0).epsilon == 0
    assert compute_delta(DPSGD(), participation, noise_multiplier=2.0, epsilon=1.0, released=0).delta == 0
    for released in (-1, 101):
        with pytest.raises(ValueError, match=r"^released .*100"):
            compute_epsilon(DPSGD(), participation, noise_multiplier=2.0, delta=1e-5, released=released)
        with pytest.raises(ValueError, match=r"^released .*100"):
            compute_delta(DPSGD(), participation, noise_multiplier=2.0, epsilon=1.0, released=released)
    with pytest.raises(ValueError, match=r"^epsilon"):
        compute_delta(DPSGD(), participation, noise_multiplier=2.0, epsilon=-1.0)


def test_huge_and_tiny_budgets_take_no_longer_than_others() -> None:
    """The discretisation follows the size of the privacy loss; the bound stays above what a few certain rounds lose."""
    sigma = calibrate(DPSGD(), poisson(10, 0.2), epsilon=1000.0, delta=1e-5).noise_multiplier
    assert 0.02 < sigma <= gaussian.sigma(epsilon=1000.0, delta=1e-5) * math.sqrt(10)
    # A round with hardly any noise tells who took part, at a small ε too; with plenty nothing does.
    assert compute_delta(DPSGD(), poisson(10, 0.2), noise_multiplier=0.001, epsilon=1.0).delta == pytest.approx(
        1 - 0.8**10
    )
    assert compute_delta(DPSGD(), poisson(10, 0.2), noise_multiplier=1e-6, epsilon=1.0).delta == 1
    assert compute_delta(DPSGD(), poisson(10, 0.2), noise_multiplier=1.0, epsilon=1e9).delta < 1e-14
    found = compute_epsilon(DPSGD(), poisson(10, 0.2), noise_multiplier=1e-4, delta=1e-5).epsilon
    assert found <= 1.001 * gaussian.epsilon(sigma=1e-4 / math.sqrt(10), delta=1e-5)
    nothing = calibrate(DPSGD(), poisson(10, 0.2), epsilon=1e8, delta=1e-5)
    assert nothing.proof.method == WITHOUT_AMPLIFICATION
    assert nothing.noise_multiplier == pytest.approx(gaussian.sigma(epsilon=1e8, delta=1e-5) * math.sqrt(10), rel=1e-5)
    found = compute_epsilon(DPSGD(), poisson(10, 0.2), noise_multiplier=0.001, delta=1e-5).epsilon
    # With probability 7.8e-5 > δ at least eight rounds are drawn, and each then loses about 1/(2σ²).
    assert 8 / (2 * 0.001**2) < found <= 1.001 * gaussian.epsilon(sigma=0.001 / math.sqrt(10), delta=1e-5)


@pytest.mark.parametrize(("rate", "rounds", "epsilon"), [(0.1, 200, 4.0), (0.1, 200, 6.0), (0.2, 100, 4.0)])
def test_a_plan_for_a_budget_says_that_budget(rate: float, rounds: int, epsilon: float) -> None:
    """The grid by which ε is found is coarser than the one by which σ was: without care 4.0001 is said, and printed as 4.01."""
    participation = Participation(rounds=rounds, sampling="poisson", sampling_rate=rate)
    run = accountant(DPSGD(), participation)
    sigma = run.noise_multiplier(epsilon=epsilon, delta=1e-5).noise_multiplier
    assert run.epsilon(noise_multiplier=sigma, delta=1e-5).epsilon == epsilon
    assert run.epsilon(noise_multiplier=sigma * (1 - 1e-4), delta=1e-5).epsilon > epsilon


def test_a_delta_that_publishing_would_keep_is_refused_and_costs_nothing() -> None:
    """A user takes part at all with probability 1 − (1 − q)^n: no ε is needed for a δ that large, and no σ is the least."""
    rare = Participation(rounds=100, sampling="poisson", sampling_rate=1e-9)
    with pytest.raises(ValueError, match="delta"):
        calibrate(DPSGD(), rare, epsilon=1, delta=1.01e-7)
    assert compute_epsilon(DPSGD(), rare, noise_multiplier=0.5, delta=1.01e-7).epsilon == 0
    assert compute_epsilon(DPSGD(), rare, noise_multiplier=0.5, delta=0.9e-7).epsilon > 0
    assert compute_delta(DPSGD(), rare, noise_multiplier=0.01, epsilon=0.0).delta >= 0.99e-7
