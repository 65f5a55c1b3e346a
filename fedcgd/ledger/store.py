"""The SQLite file under a ledger: its tables, the row that says which run it is of, who reads it, and who alone may write."""

import hashlib
import json
import os
import socket
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcgd.ledger.texts import refuse
from fedcgd.noise import STREAM
from fedcgd.noise.keys import NoiseKey
from fedcgd.plan import Plan
from fedcgd.support.records import check_tables, make_tables, now, open_file, read_only, transaction
from fedcgd.support.untrusted import MalformedError, Optional, clean, inflate, parse_json

FORMAT = 4
_EARLIER = 3
_UNSAID = {
    "forwarded metrics of clients without noise, which no ε covers": "SELECT 1 FROM metrics WHERE kind = 'evaluate on clients' "
    "UNION SELECT 1 FROM run WHERE configuration LIKE '%\"forward_client_metrics\": true%'",
    "was declared the latest of a run without a register": "SELECT 1 FROM sqlite_schema WHERE name = 'adoptions'",
}
"""What a ledger of the earlier format may say and none of today can → a query that has a row then."""

USERS = """CREATE TABLE users (
    id INTEGER PRIMARY KEY,
    user TEXT NOT NULL UNIQUE,
    participations INTEGER NOT NULL,
    last_round INTEGER NOT NULL
) STRICT"""
"""The table that participations are counted in."""

_SCHEMA = f"""
CREATE TABLE run (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    format INTEGER NOT NULL,
    created TEXT NOT NULL,
    plan TEXT NOT NULL,
    configuration TEXT NOT NULL,
    configuration_hash TEXT NOT NULL,
    stream_id TEXT NOT NULL,
    key_fingerprint TEXT NOT NULL,
    simulated INTEGER NOT NULL,
    owner TEXT NOT NULL,
    sealed TEXT
) STRICT;
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    nonce BLOB CHECK (length(nonce) = 16),
    state TEXT NOT NULL CHECK (state IN ('planned', 'aggregated', 'opening', 'released', 'spent', 'abandoned')),
    users BLOB NOT NULL,
    planned TEXT NOT NULL,
    aggregated TEXT,
    ended TEXT,
    UNIQUE (round, attempt)
) STRICT;
CREATE UNIQUE INDEX released_once ON attempts (round) WHERE state = 'released';
CREATE UNIQUE INDEX one_in_flight ON attempts ((1)) WHERE state IN ('planned', 'aggregated');
CREATE UNIQUE INDEX spent_once ON attempts (round) WHERE state = 'spent';
CREATE UNIQUE INDEX one_opening ON attempts ((1)) WHERE state = 'opening';
CREATE TABLE openings (
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    list_hash BLOB NOT NULL CHECK (length(list_hash) = 32),
    keepers TEXT NOT NULL,
    PRIMARY KEY (round, attempt)
) STRICT;
CREATE TABLE skips (
    id INTEGER PRIMARY KEY,
    round INTEGER NOT NULL,
    at TEXT NOT NULL,
    reason TEXT NOT NULL
) STRICT;
{USERS};
CREATE TABLE hosts (
    user TEXT PRIMARY KEY,
    node TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE metrics (
    kind TEXT NOT NULL,
    release INTEGER NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (kind, release)
) STRICT, WITHOUT ROWID;
CREATE TABLE latest (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    round INTEGER NOT NULL,
    model_bytes INTEGER NOT NULL,
    state_bytes INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    layout TEXT NOT NULL
) STRICT;
CREATE TABLE places (at TEXT NOT NULL, released INTEGER NOT NULL, inode INTEGER NOT NULL) STRICT;
CREATE TABLE notes (name TEXT PRIMARY KEY, text TEXT NOT NULL) STRICT
"""

BUDGET = (
    "budget"  # in a run's configuration: the joint ε and δ, and the plans of the earlier runs that count, by their ids
)
EVALUATION = "evaluation"  # in the training's: the plan of its evaluations, and what is measured
EVALUATION_OF = "evaluation_of"  # in the evaluations': the stream of the training
KEEPERS = "keepers"  # how many, how many may collude or be away, and who they are
MOST_KEEPERS = 64

_CONFIGURATION: dict[Any, Any] = {
    BUDGET: Optional({"epsilon": float, "delta": float, "after": {str: dict}}),
    EVALUATION: Optional({"plan": dict, str: object}),
    EVALUATION_OF: Optional(str),
    KEEPERS: Optional({"keepers": {str: str}, "colluding": int, "away": int, "digest": str, str: object}),
    "cohort_size": Optional(int),
    str: object,
}
"""What the ledger itself reads of a configuration; the rest is shown and compared."""


@dataclass(frozen=True)
class RunSettings:
    """What defines a run, as it is written and hashed: its plan, its configuration and its key."""

    plan: str
    configuration: str
    key_fingerprint: str
    simulated: int

    @classmethod
    def from_plan(cls, plan: Plan, configuration: Mapping[str, Any], key: NoiseKey) -> "RunSettings":
        """Raises ValueError for a configuration that JSON cannot hold."""
        described = to_json({**configuration, "noise stream": STREAM})
        return cls(to_json(plan.to_description()), described, key.fingerprint, int(key.simulated))

    @property
    def configuration_hash(self) -> str:
        """SHA-256 of plan and configuration, which the ledger keeps next to them."""
        return sha256(f"{self.plan} {self.configuration}")

    @property
    def run_hash(self) -> str:
        """The same for runs of the same plan, configuration and key, and of no others."""
        return sha256(f"{self.plan} {self.configuration} {self.key_fingerprint}")


@dataclass(frozen=True)
class StoredRun:
    """The row of the table `run`: which run a ledger is of."""

    defined: RunSettings
    configuration_hash: str
    stream_id: str
    created: str
    sealed: str | None = None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration, read."""
        found: dict[str, Any] = parse_json(self.defined.configuration, _CONFIGURATION, "the configuration on record")
        return found

    @cached_property
    def planned(self) -> dict[str, Any]:
        """The plan's description, read."""
        found: dict[str, Any] = parse_json(self.defined.plan, dict, "the plan on record")
        return found


def evaluation_ledger(path: Path) -> Path:
    """Where the evaluations of the run recorded at `path` are recorded."""
    return path.with_name(f"{path.name}.evaluation")


def evaluation_plan(configuration: Mapping[str, Any]) -> Plan | None:
    """The plan of the evaluations of a run with this configuration; None if it has none."""
    found = configuration.get(EVALUATION)
    return None if found is None else Plan.from_description(found["plan"])


def stored_run(connection: sqlite3.Connection) -> StoredRun:
    """The run of a ledger. Raises sqlite3.OperationalError for another kind of file, which lacks some of the columns."""
    columns = "plan, configuration, key_fingerprint, simulated, configuration_hash, stream_id, created, sealed"
    row = connection.execute(f"SELECT {columns} FROM run").fetchone()  # noqa: S608
    settings_hash, stream_id, created, sealed = row[4:]
    sealed = None if sealed is None else clean(sealed)
    return StoredRun(RunSettings(*row[:4]), clean(settings_hash), stream_id, clean(created), sealed)


def write_run(connection: sqlite3.Connection, defined: RunSettings, stream_id: str) -> None:
    """Let the ledger be that of a new run."""
    values = (*vars(defined).values(), defined.configuration_hash, stream_id, now(), FORMAT)
    connection.execute(
        "INSERT INTO run (id, plan, configuration, key_fingerprint, simulated, configuration_hash, stream_id, created, format, "
        "owner) VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?, '')",
        values,
    )


def connect(path: Path | str) -> sqlite3.Connection:
    """A connection that makes the file (mode 0600) and its tables if they are not there yet."""
    return open_file(path, "a ledger", partial(make_tables, schema=_SCHEMA))


def migrate(connection: sqlite3.Connection, path: Path | str, schema: str = "main") -> None:
    """Let a ledger of format 3 be one of today, inside the caller's transaction, so that a kill leaves the old one or the new.

    Drafts of that format lack tables. What it says that none of today can is refused, and so are other formats.

    Args:
        connection: of the ledger, which is left alone if it is one of today.
        path: what messages call it.
        schema: where tables are made: in the ledger, or in "temp", by a reader, for whom nothing else is done.
    """
    formats = connection.execute("SELECT format FROM run").fetchall()
    if formats == [(FORMAT,)]:
        return
    if formats != [(_EARLIER,)]:
        raise refuse("another-version", path=path, format=FORMAT)
    try:
        check_tables(connection, _SCHEMA)
    except MalformedError as error:
        raise refuse("unreadable", path=path, error=error) from error
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    for what, query in _UNSAID.items():
        if connection.execute(query).fetchone():
            raise refuse("earlier-version", path=path, what=what)
    # Of indices drafts lack only those for rounds of keepers, which they could not have.
    for statement in _SCHEMA.split(";"):
        kind, name = statement.split()[1:3]
        if kind == "TABLE" and name not in tables:
            connection.execute(statement.replace("TABLE ", f"TABLE {schema}.", 1))
    if schema == "main":
        connection.execute("UPDATE run SET format = ?", (FORMAT,))


def write_notes(path: Path | str, notes: Mapping[str, str]) -> None:
    """Keep in a ledger who runs it, what for and on which data. Raises ValueError if there is none."""
    with reader(path):  # it is a ledger: `connect` would make one of any other database
        pass
    with closing(connect(path)) as connection:
        with transaction(connection):
            migrate(connection, path)
            connection.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?)", notes.items())
        checkpoint(connection)


@contextmanager
def reader(path: Path | str) -> Iterator[sqlite3.Connection]:
    """A connection that can only read, and sees one moment of a ledger that may be in use. ValueError if it is no ledger.

    Nothing is written, also not next to the ledger, unless it is in use or was left by a process that was killed.
    """
    path = Path(path)
    if not path.is_file():
        raise refuse("no-ledger", path=path)
    # A process that has it open has a -wal next to it. Else SQLite would make one, and leave it, or fail where nobody may write.
    log = Path(f"{path}-wal")
    unused, changed = not log.exists(), path.stat().st_mtime_ns
    try:
        with read_only(path, immutable=unused) as connection:
            connection.execute("BEGIN")
            connection.execute("PRAGMA query_only = OFF")  # of tables in memory; the file is open for reading only
            migrate(connection, path, "temp")
            connection.execute("PRAGMA query_only = ON")
            check_tables(connection, _SCHEMA)
            yield connection
            if unused and (log.exists() or path.stat().st_mtime_ns != changed):
                raise refuse("came-into-use", path=path)
    except (sqlite3.DatabaseError, MalformedError) as error:
        words = str(error)
        if "readonly" in words or "unable to open" in words:
            raise refuse("unreadable-while-in-use", path=path, error=clean(error)) from error
        raise refuse("unreadable", path=path, error=clean(error)) from error


def checkpoint(connection: sqlite3.Connection) -> None:
    """Copy all that is committed into the file itself, so that it is whole without its `-wal`.

    A reader of an older state makes this wait, and after the time limit fail: the `-wal` file then still holds the rest.
    """
    with suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA wal_checkpoint(FULL)").fetchall()


def to_json(value: Any) -> str:
    """One text for equal values. Raises ValueError for what JSON cannot hold, NaN included."""
    return json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=True)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def pack_ids(ids: NDArray[np.int64]) -> bytes:
    """Sorted user numbers as their compressed differences: about two bytes each for a cohort of many."""
    return zlib.compress(np.diff(np.sort(ids), prepend=0).astype("<i8").tobytes(), level=1)


def unpack_ids(packed: bytes, users: int) -> NDArray[np.int64]:
    """What `pack_ids` packed, where so many `users` are on record. Raises MalformedError for anything else."""
    most = users + 100_000  # so many may be missing from the table of users: they are counted as a problem
    unpacked = inflate(packed, 8 * most, "a cohort on record")
    if len(unpacked) % 8:
        raise MalformedError(f"a cohort on record has {len(unpacked)} bytes, and 8 for each user are expected")
    return np.cumsum(np.frombuffer(unpacked, "<i8"), dtype=np.int64)


_held: dict[tuple[Path, int], tuple["RunLock", int | None]] = {}
"""By file and process (a forked one inherits no lock): who has it, and the open file.

A second start of a run in one process takes the lock over, and shuts the first one out.
"""


class RunLock:
    """Held until `close` or the end of the process: one process at a time has a ledger open for writing.

    It is on a file of its own, run.db-lock, because closing the ledger's own would end SQLite's locks.
    """

    def __init__(self, ledger: Path) -> None:
        """Raises ValueError, with the other process, if one that lives has the ledger open."""
        self._path = ledger.with_name(f"{ledger.name}-lock")
        self._key = self._path, os.getpid()
        if self._key not in _held:
            _held[self._key] = self, _locked(self._path, ledger)

    def take_over(self) -> None:
        """From here on this holds the lock, if another one of this process did: what is refused before leaves it to that one."""
        _held[self._key] = self, _held[self._key][1]

    def close(self) -> None:
        """Let others open the ledger."""
        holder, file = _held.get((self._path, os.getpid()), (None, None))
        if holder is self:
            del _held[self._key]
            self._path.unlink(missing_ok=True)
            if file is not None:
                os.close(file)


def _locked(path: Path, ledger: Path) -> int | None:
    """The open and locked file; None where the system has no such locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        holder = os.read(file, 200).decode(errors="replace").strip()
        os.close(file)
        raise refuse("in-another-process", path=ledger, holder=holder or "unknown") from error
    except OSError:  # a file system without locks
        os.close(file)
        return None
    with suppress(OSError):  # a full disk: then nobody is told who holds it
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}, since {now()}\n".encode())
    return file
