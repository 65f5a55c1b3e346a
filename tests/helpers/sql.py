"""A database that somebody edits, or looks into, with SQL."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


def edit(path: Path | str, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def rows(path: Path | str, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()
