"""The ledger, step by step: what each step records, what it refuses, and what another process may do meanwhile."""

import json
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
from ledgers import KEY, reasons, refused, release
from plans import make_plan
from sql import edit

from fedcgd import DPSGD, LambdaCGD, NoiseKey, Participation, Plan
from fedcgd.keepers.record import Record
from fedcgd.ledger import Ledger, LedgerError, attempts, export, seal, verify
from fedcgd.ledger.store import connect, pack_ids, reader, unpack_ids
from fedcgd.participation.history import History
from fedcgd.support.records import transaction

PLAN = make_plan(LambdaCGD(0.5), Participation(rounds=6, min_separation=2, max_participations=2))
SETTINGS = {"task": "digits", "lr": 0.5}


def opened(path, *, plan=PLAN, configuration=SETTINGS, key=KEY) -> Ledger:
    return Ledger.open(path, plan=plan, configuration=configuration, key=key)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ledger"


def test_what_was_measured_is_there_when_the_run_goes_on(path):
    with opened(path) as ledger:
        ledger.record_metrics("evaluate", 2, {"accuracy": 0.5})
        ledger.record_metrics("evaluate", 1, {"accuracy": 0.25})
        ledger.record_metrics("evaluate", 2, {"accuracy": 0.75})
        ledger.record_metrics("train", 2, {"kind": 3.0})  # a metric may be called anything
    with opened(path) as ledger:
        assert list(ledger.metrics("evaluate").items()) == [(1, {"accuracy": 0.25}), (2, {"accuracy": 0.75})]
        assert ledger.metrics("other") == {}
    exported = export(path)
    assert exported["train_metrics"] == [{"release": 2, "kind": 3.0}]
    assert exported["measured"][0] == {"kind": "evaluate", "release": 1, "accuracy": 0.25}


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
        with pytest.raises(ValueError, match="got 6"):
            ledger.plan_round(6, ["user-9"])


def test_a_round_that_was_not_released_is_tried_under_a_new_attempt_and_counts_once(path):
    with opened(path) as ledger:
        first = ledger.plan_round(0, ["a", "b"])
        ledger.record_aggregated(0, first, 11)
    with opened(path) as ledger:
        assert ledger.resume().round == 0
        second = ledger.plan_round(0, ["b", "c"])
        assert second != first
        assert ledger.history(["a", "b", "c"]).counts == {"a": 1, "b": 1, "c": 1}
        with refused("out-of-order"):
            ledger.record_released(0, first, b"")
        with refused("nonce-used"):
            ledger.record_aggregated(0, second, 11)
        ledger.record_aggregated(0, second, 2**128 - 1)
        ledger.record_released(0, second, b"")
        assert ledger.resume().nonces == (2**128 - 1,)
    states = [(attempt["attempt"], attempt["state"], attempt["users"]) for attempt in export(path)["attempts"]]
    assert states == [(first, "abandoned", 2), (second, "released", 2)]
    assert verify(path).problems == ()


def test_a_round_that_keepers_were_asked_to_open_is_in_flight_and_spent_by_sealing(path):
    with opened(path) as ledger:
        attempt = ledger.plan_round(0, ["a"])
        ledger.record_opening(0, attempt, bytes(32), ["notary"])
        with refused("in-flight"):
            ledger.plan_round(0, ["b"])
    seal(path, None)
    assert [one["state"] for one in export(path)["attempts"]] == ["spent"]


def test_a_simulation_says_so_for_ever_and_repeats(path):
    key = NoiseKey.simulation(3)
    with opened(path, key=key) as ledger:
        assert ledger.simulated
        assert key.noise_of(ledger.stream_id) == key.noise
    assert verify(path).run.simulated
    assert export(path)["run"]["simulated"] is True
    with refused("another-key"):
        opened(path)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"plan": Plan.from_description({**PLAN.to_description(), "noise_multiplier": 1.9})}, "another-plan"),
        ({"plan": Plan.from_description({**PLAN.to_description(), "clip_norm": 1.1})}, "another-plan"),
        ({"configuration": {**SETTINGS, "lr": 0.6}}, "another-configuration"),
        ({"key": NoiseKey(bytes(32))}, "another-key"),
    ],
)
def test_another_run_is_refused_and_changes_nothing(path, changed, reason):
    with opened(path) as ledger:
        attempt = ledger.plan_round(0, ["a"])
        with refused(reason):
            opened(path, **changed)
        ledger.record_aggregated(0, attempt, 5)
        ledger.record_released(0, attempt, b"")


def test_a_run_goes_on_under_the_same_definition_of_the_noise_only(path, monkeypatch):
    opened(path).close()
    monkeypatch.setattr("fedcgd.ledger.store.STREAM", "another")
    with refused("another-configuration"):
        opened(path)


def test_a_configuration_that_json_cannot_hold_is_refused(path):
    with pytest.raises(ValueError, match="JSON"):
        opened(path, configuration={"lr": float("nan")})


def test_the_process_that_opens_last_shuts_out_the_others(path):
    with opened(path) as old:
        attempt = old.plan_round(0, ["a"])
        old.record_aggregated(0, attempt, 5)
        with opened(path) as new:
            release(new, 0, ["a"], b"new")
            for step in (
                lambda: old.record_released(0, attempt, b"old"),
                lambda: old.plan_round(1, ["b"]),
                lambda: old.skip(0, "why not"),
                lambda: old.history(["a"]),
            ):
                with pytest.raises(LedgerError):
                    step()
            assert new.resume().model == b"new"  # nor is its file touched


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
    plan = make_plan(DPSGD(), Participation(rounds=2), noise_multiplier=2.0)

    def start():
        return Ledger.open(path, plan=plan, configuration={}, key=NoiseKey.simulation(1))

    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "open\n"
        for late in (start, lambda: seal(path, None)):  # the wrong file: it ended the run
            with refused("in-another-process") as error:
                late()
            assert f"process {first.pid} on" in str(error.value)
        first.stdin.write("\n")
        first.stdin.flush()
        assert first.stdout.readline() == "released\n"  # its attempt was not abandoned
        first.kill()
    with start() as ledger:
        assert ledger.resume().round == 1
    assert not path.with_name("run.ledger-lock").exists()
    assert verify(path).problems == ()


def test_a_second_start_that_is_refused_leaves_the_run_its_lock(path):
    """In one process, as in a notebook: the lock went with the refused start, and another process took the run over."""
    with opened(path) as ledger:
        with refused("another-configuration"):
            opened(path, configuration={"another": "run"})
        with opened(path) as second:  # it takes the lock with the run
            ledger.close()
            elsewhere = subprocess.run([sys.executable, "-c", HOLDER, str(path)], input="", capture_output=True)
            assert b"another process" in elsewhere.stderr
            release(second, 0, ["ada"])
    assert not path.with_name("run.ledger-lock").exists()


@pytest.mark.parametrize(
    ("earlier", "round", "users", "reason"),
    [
        ([["a"], ["b"]], 1, ["c"], "out-of-turn"),
        ([["a"], ["b"]], 3, ["c"], "out-of-turn"),
        ([["a"]], 1, ["a", "c"], "too-often"),
        ([["a"], ["b"], ["a"], ["b"]], 4, ["a", "c"], "too-often"),
        ([], 0, ["a", "b", "a", "b"], None),
        ([], -1, ["a"], None),
    ],
)
def test_a_plan_that_breaks_the_promise_is_refused_and_counts_nobody(path, earlier, round, users, reason):
    with opened(path) as ledger:
        for t, who in enumerate(earlier):
            release(ledger, t, who)
        before = ledger.history(["a", "b", "c"])
        with refused(reason) if reason else pytest.raises(ValueError, match=r"twice|got"):
            ledger.plan_round(round, users)
        assert ledger.history(["a", "b", "c"]) == before
    assert verify(path).problems == ()


def test_steps_out_of_order_are_refused(path):
    with opened(path) as ledger:
        with refused("out-of-order"):
            ledger.record_aggregated(0, 0, 5)
        attempt = ledger.plan_round(0, ["a"])
        with refused("out-of-order"):
            ledger.record_released(0, attempt, b"")
        with refused("in-flight"):
            ledger.plan_round(0, ["a"])
        with refused("out-of-order"):
            ledger.record_aggregated(0, attempt + 1, 5)
        ledger.record_aggregated(0, attempt, 5)
        with refused("out-of-order"):
            ledger.record_aggregated(0, attempt, 5)
        ledger.record_released(0, attempt, b"first")
        with refused("out-of-order"):
            ledger.record_released(0, attempt, b"second")
        assert ledger.resume().model == b"first"


def test_a_skip_is_recorded_and_uses_no_round(path):
    with opened(path) as ledger:
        ledger.skip(0, "few users")
        attempt = ledger.plan_round(0, ["a"])
        ledger.skip(0, "few answers")
        with refused("out-of-order"):
            ledger.record_aggregated(0, attempt, 5)
        with refused("out-of-turn"):
            ledger.skip(1, "not its turn")
        release(ledger, 0, ["a"])
    record = export(path)
    assert [(skip["round"], skip["reason"]) for skip in record["skips"]] == [
        (0, "few users"),
        (0, "few answers"),
    ]
    assert record["users_by_participations"] == {1: 1}


@pytest.mark.parametrize(
    "sampling", [{"sampling": "balls-in-bins"}, {"sampling": "cyclic-poisson", "sampling_rate": 0.5}]
)
def test_a_user_stays_in_its_bin(path, sampling):
    """Under these samplings ε is for rounds that are b apart exactly; others are refused, and found."""
    participation = Participation(rounds=9, min_separation=3, **sampling)
    with opened(path, plan=replace(PLAN, participation=participation, mechanism=DPSGD())) as ledger:
        for round in range(7):
            release(ledger, round, [f"bin-{round % 3}"] + ["late"] * (round == 2))
        with refused("another-bin"):
            ledger.plan_round(7, ["bin-1", "late"])
    assert verify(path).problems == ()
    edit(path, "UPDATE attempts SET users = (SELECT users FROM attempts WHERE round = 0) WHERE round = 4")
    assert "two-bins" in reasons(verify(path).problems)


SHORT = (
    "replace(replace(plan, '\"rounds\": 6', '\"rounds\": 2'), '\"max_participations\": 2', '\"max_participations\": 1')"
)
TAMPERINGS = {
    f"UPDATE run SET plan = {SHORT}": "too-many-rounds",
    "UPDATE run SET configuration = '{}'": "another-hash",
    "UPDATE run SET plan = replace(plan, '\"noise_multiplier\": ', '\"noise_multiplier\": 9')": "another-hash",
    "UPDATE attempts SET nonce = (SELECT nonce FROM attempts WHERE round = 0) WHERE round = 1": "two-sums",
    "UPDATE users SET participations = 0 WHERE user = 'a'": "other-counters",
    "UPDATE users SET participations = 2 WHERE user = 'b'": "other-counters",
    "UPDATE users SET last_round = 9 WHERE user = 'a'": "other-counters",
    "UPDATE users SET last_round = last_round - 1 WHERE user = 'd'": "other-counters",
    "INSERT INTO attempts (round, attempt, nonce, state, users, planned) SELECT round, attempt + 1, nonce, 'abandoned', users, "
    "planned FROM attempts WHERE round = 1": "two-sums",
    "UPDATE attempts SET users = (SELECT users FROM attempts WHERE round = 0) WHERE round = 1": "too-close",
    "INSERT INTO attempts (round, attempt, state, users, planned) SELECT round + 4, attempt, state, users, planned "
    "FROM attempts WHERE round = 0": "more-participations",
}


@pytest.mark.parametrize(("statement", "problem"), TAMPERINGS.items())
def test_verify_sees_records_that_contradict_each_other(path, statement, problem):
    with opened(path) as ledger:
        for t, users in enumerate((["a", "b"], ["c"], ["a", "d"])):
            release(ledger, t, users)
    assert verify(path).problems == ()
    edit(path, statement)
    assert problem in reasons(verify(path).problems)


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
        with refused("sealed"):
            ledger.record_aggregated(1, attempt, 5)
    assert not key_file.exists()
    seal(path, key_file)
    NoiseKey.from_file(tmp_path / "other", create=True)
    with refused("another-key-to-seal"):
        seal(path, tmp_path / "other")
    assert (tmp_path / "other").exists()
    monkeypatch.chdir(path.parent)
    with refused("sealed") as error:
        opened(Path(path.name), key=key)
    assert str(error.value).startswith(str(path))  # where it is, also if that was not said
    assert verify(path).released == 1
    assert export(path)["run"]["sealed"]


def test_what_is_no_ledger_is_refused_and_left_as_it_is(path):
    def begin_of_one() -> None:
        with opened(path.with_name("whole.db")) as ledger:
            release(ledger, 0, ["a"])
        path.write_bytes(path.with_name("whole.db").read_bytes()[:20_000])

    for call in (verify, export, lambda p: seal(p, None)):
        with refused("no-ledger"):
            call(path)
    assert not path.exists()
    for make, of_sqlite in (
        (lambda: edit(path, "CREATE TABLE songs (title TEXT)"), True),
        # It has a table of the same name, of the same format, with other columns.
        (lambda: Record.open(path, KEY.fingerprint).close() or edit(path, "UPDATE run SET format = 4"), True),
        (lambda: path.write_text("something else that is longer than a header, which has a hundred bytes " * 3), False),
        (lambda: path.write_bytes(b""), False),
        (begin_of_one, True),
    ):
        make()
        before = path.read_bytes()
        for call in (verify, lambda p: seal(p, None)):
            with refused("unreadable"):
                call(path)
        if not of_sqlite:
            with pytest.raises(ValueError, match="ledger"):
                opened(path)
        assert path.read_bytes() == before
        path.unlink()


def test_a_process_killed_before_the_run_was_recorded_leaves_a_file_that_opens(path, monkeypatch):
    """And that is no empty one: whoever emptied a ledger would have its first round again."""
    with monkeypatch.context() as killed:
        killed.setattr("fedcgd.ledger.store.make_tables", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            opened(path)
    assert path.stat().st_size
    with opened(path) as ledger:
        assert ledger.resume().round == 0
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="empty"):
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


def test_a_path_called_memory_is_memory(tmp_path, monkeypatch):
    """And not a file of that name, of which nothing would be left."""
    monkeypatch.chdir(tmp_path)
    with opened(Path(":memory:")) as ledger:
        release(ledger, 0, ["a"])
    assert not list(tmp_path.iterdir())


def test_every_commit_reaches_the_disk(tmp_path):
    """Not only a release: users who were asked stay counted, and nonces used, after a power cut."""
    full = 2
    with closing(connect(tmp_path / "run.db")) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (full,)


def test_a_round_that_is_not_on_record_counts_nobody(path, monkeypatch):
    def fail(*_):
        raise OSError("full")

    with opened(path) as ledger:
        release(ledger, 0, ["a"])
        before = ledger.history(["a", "b"])
        with monkeypatch.context() as patched:
            patched.setattr(attempts, "pack_ids", fail)
            with pytest.raises(OSError, match="full"):
                ledger.plan_round(1, ["b"])
        assert ledger.history(["a", "b"]) == before == History({"a": 1}, {"a": 0})


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
    """The disk fails at the COMMIT, and while that is undone: what was written must not be seen by a later read."""

    connection = Mock(in_transaction=True)
    connection.execute.side_effect = [None, *[sqlite3.OperationalError("no space")] * 2]
    with pytest.raises(sqlite3.OperationalError), transaction(connection):
        pass
    connection.close.assert_called_once()


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

    with refused("came-into-use"), reader(path):
        go_on()


@pytest.mark.parametrize("reason", ["sealed", "key-lost"])
def test_a_start_that_is_refused_leaves_no_new_key(path, tmp_path, reason):
    """The same command again, after `seal` or with the key missing, made a key that belongs to nothing."""
    with opened(path, key=NoiseKey.from_file(tmp_path / "key", create=True)) as ledger:
        release(ledger, 0, ["a"])
    if reason == "sealed":
        seal(path, tmp_path / "key")
    else:
        (tmp_path / "key").unlink()
    with refused(reason):
        opened(path, key=NoiseKey.from_file(tmp_path / "key", create=True))
    assert not (tmp_path / "key").exists()
    assert (tmp_path / "key.runs").exists()
    again = NoiseKey.from_file(tmp_path / "key", create=True)  # a run of its own begins as ever
    opened(tmp_path / "other.db", key=again).close()
    with pytest.raises(LedgerError):
        opened(path, configuration={"other": 1}, key=again)
    assert (tmp_path / "key").exists()


def test_a_new_key_that_another_process_found_stays(path, tmp_path):
    opened(path).close()
    with refused("another-key"):  # of a file that was there, which stays
        opened(path, key=NoiseKey.from_file(NoiseKey.from_file(tmp_path / "old", create=True) and tmp_path / "old"))
    assert (tmp_path / "old").exists()
    mine, theirs = (NoiseKey.from_file(tmp_path / "key", create=True) for _ in range(2))
    opened(tmp_path / "theirs.db", key=theirs).close()
    with refused("key-lost"):
        opened(path, key=mine)
    assert (tmp_path / "key").exists()


def test_a_folder_or_the_file_of_the_keys_runs_is_no_ledger(tmp_path):
    """Each of the two waited for the other's lock, for a minute."""
    with pytest.raises(ValueError, match="folder"):
        opened(tmp_path)
    with refused("ledger-is-the-register"):
        opened(tmp_path / "noise.key.runs", key=NoiseKey.from_file(tmp_path / "noise.key", create=True))
