"""SQLite files that are durable at every commit, and transactions that are done or undone, also when the disk fails."""

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from fedcgd.support.records import make_record, record_name

MEMORY = ":memory:"


class Closable(ABC):
    """Something that `close` ends, and so does the end of a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End it; what is recorded stays."""


class _InMemory(sqlite3.Connection):
    """A file in memory: it goes with whoever holds it, in whichever thread, and Python 3.13 warns of none that is left open."""

    def __del__(self) -> None:
        self.close()


def open_file(path: Path | str, what: str, prepare: Callable[[sqlite3.Connection], object]) -> sqlite3.Connection:
    """A connection to `path`, made if there is none (readable by its owner only), once `prepare` has made its tables.

    Raises:
        ValueError: if the file is not `what`, or was emptied.
        sqlite3.OperationalError: if it is locked, the disk is full, or nobody may write: not a matter of what the file holds.
    """
    if path != MEMORY:
        make_record(Path(path))
        try:
            record_name(Path(path))
        except ValueError as error:
            raise ValueError(
                f"{path} is not {what}: it {error}. Put it back; delete it only if nothing was recorded in it"
            ) from None
    kind = _InMemory if path == MEMORY else sqlite3.Connection
    connection = sqlite3.connect(
        path, timeout=60.0, isolation_level=None, factory=kind, check_same_thread=path != MEMORY
    )
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        with transaction(connection):
            prepare(connection)
    except sqlite3.DatabaseError as error:
        connection.close()
        if isinstance(error, sqlite3.OperationalError):
            raise
        raise ValueError(f"{path} is not {what}: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def make_tables(connection: sqlite3.Connection, schema: str) -> bool:
    """Make the tables of `schema` in a file that has none yet; whether it had none."""
    new = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'run'").fetchone() is None
    if new:
        for statement in schema.split(";"):
            connection.execute(statement)
    return new


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of the block or nothing of it; on the disk when the block is left.

    A COMMIT that fails (full disk, input or output error) is undone too, so that no later read sees what is not on the disk.
    A connection on which even that fails is closed. Raises sqlite3.OperationalError, with the file and what to do, if the disk is
    full or the file cannot be written.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            _undo(connection)
            raise
    except sqlite3.OperationalError as error:
        advice = next((what for word, what in _ADVICE.items() if word in str(error)), None)
        if advice is None:
            raise
        raise sqlite3.OperationalError(f"{_name(connection)}: {error}; {advice}") from error


_ON_RECORD = "what was recorded before stays, and a run goes on from its last release when it is started again"
MAKE_ROOM = f"make room on that disk; {_ON_RECORD}"
_ADVICE = {
    "full": MAKE_ROOM,
    "disk I/O error": f"look at that disk; {_ON_RECORD}",
    "readonly": "this process needs to write to it, and to the folder that it is in",
    "locked": "another process writes to it, and has for a minute; end that one, or wait for it",
}
"""A word of SQLite's message → what to do."""


def _name(connection: sqlite3.Connection) -> str:
    try:
        rows = connection.execute("PRAGMA database_list").fetchall()
    except sqlite3.Error:  # it is closed, because not even an undo worked
        rows = []
    return next((file for _, schema, file in rows if schema == "main" and file), "the record")


def _undo(connection: sqlite3.Connection) -> None:
    if not connection.in_transaction:  # SQLite undoes by itself after some errors
        return
    try:
        connection.execute("ROLLBACK")
    except sqlite3.Error:
        connection.close()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
