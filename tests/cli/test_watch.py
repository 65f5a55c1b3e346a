"""`fedcgd watch`: what it shows of a run follows from the ledger, names nobody, and ends with the run."""

import json
import math
import re
from pathlib import Path

import command_line
import pytest
from ledgers import KEY, release
from plans import make_plan

from fedcgd import LambdaCGD, Ledger, NoiseKey, Participation, Plan
from fedcgd.cli import watch

ROUNDS = 4
TWO = make_plan(LambdaCGD(0.5), Participation(rounds=2), noise_multiplier=3.0)


def release_next(ledger: Ledger, users: list[str]) -> None:
    release(ledger, ledger.resume().round, users, metrics={"epsilon": 1.25, "share": 0.5})


@pytest.fixture(params=["none", "balls-in-bins"])
def begun(request: pytest.FixtureRequest, tmp_path: Path) -> Ledger:
    """A run with a release of two users, one of whom has a name that no page may show."""
    key = NoiseKey.from_file(tmp_path / "noise.key", create=True)
    participation = Participation(rounds=ROUNDS, min_separation=2, sampling=request.param)
    plan = make_plan(LambdaCGD(0.5), participation, noise_multiplier=3.0)
    ledger = Ledger.open(tmp_path / "run.db", plan=plan, configuration={"cohort_size": 2}, key=key)
    release_next(ledger, ["anna-secretname", "bert"])
    return ledger


def test_it_shows_how_far_the_run_is_and_names_nobody(begun: Ledger, tmp_path: Path) -> None:
    shown = command_line.run("watch", tmp_path / "run.db", "--once", "--html", tmp_path / "progress.html")
    assert shown.exit_code == 0
    page = (tmp_path / "progress.html").read_text()
    found = json.loads(command_line.run("watch", tmp_path / "run.db", "--json").stdout)
    plan = Plan.from_description(watch.records(tmp_path / "run.db")["run"]["plan"])
    hidden = plan.participation.sampling != "none"
    assert (found["rounds_released"], found["rounds_planned"], found["over"]) == (1, ROUNDS, False)
    assert found["whole_run"]["epsilon"] == plan.guarantee().epsilon
    assert found["so_far"]["epsilon"] >= plan.guarantee(released=1).epsilon * (1 - 1e-9)
    assert [("users" in row) for row in found["attempts"]] == [not hidden]
    spent = plan.quick_guarantee(released=1).epsilon  # whatever the record says
    assert found["released_with"] == [{"release": 1, "epsilon": spent, "share": 0.5}]
    for text in (shown.output, page, json.dumps(found)):
        assert "secretname" not in text
        for needed in (plan.participation.sampling, "zero out one user", "1e-05"):
            assert needed in text
    assert '<meta http-equiv="refresh" content="2">' in page
    assert "<script" not in page


def test_it_ends_with_the_run(begun: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = iter(["carl", "dora", "emil"])
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: release_next(begun, [next(asleep)]))
    done = command_line.run("watch", tmp_path / "run.db", "--html", tmp_path / "progress.html")
    assert done.exit_code == 0
    assert next(asleep, None) is None
    found = watch.state(tmp_path / "run.db")["released_with"]
    plan = Plan.from_description(watch.records(tmp_path / "run.db")["run"]["plan"])
    spent = [plan.quick_guarantee(released=number).epsilon for number in range(1, ROUNDS + 1)]
    assert [(row["release"], row["epsilon"]) for row in found] == list(enumerate(spent, 1))
    assert spent[0] < spent[-1]
    page = (tmp_path / "progress.html").read_text()
    assert re.search(f"{ROUNDS} of {ROUNDS}", page)
    assert "http-equiv" not in page


def test_the_time_left_is_the_median_distance_times_the_rounds_left() -> None:
    times = [f"2026-01-01T00:00:{second:02}+00:00" for second in (0, 2, 4, 14)]
    assert watch._seconds_left(times, 5) == 10
    assert watch._seconds_left(times[:1], 5) is None


def test_a_run_that_is_not_private_says_so(tmp_path: Path) -> None:
    Ledger.open(tmp_path / "run.db", plan=TWO, configuration={}, key=NoiseKey.simulation(1)).close()
    assert "SIMULATION" in command_line.run("watch", tmp_path / "run.db", "--once").output


def test_people_count_rounds_and_tries_from_one(begun: Ledger, tmp_path: Path) -> None:
    found = watch.state(tmp_path / "run.db")
    title, columns, rows = watch._tables(found)[0]
    assert (title, columns[:2], rows[0][:2]) == ("latest rounds, from 1", ["round", "attempt"], ["1", "1"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", rows[0][columns.index("ended")])
    assert (found["attempts"][0]["round"], found["attempts"][0]["attempt"]) == (0, 0)


def test_without_a_ledger_nothing_is_made(tmp_path: Path) -> None:
    failed = command_line.run("watch", tmp_path / "run.db", "--once", "--html", tmp_path / "progress.html")
    assert failed.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_an_epsilon_of_a_release_is_rounded_up_and_texts_are_for_no_reader(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "run.db", plan=TWO, configuration={"kind": "central"}, key=KEY) as ledger:
        release(ledger, 0, ["0", "1"], metrics={"sum": "0f1e2d"})
    shown = command_line.run("watch", tmp_path / "run.db", "--once").output
    epsilon = TWO.guarantee(released=1).epsilon
    assert f"{math.ceil(epsilon * 1000) / 1000:.3f}" in shown
    assert "0f1e2d" not in shown
    assert "zero out one example" in shown
    assert "users" not in shown
