"""SQLite transactions that are done or undone, also when the disk fails."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of the block or nothing of it; on the disk when the block is left.

    A COMMIT that fails (full disk, input or output error) is undone too, so that no later read sees what is not on the disk.
    A connection on which even that fails is closed.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        _undo(connection)
        raise


def _undo(connection: sqlite3.Connection) -> None:
    if not connection.in_transaction:  # SQLite undoes by itself after some errors
        return
    try:
        connection.execute("ROLLBACK")
    except sqlite3.Error:
        connection.close()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
