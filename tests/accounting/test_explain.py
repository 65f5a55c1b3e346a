"""The explanation holds the numbers that the accounting uses, and the demands of each sampling."""

import dataclasses
from typing import get_args

import pytest

from fedcgd import DPSGD, LambdaCGD, Normalized, calibrate, compute_epsilon
from fedcgd.accounting import explain as explanations
from fedcgd.accounting.explain import explain
from fedcgd.participation import Participation, Sampling

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


def test_every_sampling_is_explained() -> None:
    samplings = set(get_args(Sampling))
    assert explanations._SAMPLING.keys() == samplings
    assert explanations._ADD_OR_REMOVE.keys() == samplings


def test_numbers_are_those_of_the_accounting() -> None:
    steps = by_title(LambdaCGD(0.5), EPOCHS, noise_multiplier=3.0)
    expected = compute_epsilon(LambdaCGD(0.5), EPOCHS, noise_multiplier=3.0, delta=1e-5)
    assert steps["guarantee"].value == expected.epsilon
    assert steps["noise"].value == 3.0
    assert "standard deviation 1, and ζσZ of 1.5," in steps["noise"].statement
    # Columns 0 and 4: (0.5^0 … 0.5^11) and the same four rows later.
    total = [0.5**i + (0.5 ** (i - 4) if i >= 4 else 0) for i in range(12)]
    assert steps["sensitivity"].value == pytest.approx(sum(x * x for x in total) ** 0.5)
    assert "Worst case: rounds 1 and 5 (exact; leftmost" in steps["sensitivity"].statement
    assert steps["participation"].value == 2
    assert steps["clipping"].value == 0.5


def test_a_budget_gives_the_calibrated_noise() -> None:
    steps = by_title(LambdaCGD(0.5), EPOCHS, epsilon=2.0)
    assert steps["noise"].value == calibrate(LambdaCGD(0.5), EPOCHS, epsilon=2.0, delta=1e-5).noise_multiplier
    assert steps["guarantee"].value == pytest.approx(2.0, rel=1e-6)


def test_the_risk_of_a_random_method_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def risky(mechanism, participation, **budget):
        return dataclasses.replace(
            compute_epsilon(mechanism, participation, **budget), failure_probability=1e-3, exact=False
        )

    assert by_title(DPSGD(), EPOCHS, noise_multiplier=3.0)["confidence"].value == 1.0
    monkeypatch.setattr("fedcgd.accounting.explain.compute_epsilon", risky)
    steps = by_title(DPSGD(), EPOCHS, noise_multiplier=3.0)
    assert steps["confidence"].value == 0.999
    assert "at most 0.001 over their seed; this is part of δ = 1e-05" in steps["confidence"].statement
    assert "an upper bound: the truth may be better" in steps["method"].statement


def test_long_patterns_are_shortened() -> None:
    steps = by_title(DPSGD(), Participation(rounds=50), noise_multiplier=9.0)
    assert "Worst case: rounds 1, 2, 3, 4, … and 50 (exact" in steps["sensitivity"].statement


def test_the_mechanism_is_named_with_its_numbers() -> None:
    assert "lambda-cgd (lam = 0.5): " in by_title(LambdaCGD(0.5), EPOCHS, noise_multiplier=3.0)["mechanism"].statement
    assert "up to 2 of the noise" in by_title(LambdaCGD(0.5), EPOCHS, noise_multiplier=3.0)["mechanism"].statement
    normalized = by_title(Normalized(LambdaCGD(0.5)), EPOCHS, noise_multiplier=3.0)["mechanism"].statement
    assert "lambda-cgd (lam = 0.5) with columns of norm 1: " in normalized
    assert by_title(DPSGD(), EPOCHS, noise_multiplier=3.0)["mechanism"].statement.startswith("dp-sgd: ")


@pytest.mark.parametrize(
    ("participation", "words"),
    [
        (EPOCHS, ["may know, and even choose"]),
        (
            Participation(rounds=4, min_separation=2, sampling="balls-in-bins"),
            ["keep the bins secret", "not replace users who are absent", "bins are reused"],
        ),
        (
            Participation(rounds=4, sampling="poisson", sampling_rate=0.25),
            ["its own coin", "not fill up", "not replace absent"],
        ),
        (
            Participation(rounds=4, min_separation=2, sampling="cyclic-poisson", sampling_rate=0.25),
            ["groups", "its own coin", "not move users between groups"],
        ),
    ],
)
def test_each_sampling_says_what_it_demands(participation: Participation, words: list[str]) -> None:
    steps = by_title(DPSGD(), participation, noise_multiplier=3.0)
    for word in words:
        assert word in steps["sampling"].statement
    if participation.sampling_rate:
        assert "q = 0.25" in steps["participation"].statement
        assert steps["sensitivity"].value == 1.0
        assert "One participation moves CX by at most 1·ζ" in steps["sensitivity"].statement


def test_what_epsilon_leaves_out_is_said() -> None:
    statement = by_title(DPSGD(), EPOCHS, noise_multiplier=3.0)["not covered"].statement
    for word in ("Metrics", "timing", "clips falsely"):
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


def test_adjacency_is_what_is_proven_and_says_what_follows_for_a_user_who_is_not_there() -> None:
    """Without a sampling somebody else is asked in a missing user's place, so nothing is said of adding or removing one."""
    none = explain(LambdaCGD(0.5), Participation(rounds=20, min_separation=5), clip_norm=1.0, delta=1e-5, epsilon=2.0)[
        0
    ]
    poisson = explain(
        DPSGD(), Participation(rounds=20, sampling="poisson", sampling_rate=0.1), clip_norm=1.0, delta=1e-5, epsilon=2.0
    )[0]
    assert none.statement.startswith("Zero out one user: two runs are compared that differ in one user's updates alone")
    assert "A user who is not there at all is another matter" in none.statement
    assert "Adding or removing the user altogether has the same ε" in poisson.statement
    assert "same ε" not in none.statement
