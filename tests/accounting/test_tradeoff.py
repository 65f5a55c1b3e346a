"""Trade-off curves against tests that are carried out, closed forms and each other."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from fedcgd import DPSGD, LambdaCGD, Participation, compute_delta
from fedcgd.accounting.tradeoff import TradeOff, gaussian_trade_off, profile_trade_off, trade_off
from fedcgd.accounting.tradeoff_plot import plot_trade_off

ALPHAS = np.linspace(0, 1, 201)


def gaussian_profile(mu: float, epsilons: np.ndarray) -> list[tuple[float, float]]:
    """δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) (Balle and Wang, 2018)."""
    return [(e, norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu)) for e in epsilons]


@pytest.mark.parametrize("mu", [0.0, 0.3, 1.0, 4.0])
def test_gaussian_curve_is_the_error_of_the_threshold_test(mu: float) -> None:
    thresholds = np.linspace(-6, 8, 50)
    np.testing.assert_allclose(gaussian_trade_off(mu, norm.sf(thresholds)), norm.cdf(thresholds - mu), atol=1e-9)


def test_gaussian_curve_has_the_values_of_the_literature() -> None:
    """f(α) = Φ(Φ⁻¹(1 − α) − μ): at α = 0.05 and μ = 1, a one-sided 5 % z-test has power 0.2595."""
    assert gaussian_trade_off(1.0, 0.05) == pytest.approx(1 - 0.2595, abs=5e-5)
    assert gaussian_trade_off(1.0, [0.0, 1.0]).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_the_bound_from_a_profile_is_below_the_curve_and_close_for_many_pairs(mu: float) -> None:
    exact = gaussian_trade_off(mu, ALPHAS)
    coarse = profile_trade_off(gaussian_profile(mu, np.array([0.0, 1.0])), ALPHAS)
    fine = profile_trade_off(gaussian_profile(mu, np.append(np.linspace(0, 12 * mu, 400), 1.0)), ALPHAS)
    assert (coarse <= exact + 1e-12).all()
    assert (fine <= exact + 1e-12).all()
    assert (fine >= coarse - 1e-12).all()
    assert np.abs(fine - exact).max() < 1e-3


def test_one_pair_gives_the_two_lines_of_epsilon_delta_dp() -> None:
    """(ln 2, 0.1)-DP: β ≥ max(0, 0.9 − 2α, (0.9 − α)/2) (Wasserman and Zhou, 2010)."""
    betas = profile_trade_off([(math.log(2), 0.1)], [0.0, 0.2, 0.3, 0.6, 0.9, 1.0])
    np.testing.assert_allclose(betas, [0.9, 0.5, 0.3, 0.15, 0.0, 0.0], atol=1e-12)


def test_a_huge_epsilon_promises_only_what_delta_does() -> None:
    assert profile_trade_off([(1e6, 0.25)], [0.0, 0.5]).tolist() == [0.75, 0.0]


@pytest.mark.parametrize("curve", [lambda a: gaussian_trade_off(1.0, a), lambda a: profile_trade_off([(1.0, 0.01)], a)])
def test_a_trade_off_function_is_convex_non_increasing_and_at_most_one_minus_alpha(curve) -> None:
    betas = curve(ALPHAS)
    assert (np.diff(betas, 2) >= -1e-12).all()
    assert (np.diff(betas) <= 1e-12).all()
    assert (betas <= 1 - ALPHAS + 1e-12).all()


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^mu .*-1"):
        gaussian_trade_off(-1, 0.5)
    with pytest.raises(ValueError, match=r"alpha .*1.5"):
        gaussian_trade_off(1, [0.5, 1.5])
    with pytest.raises(ValueError, match="got nan"):
        profile_trade_off([(1, 0.1)], float("nan"))
    with pytest.raises(ValueError, match=r"\(-1, 0.1\)"):
        profile_trade_off([(-1, 0.1)], 0.5)


def test_the_curve_of_a_run_without_sampling() -> None:
    """C = I, two participations, σ = 2: μ = √2/2."""
    curve = trade_off(DPSGD(), Participation(rounds=4, min_separation=2), noise_multiplier=2.0)
    np.testing.assert_allclose(curve.alphas, ALPHAS)
    np.testing.assert_allclose(curve.betas, norm.cdf(norm.isf(ALPHAS) - math.sqrt(0.5)), atol=1e-9)
    assert curve.exact
    assert curve.failure_probability == 0


def test_the_curve_of_a_poisson_run_lies_between_known_participation_and_perfect_privacy(monkeypatch) -> None:
    monkeypatch.setattr("fedcgd.accounting.tradeoff._PAIRS", 5)
    participation = Participation(rounds=4, sampling="poisson", sampling_rate=0.1)
    curve = trade_off(DPSGD(), participation, noise_multiplier=2.0)
    betas = np.array(curve.betas)
    assert not curve.exact
    assert (betas <= 1 - ALPHAS + 1e-12).all()
    known = gaussian_trade_off(1.0, ALPHAS)  # √4 / 2
    assert (betas >= known - 1e-6).all()
    assert betas[40] > known[40] + 0.1


def test_the_curve_of_a_balls_in_bins_run_lies_between_known_bins_and_a_real_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C = I, four bins, one participation, σ = 1: the likelihood ratio test, carried out on draws, can do no better."""
    monkeypatch.setattr("fedcgd.accounting.tradeoff._PAIRS", 6)
    participation = Participation(rounds=4, min_separation=4, sampling="balls-in-bins")
    curve = trade_off(DPSGD(), participation, noise_multiplier=1.0)
    betas = np.array(curve.betas)
    assert not curve.exact
    assert curve.failure_probability == 0
    drawn = trade_off(LambdaCGD(0.1), participation, noise_multiplier=1.0)
    assert drawn.failure_probability == pytest.approx(6e-12, rel=1e-9, abs=0)  # each of six pairs may be wrong
    assert betas[20] > gaussian_trade_off(1.0, ALPHAS)[20] + 0.1  # an adversary who knows the bin does better
    generator = np.random.default_rng(0)
    absent, present = generator.standard_normal((2, 200_000, 4))
    present[:, 0] += 1  # by symmetry the bin does not matter
    ratio_absent, ratio_present = np.exp(absent).mean(axis=1), np.exp(present).mean(axis=1)
    thresholds = np.quantile(ratio_absent, 1 - ALPHAS[1:-1])
    missed = np.searchsorted(np.sort(ratio_present), thresholds) / len(present)
    assert (betas[1:-1] <= missed + 4e-3).all()
    assert np.abs(betas[1:-1] - missed).max() < 0.1


def test_a_curve_adds_up_the_risks_of_its_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def risky(mechanism, participation, **options):
        return dataclasses.replace(
            compute_delta(mechanism, Participation(rounds=4), **options), failure_probability=1e-6
        )

    monkeypatch.setattr("fedcgd.accounting.tradeoff.compute_delta", risky)
    monkeypatch.setattr("fedcgd.accounting.tradeoff._PAIRS", 3)
    participation = Participation(rounds=4, sampling="poisson", sampling_rate=0.1)
    assert trade_off(DPSGD(), participation, noise_multiplier=2.0).failure_probability == pytest.approx(3e-6)


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    curve = TradeOff(tuple(ALPHAS), tuple(gaussian_trade_off(1.0, ALPHAS)), True, "exact")
    plot_trade_off(tmp_path / "f.png", {"σ = 1": curve})
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG\r\n")
