"""A stated (ε, δ) includes what draws may mislead, also where δ is tiny, and nobody chooses the seed."""

import pytest

from fedcgd import LambdaCGD, Participation, calibrate
from fedcgd.accounting.balls_in_bins.gram import bin_gram
from fedcgd.accounting.balls_in_bins.law import BinLaw, Bins
from fedcgd.accounting.explain import explain
from fedcgd.accounting.random_participation import monte_carlo

BINS = Participation(rounds=4, min_separation=2, sampling="balls-in-bins")


@pytest.mark.parametrize("delta", [1e-5, 1e-14])
def test_the_risk_of_the_draws_is_a_small_part_of_delta(delta: float) -> None:
    """It was 1e-6, at δ = 1e-14 too."""
    found = calibrate(LambdaCGD(0.5), BINS, epsilon=1.0, delta=delta)
    assert 0 < found.proof.failure_probability <= min(1e-12, delta / 100)
    assert "δ includes" in str(found)


def test_what_is_confirmed_is_less_than_delta_by_the_risk(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a risk of half of δ, σ is that of half of δ, or more."""
    half = calibrate(LambdaCGD(0.5), BINS, epsilon=1.0, delta=0.5e-5).noise_multiplier
    monkeypatch.setattr(monte_carlo, "failure_probability", lambda delta: delta / 2)
    assert calibrate(LambdaCGD(0.5), BINS, epsilon=1.0, delta=1e-5).noise_multiplier == pytest.approx(half, rel=5e-3)
    monkeypatch.undo()
    assert calibrate(LambdaCGD(0.5), BINS, epsilon=1.0, delta=1e-5).noise_multiplier < half * 0.98


def test_the_explanation_states_it() -> None:
    steps = explain(LambdaCGD(0.5), BINS, clip_norm=1.0, delta=1e-10, epsilon=1.0)
    statement = next(step.statement for step in steps if step.title == "confidence")
    assert "most 1e-12" in statement


def test_the_seed_follows_from_the_question_and_not_from_the_processor() -> None:
    """What else it depends on: accounting/test_b_min_sep.py."""
    gram = bin_gram(LambdaCGD(0.5), BINS)
    here, elsewhere = (monte_carlo.Problem(Bins(each), BinLaw(4)) for each in (gram, gram * (1 + 1e-14)))
    assert here.seed("sigma", 1.0, 1e-5) == elsewhere.seed("sigma", 1, 1e-5) != here.seed("sigma", 1.0, 1e-6)
