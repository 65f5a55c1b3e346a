"""SQLite files that somebody relies on: made with their first line, closed to others, durable at every commit.

They are read without trust in who wrote them; transactions are done or undone, also when the disk fails.
"""

import os
import secrets
import sqlite3
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from fedcgd.support.files import check_private, sync_folder
from fedcgd.support.untrusted import MalformedError

MEMORY = ":memory:"
_FIRST_LINE = "CREATE TABLE IF NOT EXISTS record (name TEXT NOT NULL) STRICT"
_UNNAMED = """SELECT 1 FROM sqlite_schema AS t, pragma_table_info(t.name) AS c
    WHERE t.name IN ('run', 'runs') AND c.name = 'stream_id'"""
"""A row for ledgers and registers of an earlier version, which had no first line."""
_STEPS = 100_000  # of SQLite's machine, between two looks at how many there were


def check_record(path: Path, what: str) -> None:
    """Raise ValueError, with the remedy, if others may read or write the record at `path`, or put another file in its place.

    Args:
        path: the file, which need not be there yet.
        what: what the message calls it.
    """
    path = path.resolve()
    if path.is_dir():
        raise ValueError(f"{what} {path} is a folder; name a file in it, such as {path / 'run.db'}")
    if path.exists():
        check_private(path, what)
    folder = path.parent
    if folder.exists() and os.name != "nt":
        found = folder.stat()
        others = stat.S_IWOTH | (0 if _is_private_group(found) else stat.S_IWGRP)
        # A sticky one lets nobody replace another's file.
        if found.st_mode & others and not found.st_mode & stat.S_ISVTX:
            raise ValueError(
                f"{what} {path} is in a folder of mode {stat.S_IMODE(found.st_mode):04o}: others may put another file in its "
                f"place; run chmod go-w {folder}, or take a folder of its own"
            )


def _is_private_group(folder: os.stat_result) -> bool:
    """Whether the folder's group is that of its owner alone, as systems make one for each user who then shares nothing by it."""
    try:
        import grp
        import pwd

        owner, group = pwd.getpwuid(folder.st_uid).pw_name, grp.getgrgid(folder.st_gid)
    except (ImportError, KeyError):  # on a system without such groups; where nobody has that number
        return False
    return group.gr_name == owner and set(group.gr_mem) <= {owner}


def make_record(path: Path) -> None:
    """Make an SQLite file with its first line, a name that tells it from one that is made anew, unless there is a file.

    A reader sees no file or a whole one, readable by its owner only, and of two makers the first wins. So a file without a
    line was emptied, or is of an earlier version: one that still has its tables is given a line.

    Args:
        path: the file; its folder is made too.
    """
    if path.exists():
        with suppress(ValueError):  # which `record_name` says to its callers
            if not record_name(path):
                _write_name(path)
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        _write_name(part)
        with suppress(FileExistsError):
            path.hardlink_to(part)
    finally:
        part.unlink()
    sync_folder(path.parent)


def _write_name(path: Path) -> None:
    with closing(sqlite3.connect(path, timeout=60.0, isolation_level=None)) as connection, transaction(connection):
        connection.execute(_FIRST_LINE)
        connection.execute(
            "INSERT INTO record SELECT ? WHERE NOT EXISTS (SELECT 1 FROM record)", (secrets.token_hex(16),)
        )


def record_name(path: Path) -> str:
    """The name in the first line of a record; "" for a ledger or register of an earlier version, until `make_record` names it.

    Raises ValueError, with what is wrong to stand after the file's name, if the file has no such line or is none of SQLite's.
    """
    try:
        with read_only(path, repair=True) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
            _check_columns(connection, _FIRST_LINE)
            row = connection.execute("SELECT name FROM record").fetchone() if "record" in tables else None
            unnamed = "record" not in tables and connection.execute(_UNNAMED).fetchone()
    except (sqlite3.DatabaseError, MalformedError) as error:
        raise ValueError(f"cannot be read: {error}") from error
    if row is None and unnamed:
        return ""
    if row is None:
        raise ValueError("is empty, which no record ever is: it was emptied, or another file was put in its place")
    return str(row[0])


@contextmanager
def read_only(path: Path, *, immutable: bool = False, repair: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection that can only read a file which somebody else may have made.

    No value is longer than the file, and no more work is done than the records of so large a file can ask for.

    Args:
        path: the file.
        immutable: whether nobody writes to it meanwhile: then nothing is made next to it.
        repair: whether what a killed process left half written may be undone, which SQLite refuses where it may only read.

    Raises:
        MalformedError: for views and virtual tables, which are programs in the place of records, and for what takes more work.
        sqlite3.DatabaseError: for a file that is damaged, locked or none of SQLite's.
    """
    size = sum(part.stat().st_size for part in (path, Path(f"{path}-wal")) if part.exists())
    left = 100 + size // 100

    def is_too_much() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    address = f"{path.absolute().as_uri()}?mode={'rw' if repair else 'ro'}{'&immutable=1' * immutable}"
    with closing(sqlite3.connect(address, uri=True, timeout=60.0, isolation_level=None)) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max(size, 2**16))
        connection.set_progress_handler(is_too_much, _STEPS)
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        try:
            programs = "SELECT count(*) FROM sqlite_schema WHERE type = 'view' OR (type = 'table' AND rootpage = 0)"
            if connection.execute(programs).fetchone() != (0,):
                raise MalformedError("it has views or virtual tables, and a record has tables only")
            yield connection
        except sqlite3.OperationalError as error:
            if left >= 0:
                raise
            raise MalformedError("it asks for more work than the records of a file of its size") from error


def check_tables(connection: sqlite3.Connection, schema: str) -> None:
    """Raise MalformedError unless the tables of `schema` that are there have its columns, and only values of their types."""
    _check_columns(connection, schema)
    if (problem := connection.execute("PRAGMA quick_check(1)").fetchone()) != ("ok",):
        raise MalformedError(f"it is damaged: {problem[0]}")


def _check_columns(connection: sqlite3.Connection, schema: str) -> None:
    for table, columns in _columns(schema).items():
        found = _columns_of(connection, table)
        if found and found != columns:
            raise MalformedError(f"its table {table!r} is another one")


@lru_cache(maxsize=8)
def _columns(schema: str) -> dict[str, list[Any]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(schema)
        tables = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        return {table: _columns_of(connection, table) for (table,) in tables}


def _columns_of(connection: sqlite3.Connection, table: str) -> list[Any]:
    """Whether a table is strict about types, and its columns, also those that are calculated; nothing for none."""
    strict = connection.execute("SELECT strict FROM pragma_table_list WHERE name = ?", (table,)).fetchall()
    columns = connection.execute("SELECT name, type, hidden FROM pragma_table_xinfo(?)", (table,)).fetchall()
    return [*strict, *columns]


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
    """A file in memory: it goes with its last reference, in whichever thread, and Python 3.13 warns of none that is left open."""

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
