"""The SQLite file under a ledger: its tables, and connections that are durable at every commit."""

import hashlib
import json
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcgd.ledger import openings
from fedcgd.ledger.participation_counter import USERS
from fedcgd.ledger.transactions import MEMORY, make_tables, open_file
from fedcgd.support.records import check_tables, read_only
from fedcgd.support.untrusted import MalformedError, Optional, clean, inflate, parse_json

FORMAT = 3

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
{openings.SCHEMA}"""


def connect(path: Path | str) -> sqlite3.Connection:
    """A connection that makes the file (mode 0600) and its tables if they are not there yet."""
    if isinstance(path, Path) and str(path) == MEMORY:
        raise ValueError(f'a ledger in memory is the text "{MEMORY}", not a Path, which would be a file of that name')
    connection = open_file(path, "a ledger", partial(make_tables, schema=_SCHEMA))
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA cache_size = -65536")  # KiB: the pages that a cohort of 10,000 of many users touches
    return connection


@dataclass(frozen=True)
class StoredRun:
    """The row of the table `run`: which run a ledger is of, column by column. Plan and configuration are as they were hashed."""

    id: int
    format: int
    created: str
    plan: str
    configuration: str
    configuration_hash: str
    stream_id: str
    key_fingerprint: str
    simulated: int
    owner: str
    sealed: str | None

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration, read."""
        found: dict[str, Any] = parse_json(self.configuration, _CONFIGURATION, "the configuration on record")
        return found

    @property
    def planned(self) -> dict[str, Any]:
        """The plan's description, read."""
        found: dict[str, Any] = parse_json(self.plan, dict, "the plan on record")
        return found


def stored_run(connection: sqlite3.Connection) -> StoredRun:
    """The run of a ledger. Raises sqlite3.OperationalError for another kind of file, which lacks some of the columns."""
    columns = [field.name for field in fields(StoredRun)]
    row = connection.execute(f"SELECT {', '.join(columns)} FROM run").fetchone()  # noqa: S608
    run = StoredRun(*row)
    sealed = None if run.sealed is None else clean(run.sealed)
    return replace(run, created=clean(run.created), configuration_hash=clean(run.configuration_hash), sealed=sealed)


_CONFIGURATION: dict[Any, Any] = {
    "budget": Optional({"epsilon": float, "delta": float, "after": {str: dict}}),
    "evaluation": Optional({"plan": dict, str: object}),
    "evaluation_of": Optional(str),
    openings.KEEPERS: Optional({"keepers": {str: str}, "colluding": int, "away": int, "digest": str, str: object}),
    "cohort_size": Optional(int),
    str: object,
}
"""What the ledger itself reads of a configuration; the rest is shown and compared."""


@contextmanager
def reader(path: Path | str) -> Iterator[sqlite3.Connection]:
    """A connection that can only read, and sees one moment of a ledger that may be in use. ValueError if it is no ledger.

    Nothing is written, also not beside the ledger, unless it is in use or was left by a process that was killed.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no ledger at {path}")
    # Whoever has it open has a -wal beside it. Else SQLite would make one, and leave it, or fail where nobody may write.
    unused, changed = not _in_use(path), path.stat().st_mtime_ns
    try:
        with read_only(path, immutable=unused) as connection:
            connection.execute("BEGIN")
            if connection.execute("SELECT format FROM run").fetchall() != [(FORMAT,)]:
                raise ValueError(
                    f"{path} holds no run, or one of another version of fedcgd (this one reads format {FORMAT})"
                )
            check_tables(connection, _SCHEMA)
            yield connection
            if unused and (_in_use(path) or path.stat().st_mtime_ns != changed):
                raise ValueError(f"{path} came into use while it was read; try again")
    except (sqlite3.DatabaseError, MalformedError) as error:
        raise ValueError(f"{path} cannot be read as a ledger: {clean(error)}{_advice(path, error)}") from error


def _in_use(path: Path) -> bool:
    return Path(f"{path}-wal").exists()


def _advice(path: Path, error: Exception) -> str:
    if "readonly" in str(error) or "unable to open" in str(error):
        return f"; its run is going on or was killed: copy it, with {path.name}-wal, to where you may write"
    if "file is not a database" in str(error) or "no such table: run" in str(error) or "is another one" in str(error):
        return "; give the file that the run calls its ledger, not the key's or the models beside it"
    return "; if no whole copy is left, the run counts with all of its plan"


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


_MOST_UNKNOWN = 100_000  # of a cohort's users may be missing from the table of users: they are counted as a problem


def unpack_ids(packed: bytes, users: int) -> NDArray[np.int64]:
    """What `pack_ids` packed, where so many `users` are on record. Raises MalformedError for anything else."""
    unpacked = inflate(packed, 8 * (users + _MOST_UNKNOWN), "a cohort on record")
    if len(unpacked) % 8:
        raise MalformedError(f"a cohort on record has {len(unpacked)} bytes, and 8 for each user are expected")
    return np.cumsum(np.frombuffer(unpacked, "<i8"), dtype=np.int64)
