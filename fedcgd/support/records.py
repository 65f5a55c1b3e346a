"""SQLite files that somebody relies on: made with their first line, closed to others, and read without trust in who wrote."""

import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedcgd.support.files import check_private, sync_folder
from fedcgd.support.untrusted import MalformedError

_FIRST_LINE = "CREATE TABLE record (name TEXT NOT NULL) STRICT"
_STEPS = 100_000  # of SQLite's machine, between two looks at how many there were


def check_record(path: Path, what: str) -> None:
    """Raise ValueError, with the remedy, if others may read or write the record at `path`, or put another file in its place.

    Args:
        path: the file, which need not be there yet.
        what: what the message calls it.
    """
    path = path.resolve()
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


def make_record(path: Path, name: str | None = None) -> None:
    """Make an SQLite file with its first line, a name that tells it from one that is made anew, unless there is a file.

    Whoever looks sees no file or a whole one, readable by its owner only, and of two makers the first wins. So a file without a
    line was emptied.

    Args:
        path: the file; its folder is made too.
        name: the name, where a key has it already; None for a new one.
    """
    if path.exists():
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        with closing(sqlite3.connect(part)) as connection, connection:
            connection.execute(_FIRST_LINE)
            connection.execute("INSERT INTO record VALUES (?)", (name or secrets.token_hex(16),))
        with suppress(FileExistsError):
            path.hardlink_to(part)
    finally:
        part.unlink()
    sync_folder(path.parent)


def record_name(path: Path) -> str | None:
    """The name in the first line of a record; None for one of an earlier version, which wrote none.

    Raises ValueError, with what is wrong to stand after the file's name, if the file is empty or none of SQLite's.
    """
    try:
        with read_only(path, repair=True) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
            _check_columns(connection, _FIRST_LINE)
            row = connection.execute("SELECT name FROM record").fetchone() if "record" in tables else None
    except (sqlite3.DatabaseError, MalformedError) as error:
        raise ValueError(f"cannot be read: {error}") from error
    if not tables or ("record" in tables and row is None):
        raise ValueError("is empty, which no record ever is: it was emptied, or another file was put in its place")
    return None if row is None else str(row[0])


@contextmanager
def read_only(path: Path, *, immutable: bool = False, repair: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection that can only read a file which somebody else may have made.

    No value is longer than the file, and no more work is done than the records of so large a file can ask for.

    Args:
        path: the file.
        immutable: whether nobody writes to it meanwhile: then nothing is made beside it.
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
