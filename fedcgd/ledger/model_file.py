"""The model that was released last and the inner strategy's state: a file next to the ledger, which says what must be in it.

SQLite would write a model twice and take ten times the processor time. Two files take turns, so that one is whole while the other
is written; which of them counts is what the ledger says, and that changes in the transaction that releases the round.
"""

import errno
import math
import os
import sqlite3
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcgd.ledger.store import reader
from fedcgd.ledger.texts import refuse
from fedcgd.support.files import atomic_write, sync_folder
from fedcgd.support.records import MAKE_ROOM
from fedcgd.support.untrusted import MalformedError, conform, parse_json

_WRITE = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)


class Latest(NamedTuple):
    """What the ledger says of the last release; `checksum` is the CRC-32 of model and state, one after the other."""

    round: int
    model_bytes: int
    state_bytes: int
    checksum: int
    layout: str


def file_of(ledger: Path, round: int) -> Path:
    """The file that a release of `round` goes into, next to the ledger (not next to a link to it), as SQLite's own are."""
    ledger = ledger.resolve()
    return ledger.with_name(f"{ledger.name}-model-{round % 2}")


def count_models(connection: sqlite3.Connection) -> int:
    """How many models are released: in a spent round there is no new one."""
    count: int = connection.execute("SELECT count(*) FROM attempts WHERE state = 'released'").fetchone()[0]
    return count


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
            raise refuse("model-in-the-way", path=path, ledger=ledger)


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
                for part in (model, state):  # in place: new memory would take as long as the writing
                    checksum = zlib.crc32(part, checksum)
                    file.write(part)
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


def read(ledger: Path, latest: Latest) -> tuple[bytes, bytes]:
    """Model and state. Raises ValueError if the file is missing or is not the one that the ledger speaks of."""
    if not latest.model_bytes + latest.state_bytes:
        return b"", b""
    path = file_of(ledger, latest.round)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            # Before anything is read: the numbers are the ledger's.
            whole = min(latest.model_bytes, latest.state_bytes) >= 0 and latest.model_bytes + latest.state_bytes == size
            model, state = (file.read(latest.model_bytes), file.read(latest.state_bytes)) if whole else (b"", b"")
    except FileNotFoundError:
        raise refuse("model-missing", path=path, ledger=ledger) from None
    if whole and zlib.crc32(state, zlib.crc32(model)) == latest.checksum:
        return model, state
    raise refuse("model-changed", path=path, release=latest.round + 1, ledger=ledger)


def discard(ledger: Path, round: int) -> None:
    """Remove what a release of `round` that did not happen may have left: it is no part of what ε is for."""
    file_of(ledger, round).unlink(missing_ok=True)


def released_model(path: Path | str) -> dict[str, NDArray[Any]]:
    """The trained arrays of the last released model, by name; before and after the run is sealed.

    There is nothing else in it: counters, frozen layers and statistics that stay as they were are in the model that the run
    began with; `initial | released_model(path)` has both. A running variance is at least 0, as in what was released. Arrays of
    a dtype that NumPy does not have, such as bfloat16, are float32.

    Args:
        path: the ledger.

    Raises:
        ValueError: before the first release, and if the ledger does not say what the model's arrays are.
    """
    model, layout = last(Path(path))
    if not layout:
        raise refuse("model-without-layout", path=path)
    described = parse_json(layout, [list], "the layout of the model on record")
    if len(described) != len(_LAYOUT) or len({len(part) for part in described}) > 1 or len(model) % 4:
        raise MalformedError(f"{path} does not say what the arrays of its model are")
    names, shapes, dtypes = (conform(part, form, "the layout") for part, form in zip(described, _LAYOUT, strict=True))
    flat, sizes = np.frombuffer(model, np.float32), list(map(math.prod, shapes))
    if any(size < 0 for shape in shapes for size in shape) or len(flat) != sum(sizes):
        raise MalformedError(f"{path} holds {len(flat)} parameters, and arrays of the shapes {shapes}")
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return {
        name: (np.maximum(part, 0) if name.rpartition(".")[2] == "running_var" else part)
        .reshape(shape)
        .astype(np.sctypeDict.get(dtype, np.float32))
        for name, part, shape, dtype in zip(names, parts, shapes, dtypes, strict=True)
    }


_LAYOUT: tuple[Any, ...] = ([str], [[int]], [str])
"""The form of a layout: names, shapes and dtypes."""


def last(path: Path) -> tuple[bytes, str]:
    """Model and layout. A run that goes on may release another model while this reads: then that one.

    Raises ValueError if there is none, or the file is missing or is not the one that the ledger speaks of.
    """
    latest = None
    while True:
        with reader(path) as connection:
            before, latest = latest, described(connection)
            models = count_models(connection)
        if latest is None:
            raise refuse("no-model", path=path)
        if latest.round != models - 1:
            raise refuse("another-last-model", path=path, number=latest.round + 1, models=models)
        try:
            return read(path, latest)[0], latest.layout
        except ValueError:
            if latest == before:
                raise


def save_model(path: Path | str, target: Path) -> int:
    """Write the last released model to a file.

    Args:
        path: the ledger.
        target: the file, .npz.

    Returns:
        How many arrays were written.

    Raises:
        ValueError: as `released_model`, and for another kind of file.
    """
    if target.suffix != ".npz":
        raise refuse("another-suffix", name=target.name)
    arrays = released_model(path)
    with atomic_write(target) as part:
        np.savez(part, **arrays)  # type: ignore[arg-type]
    return len(arrays)
