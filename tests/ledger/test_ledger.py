"""The ledger, step by step: what each step records, what it refuses, and what another process may do meanwhile."""

import json
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import make_plan
from sql import edit

from fedcgd import DPSGD, LambdaCGD, NoiseKey, Participation, Plan
from fedcgd.keepers.record import Record
from fedcgd.ledger import Ledger, attempts, export, participation_counter, seal, verify
from fedcgd.ledger.store import connect, pack_ids, reader, unpack_ids
from fedcgd.ledger.transactions import transaction
from fedcgd.participation.history import History

KEY = NoiseKey(bytes(range(32)))
PLAN = make_plan(LambdaCGD(0.5), Participation(rounds=6, min_separation=2, max_participations=2))
SETTINGS = {"task": "digits", "lr": 0.5}


def opened(path, *, plan=PLAN, configuration=SETTINGS, key=KEY) -> Ledger:
    return Ledger.open(path, plan=plan, configuration=configuration, key=key)


def release(ledger: Ledger, round: int, users: list[str], model: bytes = b"model", state: bytes = b"state") -> int:
    attempt = ledger.plan_round(round, users)
    nonce = KEY.nonce_of(ledger.stream_id, np.zeros(3), earlier=ledger.resume().nonces, attempt=attempt)
    ledger.record_aggregated(round, attempt, nonce)
    ledger.record_released(round, attempt, model, state)
    return nonce


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ledger"


def test_what_was_measured_is_there_when_the_run_goes_on(path):
    with opened(path) as ledger:
        ledger.record_metrics("evaluate", 2, {"accuracy": 0.5})
        ledger.record_metrics("evaluate", 1, {"accuracy": 0.25})
        ledger.record_metrics("train", 1, {"epsilon": 1.0})
        ledger.record_metrics("evaluate", 2, {"accuracy": 0.75})
        ledger.record_metrics("train", 2, {"kind": 3.0})  # a metric may be called anything
    with opened(path) as ledger:
        assert list(ledger.metrics("evaluate").items()) == [
            (1, {"accuracy": 0.25}),
            (2, {"accuracy": 0.75}),
        ]  # in order
        assert ledger.metrics("train") == {1: {"epsilon": 1.0}, 2: {"kind": 3.0}}
        assert ledger.metrics("other") == {}
    exported = export(path)
    assert exported["releases"] == [{"release": 1, "epsilon": 1.0}, {"release": 2, "kind": 3.0}]
    assert exported["measured"] == [
        {"kind": "evaluate", "release": release, "accuracy": accuracy} for release, accuracy in ((1, 0.25), (2, 0.75))
    ]


@pytest.mark.parametrize("where", ["file", "memory"])
def test_a_run_from_the_first_round_to_the_last(where, path):
    with opened(path if where == "file" else ":memory:") as ledger:
        start = ledger.resume()
        assert (start.round, start.nonces, start.model, start.state) == (0, (), None, None)
        nonces = []
        for t in range(6):
            nonces.append(release(ledger, t, [f"user-{t % 3}"], f"model {t}".encode(), f"state {t}".encode()))
            run = ledger.resume()
            assert run.round == t + 1
            assert run.nonces == tuple(nonces)
            assert run.model == f"model {t}".encode()
            assert run.state == f"state {t}".encode()
        with pytest.raises(ValueError, match="round must be in 0 … 5, got 6"):
            ledger.plan_round(6, ["user-9"])


def test_what_was_released_is_there_after_opening_again(path):
    with opened(path) as ledger:
        first = release(ledger, 0, ["a", "b"], b"\x00\x01", b"")
        stream_id = ledger.stream_id
    with opened(path) as ledger:
        run = ledger.resume()
        assert (run.round, run.nonces, run.model, run.state) == (1, (first,), b"\x00\x01", b"")
        assert ledger.stream_id == stream_id
        assert ledger.history(["a", "b", "c"]) == History({"a": 1, "b": 1}, {"a": 0, "b": 0})


def test_a_round_that_was_not_released_is_tried_under_a_new_attempt_and_counts_once(path):
    with opened(path) as ledger:
        first = ledger.plan_round(0, ["a", "b"])
        ledger.record_aggregated(0, first, 11)
    with opened(path) as ledger:
        assert ledger.resume().round == 0
        second = ledger.plan_round(0, ["b", "c"])
        assert second != first
        assert ledger.history(["a", "b", "c"]).counts == {"a": 1, "b": 1, "c": 1}
        with pytest.raises(ValueError, match=f"attempt {first} at round 0 is not aggregated"):
            ledger.record_released(0, first, b"")
        with pytest.raises(ValueError, match="has had noise of this nonce already"):
            ledger.record_aggregated(0, second, 11)
        ledger.record_aggregated(0, second, 2**128 - 1)
        ledger.record_released(0, second, b"")
        assert ledger.resume().nonces == (2**128 - 1,)
    states = [(attempt["attempt"], attempt["state"], attempt["users"]) for attempt in export(path)["attempts"]]
    assert states == [(first, "abandoned", 2), (second, "released", 2)]
    assert verify(path).problems == ()


def test_the_record_says_when_an_attempt_was_planned_summed_and_ended(path):
    def told() -> tuple[bool, ...]:
        (attempt,) = export(path)["attempts"]
        return tuple(attempt[moment] is not None for moment in ("planned", "aggregated", "ended"))

    with opened(path) as ledger:
        attempt = ledger.plan_round(0, ["a"])
        assert told() == (True, False, False)
        ledger.record_aggregated(0, attempt, 11)
        assert told() == (True, True, False)
        ledger.record_released(0, attempt, b"")
        assert told() == (True, True, True)


def test_a_round_that_keepers_were_asked_to_open_is_in_flight(path):
    with opened(path) as ledger:
        attempt = ledger.plan_round(0, ["a"])
        ledger.record_opening(0, attempt, bytes(32), ["notary"])
        with pytest.raises(ValueError, match="an attempt at round 0 is in flight"):
            ledger.plan_round(0, ["b"])
        ledger.record_released(0, attempt, b"")
    assert [one["state"] for one in export(path)["attempts"]] == ["released"]


def test_a_round_that_keepers_were_asked_to_open_is_spent_by_sealing(path):
    with opened(path) as ledger:
        attempt = ledger.plan_round(0, ["a"])
        ledger.record_opening(0, attempt, bytes(32), ["notary"])
    seal(path, None)
    assert [one["state"] for one in export(path)["attempts"]] == ["spent"]


def test_attempts_count_the_tries_of_a_round(path):
    with opened(path) as ledger:
        attempts = []
        for _ in range(3):
            attempts.append(ledger.plan_round(0, ["a"]))
            ledger.skip(0, "too few answers")
        assert attempts == [0, 1, 2]


def test_a_ledger_restored_from_an_old_copy_does_not_use_noise_again(path, tmp_path):
    with opened(path) as ledger:
        release(ledger, 0, ["a"])
    for name in (path.name, f"{path.name}-model-0"):
        shutil.copy(tmp_path / name, tmp_path / name.replace(path.name, "copy"))
    used = []
    for file in (path, tmp_path / "copy"):
        with opened(file) as ledger:
            used.append((ledger.stream_id, 1, release(ledger, 1, ["b"])))
    assert used[0] != used[1]


def test_two_runs_with_one_key_share_no_noise(path, tmp_path):
    streams = set()
    for name in ("one", "two"):
        with opened(tmp_path / name) as ledger:
            streams.add(KEY.noise_of(ledger.stream_id))
    assert len(streams) == 2


def test_a_simulation_says_so_for_ever_and_repeats(path):
    key = NoiseKey.simulation(3)
    with opened(path, key=key) as ledger:
        assert ledger.simulated
        assert key.noise_of(ledger.stream_id) == key.noise
    assert verify(path).simulated
    assert export(path)["run"]["simulated"] is True
    with pytest.raises(ValueError, match="another run: its key fingerprint"):
        opened(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"plan": Plan.from_description({**PLAN.to_description(), "noise_multiplier": 1.9})}, "its plan is"),
        ({"plan": Plan.from_description({**PLAN.to_description(), "clip_norm": 1.1})}, "its plan is"),
        ({"configuration": {**SETTINGS, "lr": 0.6}}, "its configuration is"),
        ({"key": NoiseKey(bytes(32))}, "its key fingerprint is"),
    ],
)
def test_another_run_is_refused_and_changes_nothing(path, changed, message):
    with opened(path) as ledger:
        attempt = ledger.plan_round(0, ["a"])
        with pytest.raises(ValueError, match=message):
            opened(path, **changed)
        ledger.record_aggregated(0, attempt, 5)
        ledger.record_released(0, attempt, b"")


def test_a_run_goes_on_under_the_same_definition_of_the_noise_only(path, monkeypatch):
    opened(path).close()
    monkeypatch.setattr("fedcgd.ledger.settings.STREAM", "another")
    with pytest.raises(ValueError, match="noise stream: chacha20 → another"):
        opened(path)


def test_a_configuration_that_json_cannot_hold_is_refused(path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        opened(path, configuration={"lr": float("nan")})


def test_the_process_that_opens_last_shuts_out_the_others(path):
    with opened(path) as old:
        attempt = old.plan_round(0, ["a"])
        old.record_aggregated(0, attempt, 5)
        with opened(path) as new:
            for step in (
                lambda: old.record_released(0, attempt, b"old"),
                lambda: old.plan_round(0, ["a"]),
                lambda: old.skip(0, "why not"),
                lambda: old.history(["a"]),
            ):
                with pytest.raises(ValueError, match=r"was opened again since"):
                    step()
            release(new, 0, ["a"], b"new")
            assert new.resume().model == b"new"


HOLDER = """
import sys
from fedcgd import DPSGD, Ledger, NoiseKey, Participation, Plan
plan = Plan(mechanism=DPSGD(), participation=Participation(rounds=2), clip_norm=1.0, noise_multiplier=2.0, delta=1e-5)
ledger = Ledger.open(sys.argv[1], plan=plan, configuration={}, key=NoiseKey.simulation(1))
attempt = ledger.plan_round(0, ["ada"])
print("open", flush=True)
sys.stdin.readline()
ledger.record_aggregated(0, attempt, 1)
ledger.record_released(0, attempt, b"model")
print("released", flush=True)
sys.stdin.readline()
"""


def test_a_second_start_is_refused_while_the_first_lives_and_goes_on_when_it_is_dead(path):
    """It took the run over: the first start died at its next round, long after the second one had been a mistake."""
    plan = Plan(
        mechanism=DPSGD(), participation=Participation(rounds=2), clip_norm=1.0, noise_multiplier=2.0, delta=1e-5
    )

    def start():
        return Ledger.open(path, plan=plan, configuration={}, key=NoiseKey.simulation(1))

    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "open\n"
        with pytest.raises(ValueError, match=rf"is open in another process, .*\(process {first.pid} on .*, since 20"):
            start()
        first.stdin.write("\n")
        first.stdin.flush()
        assert first.stdout.readline() == "released\n"  # its attempt was not abandoned
        first.kill()
    with start() as ledger:
        assert ledger.resume().round == 1
    assert not path.with_name("run.ledger-lock").exists()
    assert verify(path).problems == ()


def test_a_run_is_not_sealed_while_another_process_lives_that_it_goes_on_in(path, tmp_path):
    """`fedcgd ledger seal` of the wrong file: it ended the run, which could not go on, and deleted its key."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "open\n"
        with pytest.raises(
            ValueError, match=rf"\(process {first.pid} on .*End that process first: .* or can be sealed"
        ):
            seal(path, None)
        first.stdin.write("\n")
        first.stdin.flush()
        assert first.stdout.readline() == "released\n"
        first.kill()
    seal(path, None)
    assert verify(path).released == 1
    assert not path.with_name("run.ledger-lock").exists()


def test_a_second_start_that_is_refused_leaves_the_run_its_lock(path):
    """In one process, as in a notebook: the lock went with the refused start, and another process took the run over."""
    with opened(path) as ledger:
        with pytest.raises(ValueError, match="its configuration is not the same"):
            opened(path, configuration={"another": "run"})
        elsewhere = subprocess.run([sys.executable, "-c", HOLDER, str(path)], input="", capture_output=True, text=True)
        assert "is open in another process" in elsewhere.stderr
        release(ledger, 0, ["ada"])


def test_a_second_start_in_one_process_takes_the_lock_with_the_run(path):
    """The first one is shut out, and what it closes then is not the lock of the second."""
    with opened(path) as first, opened(path) as second:
        first.close()
        elsewhere = subprocess.run([sys.executable, "-c", HOLDER, str(path)], input="", capture_output=True, text=True)
        assert "is open in another process" in elsewhere.stderr
        release(second, 0, ["ada"])
    assert not path.with_name("run.ledger-lock").exists()


@pytest.mark.parametrize(
    ("earlier", "round", "users", "message"),
    [
        ([["a"], ["b"]], 1, ["c"], "round must be 2, the first that is not released, got 1"),
        ([["a"], ["b"]], 3, ["c"], "round must be 2"),
        ([["a"]], 1, ["a", "c"], "1 user would take part more than 2 times, or less than 2 rounds apart, in round 1"),
        ([["a"], ["b"], ["a"], ["b"]], 4, ["a", "c"], "1 user would take part"),
        ([], 0, ["a", "b", "a", "b"], "2 users are named twice"),
        ([], -1, ["a"], "round must be in 0 … 5, got -1"),
    ],
)
def test_a_plan_that_breaks_the_promise_is_refused_and_counts_nobody(path, earlier, round, users, message):
    with opened(path) as ledger:
        for t, who in enumerate(earlier):
            release(ledger, t, who)
        before = ledger.history(["a", "b", "c"])
        with pytest.raises(ValueError, match=message):
            ledger.plan_round(round, users)
        assert ledger.history(["a", "b", "c"]) == before
    assert verify(path).problems == ()


def test_steps_out_of_order_are_refused(path):
    with opened(path) as ledger:
        with pytest.raises(ValueError, match="is not planned"):
            ledger.record_aggregated(0, 0, 5)
        attempt = ledger.plan_round(0, ["a"])
        with pytest.raises(ValueError, match="is not aggregated, so it cannot become released"):
            ledger.record_released(0, attempt, b"")
        with pytest.raises(ValueError, match="in flight"):
            ledger.plan_round(0, ["a"])
        with pytest.raises(ValueError, match="is not planned"):
            ledger.record_aggregated(0, attempt + 1, 5)
        ledger.record_aggregated(0, attempt, 5)
        with pytest.raises(ValueError, match="is not planned"):
            ledger.record_aggregated(0, attempt, 5)
        ledger.record_released(0, attempt, b"first")
        with pytest.raises(ValueError, match="is not aggregated"):
            ledger.record_released(0, attempt, b"second")
        assert ledger.resume().model == b"first"


def test_a_skip_is_recorded_and_uses_no_round(path):
    with opened(path) as ledger:
        ledger.skip(0, "too few users")
        attempt = ledger.plan_round(0, ["a"])
        ledger.skip(0, "too few answers")
        with pytest.raises(ValueError, match="is not planned"):
            ledger.record_aggregated(0, attempt, 5)
        with pytest.raises(ValueError, match="round must be 0"):
            ledger.skip(1, "not its turn")
        release(ledger, 0, ["a"])
    record = export(path)
    assert [(skip["round"], skip["reason"]) for skip in record["skips"]] == [
        (0, "too few users"),
        (0, "too few answers"),
    ]
    assert record["users_by_participations"] == {1: 1}


def test_verify_rederives_epsilon(path):
    with opened(path) as ledger:
        assert verify(path).guarantee is None
        for t in range(3):
            release(ledger, t, [f"user-{t}"])
        found = verify(path)  # while the run goes on
    assert (found.released, found.planned, found.simulated, found.problems) == (3, 6, False, ())
    assert found.guarantee == PLAN.guarantee(released=3)


@pytest.mark.parametrize(
    "sampling", [{"sampling": "balls-in-bins"}, {"sampling": "cyclic-poisson", "sampling_rate": 0.5}]
)
def test_a_user_stays_in_its_bin(path, sampling):
    """Under these samplings ε is for rounds that are b apart exactly; others are refused, and found."""
    plan = replace(PLAN, participation=Participation(rounds=6, min_separation=2, **sampling), mechanism=DPSGD())
    with opened(path, plan=plan) as ledger:
        release(ledger, 0, ["a"])
        release(ledger, 1, ["b"])
        release(ledger, 2, ["c"])
        with pytest.raises(ValueError, match="1 user would take part in round 3, which is not of their bin"):
            ledger.plan_round(3, ["a"])
        release(ledger, 3, ["b"])
    assert verify(path).problems == ()
    edit(path, "UPDATE attempts SET users = (SELECT users FROM attempts WHERE round = 0) WHERE round = 3")
    assert any("another than its bin" in found for found in verify(path).problems)


def test_a_bin_is_a_round_modulo_the_separation(path):
    participation = Participation(rounds=9, min_separation=3, sampling="balls-in-bins")
    with opened(path, plan=replace(PLAN, participation=participation, mechanism=DPSGD())) as ledger:
        for round in range(7):
            release(ledger, round, [f"bin-{round % 3}"] + ["late"] * (round == 2))
        with pytest.raises(ValueError, match="1 user would take part in round 7, which is not of their bin"):
            ledger.plan_round(7, ["bin-1", "late"])
    assert verify(path).problems == ()


TAMPERINGS = {
    "UPDATE run SET configuration = '{}'": "the plan and the configuration are not those whose hash is on record",
    "UPDATE run SET plan = replace(plan, '\"noise_multiplier\": ', '\"noise_multiplier\": 9')": "the plan and",
    "UPDATE attempts SET nonce = (SELECT nonce FROM attempts WHERE round = 0) WHERE round = 1": "1 nonce is on record for two",
    "UPDATE users SET participations = 0 WHERE user = 'a'": "1 user has counters that differ",
    "UPDATE users SET participations = 2 WHERE user = 'b'": "1 user has counters that differ",
    "UPDATE users SET last_round = 9 WHERE user = 'a'": "1 user has counters that differ",
    "UPDATE users SET last_round = last_round - 1 WHERE user = 'd'": "1 user has counters that differ",
    "DELETE FROM users WHERE user = 'd'": "1 user who was asked is not in the table of users",
    "DELETE FROM attempts WHERE round = 0": "the released rounds are not 1 … 2, once each",
    "UPDATE attempts SET nonce = NULL WHERE round = 1": "1 released round has no nonce",
    "INSERT INTO attempts (round, attempt, nonce, state, users, planned) SELECT round, attempt + 1, nonce, 'abandoned', users, "
    "planned FROM attempts WHERE round = 1": "1 nonce is on record for two sums",
    "UPDATE attempts SET users = (SELECT users FROM attempts WHERE round = 0) WHERE round = 1": "less than 2 rounds after",
    "INSERT INTO attempts (round, attempt, state, users, planned) SELECT round + 4, attempt, state, users, planned "
    "FROM attempts WHERE round = 0": "1 user took part more than 2 times",
}


@pytest.mark.parametrize(("statement", "problem"), TAMPERINGS.items())
def test_verify_sees_records_that_contradict_each_other(path, statement, problem):
    with opened(path) as ledger:
        for t, users in enumerate((["a", "b"], ["c"], ["a", "d"])):
            release(ledger, t, users)
    assert verify(path).problems == ()
    edit(path, statement)
    assert any(problem in found for found in verify(path).problems), verify(path).problems


def test_verify_sees_more_rounds_than_the_plan_has(path):
    short = Plan.from_description(
        {**PLAN.to_description(), "participation": {"rounds": 2, "min_separation": 1, "max_participations": 2}}
    )
    with opened(path) as ledger:
        for t in range(3):
            release(ledger, t, [str(t)])
    edit(path, f"UPDATE run SET plan = '{json.dumps(short.to_description())}'")
    assert any("3 rounds are released, and 2 are accounted for" in problem for problem in verify(path).problems)


def test_a_release_without_a_nonce_is_told_once(path):
    with opened(path) as ledger:
        release(ledger, 0, ["a"])
    edit(path, "UPDATE attempts SET nonce = NULL")
    assert [problem for problem in verify(path).problems if "nonce" in problem] == [
        "1 released round has no nonce, and so no noise"
    ]


def test_a_user_without_a_row_is_told_once_whatever_its_rounds(path):
    with opened(path) as ledger:
        for t, user in enumerate("aba"):
            release(ledger, t, [user])
    edit(path, "DELETE FROM users")
    assert "2 users who were asked are not in the table of users" in verify(path).problems


def test_the_export_is_json_and_names_neither_users_nor_the_key(path):
    with opened(path) as ledger:
        release(ledger, 0, ["someone-we-know", "another"], b"weights")
    text = json.dumps(export(path))
    assert "someone-we-know" not in text
    record = json.loads(text)
    assert record["run"]["key_fingerprint"] == KEY.fingerprint
    assert record["run"]["plan"] == PLAN.to_description()
    assert record["run"]["configuration"] == {**SETTINGS, "noise stream": "chacha20"}
    assert record["verification"]["guarantee"]["epsilon"] == PLAN.guarantee(released=1).epsilon
    assert [attempt["users"] for attempt in record["attempts"]] == [2]


def test_the_file_holds_no_key_and_is_for_the_owner_only(path):
    with opened(path) as ledger:
        release(ledger, 0, ["a"])
        files = list(path.parent.iterdir())
        assert len(files) == 5  # the ledger, its log, the log's index, the lock, and the model
        for file in files:
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            content = file.read_bytes()
            for secret in (bytes(range(32)), KEY.noise, KEY.noise_of(ledger.stream_id), KEY.choices):
                assert secret not in content
                assert secret.hex().encode() not in content


def test_sealing_ends_the_run_and_deletes_the_key(path, tmp_path, monkeypatch):
    key_file = tmp_path / "key"
    key = NoiseKey.from_file(key_file, create=True)
    with opened(path, key=key) as ledger:
        release(ledger, 0, ["a"])
        attempt = ledger.plan_round(1, ["b"])
        seal(path, key_file)
        with pytest.raises(ValueError, match="sealed"):
            ledger.record_aggregated(1, attempt, 5)
    assert not key_file.exists()
    seal(path, key_file)
    monkeypatch.chdir(path.parent)
    with pytest.raises(
        ValueError, match=f"^{re.escape(str(path))} was sealed on"
    ):  # where it is, also if that was not said
        opened(Path(path.name), key=key)
    assert verify(path).released == 1
    assert export(path)["run"]["sealed"]


def test_sealing_with_the_key_of_another_run_deletes_nothing(path, tmp_path):
    NoiseKey.from_file(tmp_path / "other", create=True)
    opened(path).close()
    with pytest.raises(ValueError, match="not the key of this run"):
        seal(path, tmp_path / "other")
    assert (tmp_path / "other").exists()
    assert export(path)["run"]["sealed"] is None


def test_what_is_no_ledger_is_refused(path):
    for call in (verify, export, lambda p: seal(p, None)):
        with pytest.raises(ValueError, match="there is no ledger"):
            call(path)
    assert not path.exists()
    path.write_text("something else that is longer than a header of a database, which has a hundred bytes " * 3)
    for call in (verify, export, opened):
        with pytest.raises(ValueError, match="ledger"):
            call(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="ledger"):
        verify(path)


def test_a_keepers_record_is_no_ledger(path):
    """It has a table of the same name, of the same format, with other columns."""
    Record.open(path, KEY.fingerprint).close()
    with pytest.raises(ValueError, match="cannot be read as a ledger: its table 'run' is another one"):
        verify(path)


def test_a_process_killed_before_the_run_was_recorded_leaves_a_file_that_opens(path, monkeypatch):
    """And that is no empty one: whoever emptied a ledger would have its first round again."""
    with monkeypatch.context() as killed:
        killed.setattr("fedcgd.ledger.transactions.transaction", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            opened(path)
    assert path.stat().st_size
    with opened(path) as ledger:
        assert ledger.resume().round == 0
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="is not a ledger: it is empty"):
        opened(path)


def test_user_ids_may_be_any_text(path):
    users = [" ", "a'b\"c", "\x00", "ü", "🙂", "a" * 10_000, "null", "1"]
    with opened(path) as ledger:
        release(ledger, 0, users)
        assert ledger.history([*users, "other"]).counts == dict.fromkeys(users, 1)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.sets(st.integers(1, 2**40)))
def test_cohorts_pack_and_unpack(ids):
    array = np.array(list(ids), np.int64)
    np.testing.assert_array_equal(unpack_ids(pack_ids(array), len(array)), np.sort(array))


def test_sealing_leaves_a_foreign_database_as_it_is(tmp_path):
    foreign = tmp_path / "other.db"
    edit(foreign, "CREATE TABLE songs (title TEXT)")
    before = foreign.read_bytes()
    with pytest.raises(ValueError, match="cannot be read as a ledger"):
        seal(foreign, None)
    assert foreign.read_bytes() == before


def test_a_path_called_memory_is_refused():
    with pytest.raises(ValueError, match="is the text"):
        Ledger.open(Path(":memory:"), plan=PLAN, configuration={}, key=NoiseKey.generate())


@pytest.mark.parametrize("most_seen", [0, 2, 1_000_000])
def test_what_is_remembered_of_users_is_what_is_on_record(path, most_seen, monkeypatch):
    """Through failures in the middle, tries again, and more users than are remembered."""
    monkeypatch.setattr(participation_counter, "_MOST_SEEN", most_seen)
    users = [f"user-{i}" for i in range(6)]

    def on_record(ledger: Ledger) -> History:
        rows = ledger._connection.execute("SELECT user, participations, last_round FROM users ORDER BY user").fetchall()
        return History({row[0]: row[1] for row in rows}, {row[0]: row[2] for row in rows})

    def fail(*_):
        raise OSError("the disk is full")

    with opened(path) as ledger:
        for t in range(6):
            asked = users[: 2 + t % 2] if t % 2 else users[3:]
            assert ledger.history(users) == on_record(ledger)
            with monkeypatch.context() as patched:
                patched.setattr(attempts, "pack_ids", fail)
                with pytest.raises(OSError, match="disk is full"):
                    ledger.plan_round(t, asked) if t < 4 else fail()
            assert ledger.history(users) == on_record(ledger)
            if t >= 4:
                with pytest.raises(ValueError, match="more than 2 times"):
                    ledger.plan_round(t, asked)
                asked = []
            ledger.plan_round(t, asked)
            ledger.skip(t, "tried again")
            release(ledger, t, asked)
            assert ledger.history(users) == on_record(ledger)
    with opened(path) as ledger:
        assert ledger.history(users) == on_record(ledger)
        assert ledger.history(users).counts == dict.fromkeys(["user-0", "user-1", "user-2", *users[3:]], 2)
    assert verify(path).problems == ()


def test_every_commit_reaches_the_disk(tmp_path):
    """Not only a release: users who were asked stay counted, and nonces used, after a power cut."""
    full = 2
    with closing(connect(tmp_path / "run.db")) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (full,)


def test_a_transaction_holds_the_lock_from_its_beginning_and_ctrl_c_undoes_it(tmp_path):
    first, second = (sqlite3.connect(tmp_path / "file", timeout=0.0, isolation_level=None) for _ in range(2))
    with closing(first), closing(second):
        with transaction(first):
            first.execute("CREATE TABLE made (number)")

        def interrupted() -> None:
            with transaction(first):
                with pytest.raises(sqlite3.OperationalError, match="locked"), transaction(second):
                    pass  # what is read here could be written over
                first.execute("INSERT INTO made VALUES (1)")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert first.execute("SELECT * FROM made").fetchall() == []
        with transaction(second):
            pass


def test_what_cannot_be_undone_is_not_read_any_more():
    """The disk fails while a transaction is undone: what it wrote must not be seen by a later read."""

    class Failing:
        in_transaction, closed = True, False

        def execute(self, statement):
            if statement == "ROLLBACK":
                raise sqlite3.OperationalError("disk I/O error")

        def close(self):
            self.closed = True

    connection = Failing()
    with pytest.raises(KeyError), transaction(connection):
        raise KeyError
    assert connection.closed


def test_a_review_leaves_nothing_behind(path):
    with opened(path) as ledger:
        release(ledger, 0, ["a"])
    before = sorted(path.parent.iterdir())
    assert verify(path).problems == ()
    assert sorted(path.parent.iterdir()) == before


def test_a_ledger_that_comes_into_use_while_it_is_read_is_not_believed(path):
    with opened(path) as ledger:
        release(ledger, 0, ["a"])

    def go_on() -> None:
        with opened(path) as ledger:
            release(ledger, 1, ["b"])

    with pytest.raises(ValueError, match="came into use"), reader(path):
        go_on()


def test_a_ledger_in_use_is_read_as_it_is(path):
    with opened(path) as ledger:
        release(ledger, 0, ["a"])
        assert verify(path).released == 1
        release(ledger, 1, ["b"])
        assert verify(path).released == 2


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        (b"", "not the key's or the models beside it"),
        (b"0" * 64, "not the key's or the models beside it"),
        (None, "counts with all of its plan"),
    ],
)
def test_what_is_no_whole_ledger_says_what_to_do(path, content, advice):
    with opened(path) as ledger:
        release(ledger, 0, ["a"])
    path.write_bytes(path.read_bytes()[:20_000] if content is None else content)
    with pytest.raises(ValueError, match=f"cannot be read as a ledger.*{advice}"):
        verify(path)


def test_a_key_tells_which_other_runs_it_has_begun(tmp_path):
    key = NoiseKey.from_file(tmp_path / "noise.key", create=True)
    with Ledger.open(tmp_path / "first.db", plan=PLAN, configuration={}, key=key) as first:
        assert first.other_runs() == []
        release(first, 0, ["a"])
    with Ledger.open(tmp_path / "second.db", plan=PLAN, configuration={"other": 1}, key=key) as second:
        [other] = second.other_runs()
    assert (other.ledger, other.released) == (str(tmp_path / "first.db"), 1)


@pytest.mark.parametrize("why", ["its run is sealed", "its key was lost"])
def test_a_start_that_is_refused_leaves_no_new_key(path, tmp_path, why):
    """The same command again, after `seal` or with the key missing, made a key that belongs to nothing."""
    with opened(path, key=NoiseKey.from_file(tmp_path / "key", create=True)) as ledger:
        release(ledger, 0, ["a"])
    if why == "its run is sealed":
        seal(path, tmp_path / "key")
    else:
        (tmp_path / "key").unlink()
    with pytest.raises(
        ValueError, match=rf"was sealed on|there is no key file {tmp_path / 'key'}, .* its register key.runs"
    ):
        opened(path, key=NoiseKey.from_file(tmp_path / "key", create=True))
    assert not (tmp_path / "key").exists()
    assert (tmp_path / "key.runs").exists()
    again = NoiseKey.from_file(tmp_path / "key", create=True)  # a run of its own begins as ever
    opened(tmp_path / "other.db", key=again).close()
    with pytest.raises(ValueError, match=r"another run|was sealed on"):
        opened(path, configuration={"other": 1}, key=again)
    assert (tmp_path / "key").exists()


def test_a_new_key_that_another_process_found_stays(path, tmp_path):
    opened(path).close()
    mine, theirs = (NoiseKey.from_file(tmp_path / "key", create=True) for _ in range(2))
    opened(tmp_path / "theirs.db", key=theirs).close()
    with pytest.raises(ValueError, match="there is no key file"):
        opened(path, key=mine)
    assert (tmp_path / "key").exists()


def test_a_key_file_that_was_there_stays(path, tmp_path):
    opened(path).close()
    NoiseKey.from_file(tmp_path / "key", create=True)
    with pytest.raises(ValueError, match="another run"):
        opened(path, key=NoiseKey.from_file(tmp_path / "key", create=True))
    assert (tmp_path / "key").exists()


def test_a_full_disk_is_told_with_the_file_and_the_remedy(path):
    with opened(path) as ledger:
        (pages,) = ledger._connection.execute("PRAGMA page_count").fetchone()
        ledger._connection.execute(f"PRAGMA max_page_count = {pages}")
        users = [f"{i} {'u' * 500}" for i in range(500)]
        with pytest.raises(
            sqlite3.OperationalError, match="full; make room on that disk; what was recorded before stays"
        ) as full:
            ledger.plan_round(0, users)
        assert str(path) in str(full.value)


def test_a_model_that_does_not_fit_on_the_disk_is_told_with_its_file(path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    with opened(path) as ledger:
        attempt = ledger.plan_round(0, ["a"])
        ledger.record_aggregated(0, attempt, 5)
        monkeypatch.setattr("fedcgd.ledger.model_file.os.fsync", full)
        with pytest.raises(OSError, match=r"No space left on device; make room on that disk.*: .*run.ledger-model-0"):
            ledger.record_released(0, attempt, b"model")
