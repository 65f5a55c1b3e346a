"""Files that somebody relies on are written whole or not at all: a full disk or a Ctrl-C leaves what was there."""

import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path


@contextmanager
def whole(path: Path | str) -> Iterator[Path]:
    """Yields a path to write to, which takes the place of `path` when the block ends without an error, and else is removed.

    It lies beside `path` and has its suffix. What is no ordinary file, such as /dev/stdout, is yielded itself.
    """
    target = Path(path).resolve()  # what a link points to, and not the link
    if target.exists() and not target.is_file():
        yield target
        return
    part = target.with_name(f"{target.stem}.{secrets.token_hex(4)}.part{target.suffix}")
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def check_private(path: Path, what: str, mode: int | None = None) -> None:
    """Raise ValueError, with the remedy, if others than its owner may read or write the file.

    Args:
        path: the file.
        what: what the message calls it, for example "key file".
        mode: its mode, where it is open and known; else that of the file at `path`.
    """
    mode = stat.S_IMODE(path.stat().st_mode if mode is None else mode)
    if mode & 0o077 and os.name != "nt":  # Windows has access lists in place of modes
        raise ValueError(f"{what} {path} has mode {mode:04o}: others may read it; run chmod 600 {path}")


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
    import grp  # Windows has neither
    import pwd

    try:
        owner, group = pwd.getpwuid(folder.st_uid).pw_name, grp.getgrgid(folder.st_gid)
    except KeyError:
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
            connection.execute("CREATE TABLE record (name TEXT NOT NULL) STRICT")
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
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=60.0)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
            row = connection.execute("SELECT name FROM record").fetchone() if "record" in tables else None
    except sqlite3.DatabaseError as error:
        raise ValueError(f"cannot be read: {error}") from error
    if not tables or ("record" in tables and row is None):
        raise ValueError("is empty, which no record ever is: it was emptied, or another file was put in its place")
    return None if row is None else str(row[0])


def sync_folder(folder: Path) -> None:
    """Make durable which files are in `folder`; what is in them is made so by their own `fsync`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
