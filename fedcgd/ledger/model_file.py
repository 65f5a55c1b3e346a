"""The model that was released last and the inner strategy's state: a file beside the ledger, which says what must be in it.

SQLite would write a model twice and take ten times the processor time. Two files take turns, so that one is whole while the other
is written; which of them counts is what the ledger says, and that changes in the transaction that releases the round.
"""

import errno
import os
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedcgd.ledger.transactions import MAKE_ROOM
from fedcgd.support.files import sync_folder

_WRITE = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
_AT_ONCE = 1 << 20  # bytes: written while they are still in the cache that the checksum has read them into


class Latest(NamedTuple):
    """What the ledger says of the last release; `checksum` is the CRC-32 of model and state, one after the other."""

    round: int
    model_bytes: int
    state_bytes: int
    checksum: int
    layout: str

    def file(self, ledger: Path) -> Path:
        """Where model and state lie; there is no file if both are empty."""
        return file_of(ledger, self.round)


def file_of(ledger: Path, round: int) -> Path:
    """The file that a release of `round` goes into, beside the ledger (not beside a link to it), as SQLite's own are."""
    ledger = ledger.resolve()
    return ledger.with_name(f"{ledger.name}-model-{round % 2}")


def described(connection: sqlite3.Connection) -> Latest | None:
    """What the ledger says of the last release; None before the first."""
    columns = "round, model_bytes, state_bytes, checksum, layout"
    row = connection.execute(f"SELECT {columns} FROM latest").fetchone()  # noqa: S608
    return None if row is None else Latest(*row)


def describe(connection: sqlite3.Connection, latest: Latest) -> None:
    """Let the ledger say that, inside the caller's transaction."""
    connection.execute("INSERT OR REPLACE INTO latest VALUES (1, ?, ?, ?, ?, ?)", latest)


def check_unused(ledger: Path) -> None:
    """Raise ValueError if there is a file that the ledger, which is new, would write to."""
    for path in (file_of(ledger, 0), file_of(ledger, 1)):
        if path.exists():
            raise ValueError(
                f"{path} holds a model of another run, whose ledger was {ledger}, and this run would write over it: move it to "
                "where that ledger is now, or delete it if that run is not needed any more"
            )


def write(ledger: Path | None, round: int, model: memoryview, state: memoryview, layout: str) -> Latest:
    """Write the file, durably, and return what the ledger has to say of it: until it does, nobody reads the file.

    Only its owner may read it, because it holds a model that is not released yet. A file that cannot be written is removed, and
    none is written if there is nothing to write or the ledger is in memory.
    """
    checksum = 0
    if ledger is not None and (model or state):
        path = file_of(ledger, round)
        try:
            with os.fdopen(os.open(path, _WRITE, 0o600), "wb") as file:
                if hasattr(os, "fchmod"):  # Windows has access lists in place of modes
                    os.fchmod(file.fileno(), 0o600)  # refused if it is another user's
                for chunk in _chunks(model, state):  # in place: new memory would take as long as the writing
                    checksum = zlib.crc32(chunk, checksum)
                    file.write(chunk)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
            sync_folder(path.parent)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:  # a write does not know what it writes to
                advice = f"; {MAKE_ROOM}" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
                raise OSError(error.errno, f"{error.strerror}{advice}", str(path)) from error
            raise
    return Latest(round, len(model), len(state), checksum, layout)


def _chunks(*parts: memoryview) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), _AT_ONCE):
            yield part[start : start + _AT_ONCE]


def read(ledger: Path, latest: Latest) -> tuple[bytes, bytes]:
    """Model and state. Raises ValueError if the file is missing or is not the one that the ledger speaks of."""
    if not latest.model_bytes + latest.state_bytes:
        return b"", b""
    path = latest.file(ledger)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            # Before anything is read: the numbers are the ledger's.
            whole = min(latest.model_bytes, latest.state_bytes) >= 0 and latest.model_bytes + latest.state_bytes == size
            model, state = (file.read(latest.model_bytes), file.read(latest.state_bytes)) if whole else (b"", b"")
    except FileNotFoundError:
        problem = f"{path} is missing"
    else:
        if whole and zlib.crc32(state, zlib.crc32(model)) == latest.checksum:
            return model, state
        problem = f"{path} is not the model of release {latest.round + 1}: damaged, or of another round or run"
    raise ValueError(
        f"{problem}. It holds the last model of the run in {ledger}, which cannot go on without it: put back the file that "
        "belongs to that ledger (copy both together, while nothing is released). If it is lost, the run is over: what it "
        "released stays released, and verify, show and report need the ledger alone. Begin another run with a new key"
    )


def compared(ledger: Path, latest: Latest) -> str | None:
    """ "missing" or "changed", if the file is not the one that the ledger speaks of; None if it is. It is read in stretches."""
    if not latest.model_bytes + latest.state_bytes:
        return None
    checksum = size = 0
    try:
        with latest.file(ledger).open("rb") as file:
            while chunk := file.read(_AT_ONCE):
                checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
    except FileNotFoundError:
        return "missing"
    return None if (size, checksum) == (latest.model_bytes + latest.state_bytes, latest.checksum) else "changed"


def discard(ledger: Path, round: int) -> None:
    """Remove what a release of `round` that did not happen may have left: it is no part of what ε is for."""
    file_of(ledger, round).unlink(missing_ok=True)
