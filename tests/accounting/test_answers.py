"""Answers that took long are read from the disk, for the very same question and code only."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fedcgd import BSR, DPSGD, LambdaCGD, Mechanism, Participation
from fedcgd.accounting import accountant, answers, gaussian


@pytest.fixture(autouse=True)
def _all_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "LONG", 0.0)
    monkeypatch.setenv("FEDCGD_CACHE", str(tmp_path))


def sigma(mechanism: Mechanism, participation: Participation, epsilon: float = 2.0, **options: Any) -> float:
    run = accountant(mechanism, participation, **options)
    return run.noise_multiplier(epsilon=epsilon, delta=1e-5).noise_multiplier


BINS = Participation(rounds=12, min_separation=4, sampling="balls-in-bins")
ASKED: list[Callable[[], object]] = [
    lambda: sigma(DPSGD(), replace(BINS, sampling="none")),
    lambda: sigma(LambdaCGD(0.5), replace(BINS, sampling="none")),
    lambda: sigma(LambdaCGD(0.6), replace(BINS, sampling="none")),
    lambda: sigma(DPSGD(), replace(BINS, sampling="none"), epsilon=3.0),
    lambda: sigma(DPSGD(), replace(BINS, sampling="none", rounds=16)),
    lambda: sigma(BSR(2), BINS, method="monte-carlo"),
    lambda: sigma(BSR(2), BINS, method="deterministic"),
    lambda: accountant(BSR(2), BINS).epsilon(noise_multiplier=2.0, delta=1e-5),
    lambda: accountant(BSR(2), BINS).epsilon(noise_multiplier=2.0, delta=1e-5, released=8),
    lambda: accountant(BSR(2), BINS).delta(noise_multiplier=2.0, epsilon=1e-5),
]


def test_every_other_question_is_another_file_and_each_is_answered_as_before(tmp_path: Path) -> None:
    """One file more, or two: an ε that is found near a round number asks for the σ of that budget too."""
    first, kept = [], [0]
    for ask in ASKED:
        first.append(ask())
        kept.append(len(list(tmp_path.glob("answer-*.json"))))
        assert kept[-2] < kept[-1] <= kept[-2] + 2
    assert [ask() for ask in ASKED] == first
    assert len(list(tmp_path.glob("answer-*.json"))) == kept[-1]


def test_what_is_kept_is_not_found_again_but_by_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(BINS, sampling="none")
    found = sigma(DPSGD(), run)
    monkeypatch.setattr(gaussian, "sigma", lambda **_: 100.0)
    assert sigma(DPSGD(), run) == found
    monkeypatch.setattr(answers, "_code", lambda: "another version")
    assert sigma(DPSGD(), run) != found


def test_machine_code_is_part_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "__file__", str(tmp_path / "accounting" / "answers.py"))
    source = tmp_path / "accounting" / "recursion.c"
    source.parent.mkdir()
    found = []
    for text in ("one version", "another"):
        source.write_text(text)
        found.append(answers._code.__wrapped__())
    assert found[0] != found[1]


def test_short_answers_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "LONG", 60.0)
    sigma(DPSGD(), replace(BINS, sampling="none"))
    assert not list(tmp_path.iterdir())


def test_a_mechanism_of_ones_own_is_answered_and_not_kept(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Own(LambdaCGD):
        name = "own"

    assert sigma(Own(0.5), replace(BINS, sampling="none")) == sigma(LambdaCGD(0.5), replace(BINS, sampling="none"))
    assert len(list(tmp_path.iterdir())) == 1
