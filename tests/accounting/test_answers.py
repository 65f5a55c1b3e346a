"""Answers that took long are read from the disk, for the very same question and code only."""

import hashlib
import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fedcgd import BSR, DPSGD, LambdaCGD, Mechanism, Participation
from fedcgd.accounting import accountant, answers, gaussian


@pytest.fixture(autouse=True)
def _all_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "LONG", 0.0)
    monkeypatch.setenv("FEDCGD_CACHE", str(tmp_path))


def sigma(mechanism: Mechanism, participation: Participation, epsilon: float = 2.0) -> float:
    run = accountant(mechanism, participation)
    return run.noise_multiplier(epsilon=epsilon, delta=1e-5).noise_multiplier


BINS = Participation(rounds=12, min_separation=4, sampling="balls-in-bins")
ASKED: list[Callable[[], object]] = [
    lambda: sigma(DPSGD(), replace(BINS, sampling="none")),
    lambda: sigma(LambdaCGD(0.5), replace(BINS, sampling="none")),
    lambda: sigma(LambdaCGD(0.6), replace(BINS, sampling="none")),
    lambda: sigma(DPSGD(), replace(BINS, sampling="none"), epsilon=3.0),
    lambda: sigma(DPSGD(), replace(BINS, sampling="none", rounds=16)),
    lambda: sigma(BSR(2), BINS),
    lambda: accountant(BSR(2), BINS).epsilon(noise_multiplier=2.0, delta=1e-5),
    lambda: accountant(BSR(2), BINS).epsilon(noise_multiplier=2.0, delta=1e-5, released=8),
    lambda: accountant(BSR(2), BINS).delta(noise_multiplier=2.0, epsilon=1e-5),
]


def test_every_other_question_is_another_file_and_each_is_answered_as_before(tmp_path: Path) -> None:
    """One file more, or two: an ε that is found near a round number asks for the σ of that budget too."""
    first, kept = [], [0]
    for ask in ASKED:
        first.append(ask())
        kept.append(len(list(tmp_path.glob("kept/answer-*.json"))))
        assert kept[-2] < kept[-1] <= kept[-2] + 2
    assert [ask() for ask in ASKED] == first
    assert len(list(tmp_path.glob("kept/answer-*.json"))) == kept[-1]


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
    assert len(list(tmp_path.glob("kept/*"))) == 1


def forged(tmp_path: Path) -> tuple[Callable[[], float], float]:
    """An answer of ours that says a tenth of the noise is enough, with the right checksum; who asks, and what is true."""
    run = replace(BINS, sampling="none")
    true = sigma(BSR(2), run)
    [kept] = tmp_path.glob("kept/*.json")
    content = json.loads(kept.read_text())
    answer = json.loads(content["answer"])
    answer["value"] /= 10
    content["answer"] = json.dumps(answer)
    content["checksum"] = hashlib.sha256((content["question"] + content["answer"]).encode()).hexdigest()
    kept.write_text(json.dumps(content))
    return lambda: sigma(BSR(2), run), true


def test_an_answer_of_ones_own_counts_in_a_folder_that_nobody_else_may_enter(tmp_path: Path) -> None:
    ask, true = forged(tmp_path)
    assert ask() == true / 10  # of this user, whose word counts
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
    for mode in (0o701, 0o710, 0o755, 0o770, 0o777, 0o1777):
        (tmp_path / "kept").chmod(mode)
        assert ask() == true, oct(mode)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_an_answer_that_others_may_write_is_not_read(tmp_path: Path, mode: int) -> None:
    ask, true = forged(tmp_path)
    next(tmp_path.glob("kept/*.json")).chmod(mode)
    assert ask() == true


@pytest.mark.parametrize("what", ["another user's", "a link", "behind a link"])
def test_an_answer_of_another_user_or_behind_a_link_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    ask, true = forged(tmp_path)
    folder, [kept] = tmp_path / "kept", tmp_path.glob("kept/*.json")
    if what == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        moved = kept if what == "a link" else folder
        moved.symlink_to(moved.rename(tmp_path / "elsewhere"))
    assert ask() == true
