"""Ledgers of format 3 as the code of that time left them: read, gone on with, refused where they say what none of today can."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from ledgers import KEY, reasons, refused, release
from plans import make_plan
from sql import edit, rows

from fedcgd import LambdaCGD, Ledger, NoiseKey, Participation
from fedcgd.ledger import seal, verify
from fedcgd.ledger.store import write_notes
from fedcgd.participation.history import History

DUMPS = Path(__file__).parent / "format_3"
PLAN = make_plan(LambdaCGD(0.5), Participation(rounds=6, min_separation=2, max_participations=2))
CONFIGURATION = {"cohort_size": 2, "identity": "declared", "inner": {"lr": 0.5}}
WHOLE, SO_FAR, IF_KEPT = 3.9344789543962486, 2.258145363378109, "5.49"  # what verify said then
HISTORY = History({"ada": 2, "ben": 1, "cy": 1, "dee": 1, "eva": 1}, {"ada": 2, "ben": 0, "cy": 1, "dee": 1, "eva": 2})

# The last drafts of the format had these tables, the first ones had not.
ADOPTIONS = "CREATE TABLE adoptions (at TEXT NOT NULL, released INTEGER NOT NULL, register TEXT NOT NULL) STRICT"
LATER = """
CREATE TABLE record (name TEXT NOT NULL) STRICT;
INSERT INTO record VALUES ('0123456789abcdef0123456789abcdef');
CREATE TABLE places (at TEXT NOT NULL, released INTEGER NOT NULL, inode INTEGER NOT NULL) STRICT;
INSERT INTO places VALUES ('2026-11-27T10:00:00.000+00:00', 0, 1), ('2026-11-27T11:00:00.000+00:00', 1, 2);
CREATE TABLE notes (name TEXT PRIMARY KEY, text TEXT NOT NULL) STRICT;
"""


@pytest.fixture(params=["first", "last"])
def path(request, tmp_path):
    """The ledger of a server that was killed in round 3, with its models; beside it its key and the key's register."""
    path = tmp_path / "run.db"
    for file, script in ((path, "run.sql"), (tmp_path / "noise.key.runs", "runs.sql")):
        with closing(sqlite3.connect(file)) as connection:
            if file == path:
                connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(
                (DUMPS / script).read_text() + (LATER if (request.param, file) == ("last", path) else "")
            )
    (tmp_path / "noise.key").write_text(
        f"{bytes(range(32)).hex()}\n# made together with a register of its runs, in a file beside it: keep the two together\n"
    )
    (tmp_path / "run.db-model-1").write_bytes(b"model 1state 1")
    for file in tmp_path.iterdir():
        file.chmod(0o600)
    return path


def opened(path: Path) -> Ledger:
    return Ledger.open(
        path, plan=PLAN, configuration=CONFIGURATION, key=NoiseKey.from_file(path.with_name("noise.key"))
    )


def check_said(path: Path) -> None:
    """What verify said then it says now."""
    found = verify(path, register=path.with_name("noise.key.runs"))
    assert (found.released, found.planned, found.run.users, found.problems) == (2, 6, 5, ())
    assert (found.whole.epsilon, found.guarantee.epsilon) == pytest.approx((WHOLE, SO_FAR), rel=1e-9)
    [kept] = [note for note in found.notes if note.reason == "kept-sums"]
    assert IF_KEPT in kept


def format_of(path: Path) -> int:
    [(found,)] = rows(path, "SELECT format FROM run")
    return found


def test_it_is_read_as_it_was_and_nothing_is_written(path):
    before = {file: file.read_bytes() for file in path.parent.iterdir()}
    check_said(path)
    moved = [note for note in verify(path).notes if note.reason == "another-place"]
    assert len(moved) == len(rows(path, "SELECT 1 FROM sqlite_schema WHERE name = 'places'"))
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == before


def test_its_run_goes_on_to_its_last_round(path):
    with opened(path) as ledger:
        assert format_of(path) == 4
        check_said(path)
        run = ledger.resume()
        assert (run.round, run.model, run.state) == (2, b"model 1", b"state 1")
        assert ledger.history(HISTORY.counts) == HISTORY
        assert ledger.metrics("train") == {1: {"epsilon": 1.0}, 2: {"epsilon": 1.0}}
        assert ledger.bind_users(["ada"], "node-2") == set()
        with refused("too-often"):
            ledger.plan_round(2, ["dee"])
        for round, users in enumerate((["eva"], ["cy", "ben"], ["dee"], ["fay"]), 2):
            release(ledger, round, users)
    found = verify(path, register=path.with_name("noise.key.runs"))
    assert (found.released, found.problems) == (6, ())
    assert found.guarantee.epsilon == pytest.approx(WHOLE, rel=1e-9)


def test_a_start_that_is_refused_leaves_it_as_it_was(path):
    with refused("another-configuration"):
        Ledger.open(path, plan=PLAN, configuration={}, key=NoiseKey.from_file(path.with_name("noise.key")))
    assert format_of(path) == 3
    check_said(path)


def test_it_is_sealed_and_annotated(path):
    write_notes(path, {"who": "the library"})
    assert verify(path).run.said == {"who": "the library"}
    key = path.with_name("noise.key")
    seal(path, key)
    with refused("sealed"):
        Ledger.open(path, plan=PLAN, configuration=CONFIGURATION, key=KEY)
    NoiseKey.from_file(key, create=True)  # in its place: it names the register, which now has a name
    path.with_name("noise.key.runs").unlink()
    with refused("register-lost"):
        Ledger.open(path.with_name("next.db"), plan=PLAN, configuration={}, key=NoiseKey.from_file(key))


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        ([ADOPTIONS, "INSERT INTO adoptions VALUES ('2026-11-27', 2, 'noise.key.runs')"], "earlier-version"),
        (["INSERT INTO metrics VALUES ('evaluate on clients', 1, '{}')"], "earlier-version"),
        (["UPDATE run SET configuration = '{\"forward_client_metrics\": true}'"], "earlier-version"),
        (["UPDATE run SET format = 2"], "another-version"),
        (["DROP TABLE hosts", "CREATE TABLE hosts (user TEXT)"], "unreadable"),
        (
            ["DROP TABLE IF EXISTS places", "CREATE VIEW places AS SELECT 'x' AS at, 0 AS released, 0 AS inode"],
            "unreadable",
        ),
    ],
)
def test_what_no_ledger_of_today_can_say_is_refused_and_stays_as_it_was(path, statements, reason):
    edit(path, *statements)
    with refused(reason):
        verify(path)
    with (
        refused(reason)
        if reason != "unreadable" or "VIEW" not in statements[1]
        else pytest.raises(ValueError, match="views")
    ):
        opened(path)
    assert format_of(path) != 4


def test_a_counter_that_somebody_lowered_is_found_in_the_old_one_and_the_new(path):
    edit(path, "UPDATE users SET participations = 0 WHERE user = 'ada'")
    assert reasons(verify(path).problems) == ["other-counters"]
    opened(path).close()
    assert reasons(verify(path).problems) == ["other-counters"]


def test_its_key_begins_nothing_without_its_register_and_not_again_without_its_ledger(path):
    register, ledger = path.with_name("noise.key.runs"), path.read_bytes()
    path.unlink()
    with refused("begun-before"):
        opened(path)
    path.write_bytes(ledger)
    path.chmod(0o600)
    register.write_bytes(b"")
    with refused("register-lost"):
        opened(path)
    register.unlink()
    with refused("register-lost"):
        opened(path)
