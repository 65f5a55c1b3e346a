"""What a keeper has opened: a durable record, one row for each round of each kind, without which it answers nobody."""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fedcgd.noise.keys import NONCE_BYTES
from fedcgd.support.records import (
    MEMORY,
    Closable,
    check_record,
    check_tables,
    make_tables,
    now,
    open_file,
    read_only,
    transaction,
)
from fedcgd.support.untrusted import MalformedError

FORMAT = 3

_SCHEMA = """
CREATE TABLE run (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    format INTEGER NOT NULL,
    created TEXT NOT NULL,
    key_fingerprint TEXT NOT NULL,
    context BLOB CHECK (length(context) = 32),
    agreement TEXT
) STRICT;
CREATE TABLE openings (
    kind TEXT NOT NULL CHECK (kind IN ('training', 'evaluation')),
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    list_hash BLOB NOT NULL CHECK (length(list_hash) = 32),
    sealed_hash BLOB NOT NULL CHECK (length(sealed_hash) = 32),
    after INTEGER,
    nonce BLOB NOT NULL CHECK (length(nonce) = 16),
    at TEXT NOT NULL,
    PRIMARY KEY (kind, round)
) STRICT
"""


@dataclass(frozen=True)
class AskedOpening:
    """What a keeper is asked to open.

    Attributes:
        kind: "training" or "evaluation", each with rounds of its own.
        round: from 0.
        attempt: the try of the round.
        list_hash: SHA-256 of the list of keepers and nodes.
        sealed_hash: SHA-256 of what the list's nodes sealed to this keeper. Anybody can seal a seed, and a second answer for the
            list, with a seed of the asker's own in the place of a node's, would tell that node's mask.
        after: the last earlier round whose share is partly cancelled; None for none.
    """

    kind: str
    round: int
    attempt: int
    list_hash: bytes
    sealed_hash: bytes
    after: int | None


@dataclass(frozen=True)
class Opened(AskedOpening):
    """One round that was opened.

    Attributes:
        nonce: of the keeper's share of the noise.
    """

    nonce: int


class RefusedError(Exception):
    """A keeper does not answer a request, and has recorded nothing: the text says why, and holds nothing secret."""


class Record(Closable):
    """The record of one keeper, in a file of its own. Make one with `Record.open`.

    Guarantees, whatever is killed when: a round of a kind is opened for one list only, and the record says so before anybody can
    know.
    An old copy of the file breaks this: anyone who asks a keeper twice for one round, before and after, gets two openings.

    Args:
        connection: to the file.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, path: Path | str, key_fingerprint: str) -> Self:
        """The record in a file, made if there is none (readable by its owner only).

        Args:
            path: the file; ":memory:" keeps it in memory.
            key_fingerprint: that of the keeper's card.

        Raises:
            ValueError: if the file is no record, one of another version, that of another key or emptied, and if others may write
                it or put another in its place.
        """
        if path != MEMORY:
            check_record(Path(path), "the record of what a keeper has opened,")

        def prepare(connection: sqlite3.Connection) -> None:
            if make_tables(connection, _SCHEMA):
                first = (FORMAT, now(), key_fingerprint)
                connection.execute("INSERT INTO run (id, format, created, key_fingerprint) VALUES (1, ?, ?, ?)", first)

            written, fingerprint = connection.execute("SELECT format, key_fingerprint FROM run").fetchone()
            _check_format(path, written)
            if fingerprint != key_fingerprint:
                raise ValueError(
                    f"{path} is the record of a key with fingerprint {fingerprint}, and this is {key_fingerprint}: every key "
                    "has a record of its own"
                )

        return cls(open_file(path, "a keeper's record", prepare))

    def close(self) -> None:
        """Close the file; what is recorded stays."""
        self._connection.close()

    def openings(self) -> tuple[Opened, ...]:
        """All rounds that were opened, in order, those of the training first."""
        return _openings(self._connection)

    @property
    def context(self) -> bytes | None:
        """The context of the run that the key serves, or None before its first round."""
        (context,) = self._connection.execute("SELECT context FROM run").fetchone()
        return None if context is None else bytes(context)

    def check(self, context: bytes, asked: AskedOpening) -> Opened | None:
        """What is on record for the very same request; None if it is a new one that may be opened. Nothing is written.

        Args:
            context: of the agreement.
            asked: the request.

        Raises:
            RefusedError: for another run, another list of a round that is opened, a round before the last one that is opened, and
                an earlier round that this record does not know.
        """
        pinned = self.context
        if pinned is not None and pinned != context:
            raise RefusedError("this key has served another run, and one key is for one run: make a new one")
        done, what = self._of(asked.kind), "round" if asked.kind == "training" else f"{asked.kind} round"
        for opened in done:
            if opened.round == asked.round:
                if opened != Opened(**vars(asked), nonce=opened.nonce):
                    raise RefusedError(f"{what} {asked.round} is opened already, for another request")
                return opened
        if done and asked.round < done[-1].round:
            raise RefusedError(f"{what} {asked.round} is earlier than round {done[-1].round}, which is opened already")
        if asked.after is not None and asked.after not in {opened.round for opened in done}:
            raise RefusedError(
                f"this keeper's record has no share of {what} {asked.after}: is it an old copy, or is the server mistaken?"
            )
        return None

    def write(
        self, context: bytes, agreement: str, asked: AskedOpening, make_nonce: Callable[[tuple[int, ...]], int]
    ) -> Opened:
        """The opening on record if it was the same request, else a new one, durable when this returns.

        Args:
            context: of the agreement. The first one stays for ever.
            agreement: the agreement in words, to show later.
            asked: the request.
            make_nonce: makes the new nonce from those of earlier openings of the kind.

        Raises:
            RefusedError: as `check`.
        """
        with transaction(self._connection):
            again = self.check(context, asked)
            if again is not None:
                return again
            nonce = make_nonce(tuple(opened.nonce for opened in self._of(asked.kind)))
            opened = Opened(**vars(asked), nonce=nonce)
            row = {**vars(opened), "nonce": nonce.to_bytes(NONCE_BYTES, "big"), "at": now()}
            self._connection.execute("UPDATE run SET context = ?, agreement = ?", (context, agreement))
            self._connection.execute(
                "INSERT INTO openings VALUES (:kind, :round, :attempt, :list_hash, :sealed_hash, :after, :nonce, :at)",
                row,
            )
        return opened

    def before(self, opened: Opened, most: int) -> list[tuple[int, int]]:
        """(round, nonce) of the opening of its kind that came `after` what `opened` says, and so on: newest first.

        Args:
            opened: on record.
            most: how many, at most.
        """
        by_round = {one.round: one for one in self._of(opened.kind)}
        found: list[tuple[int, int]] = []
        while opened.after is not None and len(found) < most:
            opened = by_round[opened.after]
            found.append((opened.round, opened.nonce))
        return found

    def _of(self, kind: str) -> tuple[Opened, ...]:
        return tuple(opened for opened in self.openings() if opened.kind == kind)


@dataclass(frozen=True)
class Recorded:
    """What a record says to a reader without the key.

    Attributes:
        created: when.
        key_fingerprint: that of the keeper's card.
        context: of the run that the key serves; None before its first round.
        agreement: the agreement in words; None before the first round.
        openings: the rounds that were opened, in order, those of the training first.
    """

    created: str
    key_fingerprint: str
    context: bytes | None
    agreement: str | None
    openings: tuple[Opened, ...]


def read(path: Path | str) -> Recorded:
    """What the record in a file says.

    Args:
        path: the file.

    Raises:
        ValueError: if it holds no record, or one of a version that had another form.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no keeper's record at {path}")
    try:
        with read_only(path) as connection:
            check_tables(connection, _SCHEMA)
            written, created, fingerprint, context, agreement = connection.execute(
                "SELECT format, created, key_fingerprint, context, agreement FROM run"
            ).fetchone()
            _check_format(path, written)
            return Recorded(created, fingerprint, context, agreement, _openings(connection))
    except (sqlite3.DatabaseError, MalformedError) as error:
        raise ValueError(f"{path} cannot be read as a keeper's record: {error}") from error


def record_file(key_file: Path | str) -> Path:
    """Where the record of a key is: next to its file itself, whichever links lead to it.

    Args:
        key_file: the key.
    """
    path = Path(key_file).resolve()
    return path.with_name(f"{path.name}.record")


def _openings(connection: sqlite3.Connection) -> tuple[Opened, ...]:
    rows = connection.execute(
        "SELECT kind, round, attempt, list_hash, sealed_hash, after, nonce FROM openings ORDER BY kind DESC, round"
    )
    return tuple(
        Opened(kind, round, attempt, bytes(list_hash), bytes(sealed_hash), after, int.from_bytes(nonce, "big"))
        for kind, round, attempt, list_hash, sealed_hash, after, nonce in rows
    )


def _check_format(path: Path | str, written: int) -> None:
    if written != FORMAT:
        raise ValueError(
            f"{path} is a keeper's record in format {written}, and this version of fedcgd reads format {FORMAT}: end its "
            "run with the version that began it, and begin another run with new keys"
        )
