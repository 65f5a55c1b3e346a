"""The explanation holds the numbers that the accounting uses, and the demands of each sampling."""

from dataclasses import replace

import pytest
from sampling_table import SAMPLINGS

from fedcgd import DPSGD, LambdaCGD, calibrate, compute_epsilon
from fedcgd.accounting.explain import explain
from fedcgd.participation import Participation

EPOCHS = Participation(rounds=12, min_separation=4, max_participations=2)
TITLES = [
    "adjacency", "unit of privacy", "clipping", "participation", "sampling", "mechanism", "sensitivity", "noise", "method",
    "confidence", "guarantee", "not covered",
]  # fmt: skip


def by_title(mechanism, participation, **options):
    steps = explain(mechanism, participation, **{"clip_norm": 0.5, "delta": 1e-5, **options})
    assert [step.title for step in steps] == TITLES
    assert all(step.statement.endswith((".", "ε.")) for step in steps)
    return {step.title: step for step in steps}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_sampling_is_explained_by_what_it_says_of_itself(name: str, few_draws_everywhere: None) -> None:
    participation, _ = SAMPLINGS[name]
    steps = by_title(DPSGD(), participation, noise_multiplier=3.0, delta=1e-2)
    assert steps["sampling"].statement == participation.scheme.assumption
    assert participation.scheme.absence in steps["adjacency"].statement
    assert str(participation) in steps["participation"].statement
    assert steps["participation"].value == (participation.sampling_rate or participation.participations)
    assert steps["mechanism"].statement.startswith("dp-sgd: ")
    assert ("profits from" in steps["sensitivity"].statement) == (name in ("balls-in-bins", "b-min-sep"))


def test_long_patterns_are_shortened() -> None:
    steps = by_title(DPSGD(), Participation(rounds=50), noise_multiplier=9.0)
    assert "rounds 1, 2, 3, 4, … and 50 (exact" in steps["sensitivity"].statement


def test_numbers_are_those_of_the_accounting() -> None:
    steps = by_title(LambdaCGD(0.5), EPOCHS, noise_multiplier=3.0)
    expected = compute_epsilon(LambdaCGD(0.5), EPOCHS, noise_multiplier=3.0, delta=1e-5)
    assert steps["guarantee"].value == expected.epsilon
    assert "of 1.5," in steps["noise"].statement
    # Columns 0 and 4: (0.5^0 … 0.5^11) and the same four rows later.
    total = [0.5**i + (0.5 ** (i - 4) if i >= 4 else 0) for i in range(12)]
    assert steps["sensitivity"].value == pytest.approx(sum(x * x for x in total) ** 0.5)
    assert "5 (exact;" in steps["sensitivity"].statement
    assert steps["clipping"].value == 0.5


def test_a_budget_gives_the_calibrated_noise() -> None:
    steps = by_title(LambdaCGD(0.5), EPOCHS, epsilon=2.0)
    assert steps["noise"].value == calibrate(LambdaCGD(0.5), EPOCHS, epsilon=2.0, delta=1e-5).noise_multiplier
    assert steps["guarantee"].value == pytest.approx(2.0, rel=1e-6)


def test_the_risk_of_a_random_method_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def risky(mechanism, participation, **budget):
        found = compute_epsilon(mechanism, participation, **budget)
        return replace(found, proof=replace(found.proof, failure_probability=1e-3, exact=False))

    assert by_title(DPSGD(), EPOCHS, noise_multiplier=3.0)["confidence"].value == 1.0
    monkeypatch.setattr("fedcgd.accounting.explain.compute_epsilon", risky)
    steps = by_title(DPSGD(), EPOCHS, noise_multiplier=3.0)
    assert steps["confidence"].value == 0.999
    assert "most 0.001" in steps["confidence"].statement
    assert "upper bound:" in steps["method"].statement


def test_what_epsilon_leaves_out_is_said() -> None:
    statement = by_title(DPSGD(), EPOCHS, noise_multiplier=3.0)["not covered"].statement
    for word in ("Metrics", "timing", "clips wrongly"):
        assert word in statement


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "one of the two; got None and None"),
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, "one of the two; got 1.0 and 1.0"),
        ({"epsilon": 1.0, "clip_norm": 0.0}, "clip_norm must be positive and finite, got 0.0"),
    ],
)
def test_settings_that_contradict_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        by_title(DPSGD(), EPOCHS, **options)
