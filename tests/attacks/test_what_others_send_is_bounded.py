"""Requests, ledgers and records of others: bombs, programs in the place of tables, and values of every wrong kind."""

import copy
import hashlib
import json
import re
import sqlite3
import tracemalloc
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run as command
from keeper_openings import opening_for
from ledgers import release
from plans import make_plan
from sql import edit, rows

from fedcgd import BISR, BLT, DPSGD, LambdaCGD, NoiseKey, Normalized, Participation
from fedcgd.keepers import Keeper, KeeperKey, Keepers, agree, mask
from fedcgd.keepers.agreement import sums_of
from fedcgd.keepers.record import read
from fedcgd.keepers.service import answer
from fedcgd.keepers.wire import answer_from_bytes, to_bytes
from fedcgd.ledger import Ledger, export, joint, released_model, verify
from fedcgd.mechanisms import BandInvMF, Dense
from fedcgd.optimisation.mechanism_json import describe, from_description
from fedcgd.support.records import read_only
from fedcgd.support.untrusted import MalformedError, clean

SIZE = 40
ROUNDS = Participation(rounds=12, min_separation=3)
MECHANISMS = [LambdaCGD(0.9), Normalized(BISR(4)), BandInvMF((1.0, -0.5, -0.1)), BLT((0.4, 0.1), (0.9, 0.5))]
WRONG: list[Any] = [
    None, True, "x", "", "\x1b[31m", -1, 0, 0.5, 10**400, -(10**400), 2**63, 1e308, float("inf"), float("nan"), [], [None], [[]],
    ["x"], {}, {"x": 1},
]  # fmt: skip


@contextmanager
def little_memory(most: int = 2**26) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in nested ones, the whole included."""
    yield path
    if isinstance(value, dict | list):
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(one, (*path, name))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    value = copy.deepcopy(value)
    inner = value
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = new
    return value


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Keepers]:
    path = tmp_path_factory.mktemp("keeper") / "court.key"
    return path, Keepers(cards=(KeeperKey.from_file(path, create=True).card("court"),), colluding=0)


def request(keepers: Keepers, mechanism: Any) -> tuple[dict[str, Any], bytes]:
    """(The line of a good request, the nodes in it)."""
    evaluation = sums_of(make_plan(DPSGD(), ROUNDS), size=2, keepers=keepers, users=60)
    agreement = agree(
        make_plan(mechanism, ROUNDS), size=SIZE, keepers=keepers, run="r", users=60, evaluation=evaluation
    )
    sent = [mask(np.arange(SIZE), agreement, round=0, attempt=0, present=keepers.names) for _ in range(2)]
    opening = opening_for("court", sent)
    line, nodes = to_bytes(agreement, opening).split(b"\n", 1)
    return json.loads(line), nodes


def asked(keeper: tuple[Path, Keepers], line: Any, nodes: bytes, question: str = "/check") -> dict[str, Any]:
    """What the keeper says, which is a refusal or (to /check) that all can be read."""
    answered = answer(*keeper, question, json.dumps(line).encode() + b"\n" + nodes)
    assert answered is not None
    said = json.loads(answered.split(b"\n")[0])
    assert set(said) == {"refused", "unreadable"}
    return said


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_a_request_with_any_wrong_value_is_refused(keeper: tuple[Path, Keepers], mechanism: Any) -> None:
    """Nothing else leaves the border: no error of a library, no answer."""
    line, nodes = request(keeper[1], mechanism)
    assert asked(keeper, line, nodes) == {"refused": "", "unreadable": []}
    refused = 0
    for path in places(line):
        for wrong in WRONG:
            changed = replaced(line, path, wrong)
            if changed != line or json.dumps(changed) != json.dumps(line):
                refused += bool(asked(keeper, changed, nodes)["refused"])
    assert refused > 15 * len(list(places(line)))
    assert read(keeper[0].with_name("court.key.record")).openings == ()


@pytest.mark.parametrize(
    "line",
    [b"", b"[" * 10**5, b"{" * 10**5, b"\xff\xfe", b'{"x": ' + b"9" * 5000 + b"}", b'"' + b"x" * 2**21 + b'"', b"null"],
    ids=range(7),
)
def test_bytes_that_are_no_request_are_refused(keeper: tuple[Path, Keepers], line: bytes) -> None:
    answered = answer(*keeper, "/open", line + b"\n")
    assert answered is not None
    assert json.loads(answered)["refused"]


def packed_zeros(count: int) -> str:
    return b64encode(zlib.compress(bytes(count), 9)).decode()


def test_a_packed_matrix_takes_no_more_memory_than_its_shape(keeper: tuple[Path, Keepers]) -> None:
    line, nodes = request(keeper[1], LambdaCGD(0.9))
    bomb = packed_zeros(2**28)
    for shape in ([12, 12], [12, 2], [2**14, 2**12], [2**40, 2**40], [-(2**12), -(2**16)], [0, 0], [2**28 // 8], []):
        description = {"name": "dense", "shape": shape, "band": bomb}
        with little_memory(), pytest.raises(ValueError, match=r"band|packed"):
            from_description(description)
        line["agreement"]["plan"]["mechanism"] = description
        with little_memory():
            assert asked(keeper, line, nodes)["refused"]


def test_what_would_be_too_much_work_is_refused_before_it_is_begun(
    keeper: tuple[Path, Keepers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of a matrix's inverse would be asked for, which is O(n³), and no mechanism of keepers' needs it."""
    line, nodes = request(keeper[1], LambdaCGD(0.9))
    for name in ("inverse_row", "columns"):
        monkeypatch.setattr(Dense, name, lambda *_: pytest.fail("worked on"))
    plan = ("agreement", "plan")
    for path, value, reason in (
        ((*plan, "mechanism"), describe(Dense("dense", np.eye(1, 12).repeat(12, axis=0))), "of mechanisms"),
        ((*plan, "participation", "rounds"), 10**8, "most 1000000"),
        (("agreement", "size"), 2**50, "size must"),
    ):
        with little_memory():
            assert reason in asked(keeper, replaced(line, path, value), nodes)["refused"]
    for wrong in (nodes[:-1], nodes + b"x", b""):
        assert asked(keeper, line, wrong)["refused"]
    ledger = recorded(tmp_path)
    edit(ledger, "UPDATE run SET plan = replace(plan, '\"rounds\": 8', '\"rounds\": 100000000')")
    with little_memory(), pytest.raises(ValueError, match="most 1000000"):
        verify(ledger)


def test_a_round_that_there_is_no_memory_for_is_not_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    keepers = Keepers.simulation(7, 1, colluding=0)
    agreement = agree(make_plan(LambdaCGD(0.9), ROUNDS), size=SIZE, keepers=keepers, run="r", users=60)
    with Keeper.simulation(keepers, 0) as one:
        sent = [mask(np.arange(SIZE), agreement, round=0, attempt=0, present=keepers.names) for _ in range(2)]
        opening = opening_for(one, sent)

        def full(*_: object) -> None:
            raise MemoryError

        with monkeypatch.context() as short:
            short.setattr("fedcgd.keepers.keeper.np.zeros", full)
            refused = one.reply(agreement, opening, check=False)
        assert "40 coordinates" in refused.reason
        assert one._record.openings() == ()
        assert len(one.answer(agreement, opening)) == SIZE


# Ledgers, registers and keepers' records of others.


def recorded(folder: Path) -> Path:
    """The ledger of two rounds of eight, with the register of its key beside it."""
    plan = make_plan(LambdaCGD(0.8), Participation(rounds=8, min_separation=2))
    key = NoiseKey.from_file(folder / "noise.key", create=True)
    with Ledger.open(folder / "run.db", plan=plan, configuration={"cohort_size": 2}, key=key) as ledger:
        layout = json.dumps([["w", "b"], [[2, 1], []], ["float32", "float32"]])
        for round in range(2):
            users = [f"user-{2 * round}", f"user-{2 * round + 1}"]
            release(
                ledger, round, users, np.ones(3, np.float32).tobytes(), b"", layout, metrics={"releases": round + 1}
            )
        ledger.skip(2, "too few answers")
    return folder / "run.db"


READERS: list[Callable[[Path], object]] = [
    verify,
    export,
    lambda path: joint([path]),
    lambda path: command("ledger", "show", path),
]
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {} FROM n"
USERS = "i AS id, 'user-' || i AS user, 1 AS participations, 0 AS last_round"
FOREIGN = "has views or virtual tables"
OTHER = "its table 'users' is another one"
EDITED: dict[str, tuple[str, list[str]]] = {
    "endless": (FOREIGN, ["DROP TABLE users", f"CREATE VIEW users AS {ENDLESS.format(USERS)}"]),
    "another view": (FOREIGN, ["CREATE VIEW other AS SELECT 1"]),
    "virtual": (FOREIGN, ["DROP TABLE users", "CREATE VIRTUAL TABLE users USING fts5 (id, user, last_round)"]),
    "calculated": (OTHER, [
        "DROP TABLE users", "CREATE TABLE users (id INTEGER PRIMARY KEY, user TEXT, participations INTEGER, "
        "last_round INTEGER AS (length(zeroblob(1000000000))) STORED) STRICT",
    ]),
    "texts": (OTHER, [
        "DROP TABLE users", "CREATE TABLE users (id INTEGER PRIMARY KEY, user TEXT NOT NULL UNIQUE, "
        "participations INTEGER NOT NULL, last_round TEXT NOT NULL) STRICT",
    ]),
    "anything": (OTHER, ["DROP TABLE users", "CREATE TABLE users (id, user, participations, last_round)"]),
    "a bomb": ("more than", [f"UPDATE attempts SET users = x'{zlib.compress(bytes(2**28), 9).hex()}' WHERE round = 1"]),
    "a cut cohort": ("a cohort on record cannot be unpacked", ["UPDATE attempts SET users = x'00'"]),
    "no plan": ("a plan has no 'mechanism'", ["UPDATE run SET plan = '{}'"]),
    "half a plan": ("the plan on record is no JSON: Expecting property name", ["UPDATE run SET plan = '{'"]),
    "a list": ("the plan on record is [], and must be a JSON object", ["UPDATE run SET plan = '[]'"]),
    # As bytes written into the file by hand put them there, past what the table allows.
    "another type": ("it is damaged", [
        "PRAGMA ignore_check_constraints = ON", "UPDATE attempts SET users = 1000000000, nonce = 'x' WHERE round = 1",
        "PRAGMA writable_schema = ON", "UPDATE sqlite_schema SET sql = sql || ' STRICT' WHERE name = 'attempts'",
    ]),
}  # fmt: skip
"""What its readers say, and what was done to the ledger."""


@pytest.mark.parametrize("what", EDITED)
@pytest.mark.parametrize("use", READERS, ids=["verify", "export", "joint", "show"])
def test_a_ledger_that_was_made_to_mislead_is_refused(tmp_path: Path, use: Callable[[Path], object], what: str) -> None:
    path, (words, statements) = recorded(tmp_path), EDITED[what]
    loose = "UPDATE sqlite_schema SET sql = replace(sql, 'STRICT', '') WHERE name = 'attempts'"
    if what == "another type":
        edit(path, "PRAGMA writable_schema = ON", loose)
    edit(path, *statements)
    said = ""
    with little_memory():
        try:
            done = use(path)
        except ValueError as error:
            said = str(error)
        else:
            assert done.exit_code == 2
            said = " ".join(done.output.split())
    assert words in said


@pytest.mark.parametrize("name", ["noise.key.runs", "court.key.record"])
@pytest.mark.parametrize("table", ["record", "runs", "run", "openings"])
def test_a_program_in_a_record_is_refused(tmp_path: Path, name: str, table: str) -> None:
    path = recorded(tmp_path)
    KeeperKey.from_file(tmp_path / "court.key", create=True)
    view = f"CREATE VIEW {table} AS {ENDLESS.format('i AS name')}"
    edit(tmp_path / name, f"DROP TABLE IF EXISTS {table}", view)
    with pytest.raises(ValueError, match="virtual tables"):
        read(tmp_path / name) if name == "court.key.record" else verify(path, register=tmp_path / name)


def test_no_query_does_more_than_a_file_of_its_size_can_ask_for(tmp_path: Path) -> None:
    """A damaged tree of pages can be read for ever, without a view."""
    path = recorded(tmp_path)
    with read_only(path) as connection, pytest.raises(sqlite3.OperationalError, match="interrupted"):
        for _ in connection.execute(ENDLESS.format("i")):
            pass
    with pytest.raises(MalformedError, match="more work"), read_only(path) as connection:
        connection.execute(ENDLESS.format("count(*)")).fetchone()
    with read_only(path) as connection, pytest.raises(sqlite3.DataError, match="too big"):
        connection.execute("SELECT zeroblob(100000000)").fetchone()


def test_a_ledger_with_any_wrong_value_in_its_settings_is_refused_or_read(tmp_path: Path) -> None:
    """No error of a library: `ValueError`, or a verification with its problems."""
    path = recorded(tmp_path)
    [(plan, configuration)] = rows(path, "SELECT plan, configuration FROM run")
    more = {
        "budget": {"epsilon": 9.0, "delta": 1e-5, "after": {"a": json.loads(plan)}},
        "keepers": {"keepers": {"a": "1", "b": "2"}, "colluding": 1, "away": 0, "digest": "d"},
        "evaluation": {"plan": json.loads(plan)},
    }
    described = {"plan": json.loads(plan), "configuration": {**json.loads(configuration), **more}}
    seen = set()
    for place in places(described):
        if "mechanism" in place or not place:
            continue  # as in a request
        for wrong in (None, "x", {}, 10**400, float("nan")):
            changed = replaced(described, place, wrong)
            with closing(sqlite3.connect(path)) as connection, connection:
                texts = json.dumps(changed["plan"]), json.dumps(changed["configuration"])
                connection.execute("UPDATE run SET plan = ?, configuration = ?", texts)
            try:
                seen.add(bool(verify(path).problems))
            except ValueError:
                seen.add("refused")
    assert seen == {True, "refused"}


@pytest.mark.parametrize(
    "layout",
    ["[", "7", "[[]]", '[["w"], [[3]]]', '[["w"], [[-3]], ["float32"]]', '[["w"], [["3"]], ["float32"]]',
     '[[7], [[3]], ["float32"]]', '[["w"], [[3], [0]], ["float32"]]', '[["w"], [[1e999]], ["float32"]]', "[" * 10**5],
)  # fmt: skip
def test_a_layout_that_describes_no_model_is_refused(tmp_path: Path, layout: str) -> None:
    path = recorded(tmp_path)
    assert set(released_model(path)) == {"w", "b"}
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE latest SET layout = ?", (layout,))
    with pytest.raises(ValueError, match=r"layout|arrays"):
        released_model(path)


# Texts of others, wherever they are shown.

FORGED = "no\n2026-11-26 INFO round 7 released\x1b[2J\x9b31m\u202egnp.exe\u2028end\x07"


def is_clean(text: str) -> bool:
    return text.isprintable()


def test_a_text_of_others_is_one_line_that_no_terminal_obeys() -> None:
    assert is_clean(clean(FORGED))
    assert clean("ε ≤ 8 at δ = 10⁻⁵, “Zoë”") == "ε ≤ 8 at δ = 10⁻⁵, “Zoë”"
    assert len(clean("x" * 10**6)) <= 501
    assert clean("x" * 500) == "x" * 500
    for number in [*range(0x300), 0x200B, 0x200E, 0x2029, 0xFEFF, 0xE0001, 0xD800]:
        assert is_clean(clean(chr(number))), number


def test_a_refusal_is_clean_wherever_it_goes(keeper: tuple[Path, Keepers]) -> None:
    agreement = agree(make_plan(LambdaCGD(0.9), ROUNDS), size=SIZE, keepers=keeper[1], run="r", users=60)
    said = json.dumps({"refused": FORGED * 1000, "unreadable": []}).encode() + b"\n"
    refusal = answer_from_bytes(said, agreement)
    assert refusal is not None
    assert is_clean(refusal.reason)
    assert len(refusal.reason) <= 501


HTML = "<img src=x onerror=alert(1)> [x](javascript:alert(1)) ![](http://evil) `code` | cell"


def forged_ledger(folder: Path, text: str) -> Path:
    """A ledger in which every text is `text` that a ledger may have as it likes."""
    path = recorded(folder)
    [(plan, configuration)] = rows(path, "SELECT plan, configuration FROM run")
    changed = json.loads(configuration) | {
        "budget": {"epsilon": 9.0, "delta": 1e-5, "after": {text: json.loads(plan)}},
        "keepers": {"keepers": {text: text, "b": text}, "colluding": 1, "away": 0, "digest": text},
        "identity": text,
        text: text,
    }
    with closing(sqlite3.connect(path)) as connection, connection:
        new = json.dumps(changed, sort_keys=True)
        digest = hashlib.sha256(f"{plan} {new}".encode()).hexdigest()
        connection.execute(
            "UPDATE run SET configuration = ?, configuration_hash = ?, created = ?, sealed = ?, stream_id = ?, "
            "key_fingerprint = ?",
            (new, digest, text, text, text, text),
        )
        connection.execute("UPDATE skips SET reason = ?, at = ?", (text, text))
        connection.execute("UPDATE attempts SET planned = ?, ended = ?", (text, text))
        connection.execute("UPDATE metrics SET kind = ?", (text,))
        connection.execute("INSERT INTO places VALUES (?, 1, 1), (?, 1, 2)", (text, text))
    return path


@pytest.mark.parametrize("words", [["show"], ["verify"], ["compose"]], ids=" ".join)
def test_no_command_prints_what_a_terminal_obeys(tmp_path: Path, words: list[str]) -> None:
    path = forged_ledger(tmp_path, FORGED)
    said = command("ledger", *words, path)
    assert all(is_clean(line) for line in said.output.split("\n"))
    assert "7 released" in " ".join(said.output.split())  # within a line
    assert not [line for line in said.output.split("\n") if line.startswith("2026-11-26 INFO")]


def test_a_statement_in_markdown_has_no_html_link_or_picture_of_others(tmp_path: Path) -> None:
    path = forged_ledger(tmp_path, HTML)
    output = tmp_path / "statement.md"
    command("report", path, "-o", output)
    text = output.read_text()
    assert "alert(1)" in text
    assert "<" not in text
    assert not re.findall(r"(?<!\\)[\[`]", text)
    table = [line for line in text.split("\n") if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {3}
    page = tmp_path / "report.html"
    command("report", path, "-o", page)
    assert "<img" not in page.read_text()


def test_a_keepers_record_with_any_wrong_value_in_its_agreement_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "court.key"
    keepers = Keepers(cards=(KeeperKey.from_file(path, create=True).card("court"),), colluding=0)
    line, _ = request(keepers, LambdaCGD(0.9))
    record = tmp_path / "court.key.record"
    good = line["agreement"]
    for place in places(good):
        for wrong in (None, [], {}, "\x1b[2J"):
            with closing(sqlite3.connect(record)) as connection, connection:
                connection.execute("UPDATE run SET agreement = ?", (json.dumps(replaced(good, place, wrong)),))
            said = command("keeper", "show", path)
            assert said.exit_code in (0, 2), place
            assert all(is_clean(line) for line in said.output.split("\n"))
