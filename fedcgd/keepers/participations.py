"""A node's own count of its users' participations: a server that lies about them, or begins a second run, gets nothing."""

import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import Self

from fedcgd.keepers.agreement import Agreement
from fedcgd.keepers.record import RefusedError
from fedcgd.ledger.attempts import ParticipationCounter
from fedcgd.ledger.store import USERS
from fedcgd.participation.user_ids import user_ids
from fedcgd.support.records import MEMORY, Closable, check_record, make_tables, now, open_file, transaction

_FORMAT = 1

_SCHEMA = f"""
CREATE TABLE run (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    created TEXT NOT NULL,
    context BLOB NOT NULL CHECK (length(context) = 32)
) STRICT;
{USERS};
CREATE TABLE tries (
    user TEXT PRIMARY KEY,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL
) STRICT;
"""


class NodeParticipations(Closable):
    """In how many rounds of one run each user of a node was asked, and when last. Make one with `NodeParticipations.open`.

    Guarantee: in the one run that the file belongs to, no user of this node is in more sums of a kind, in sums closer together,
    or in one sum more often than the plan of that kind allows; whatever the server says, and whatever is killed when: a
    participation is on the disk before the user trains.

    Args:
        connection: to the file.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """The participations in a file, made if there is none (readable by its owner only).

        Args:
            path: the file; ":memory:" keeps it in memory.

        Raises:
            ValueError: if the file holds anything else or was emptied, and if others may write it or put another in its place.
        """
        if path != MEMORY:
            check_record(Path(path), "a node's count of participations")
        return cls(open_file(path, "a node's count of participations", _prepare))

    def count(self, agreement: Agreement, round: int, attempt: int, users: Collection[str]) -> None:
        """Count a participation of each of `users`, once however often the round is tried; durable when this returns.

        Keepers open one try of a round. In each try a user is asked for once, because a server with two answers for the same try
        could put both on its list.

        Args:
            agreement: of the run and the kind that asks. The first run stays: a file is for one. Kinds are counted apart.
            round: the round, from 0.
            attempt: the try of the round, later than every one before.
            users: the ids of those of this node who are asked for.

        Raises:
            RefusedError: for another run, if the plan does not allow the participation, for a try that a user was in already, and
                for keepers of whom so many may be away that two tries of a round could be opened; then nobody's is counted.
            TypeError: for what is no list of ids.
            ValueError: if a user is named twice.
        """
        ids = user_ids(users)
        keepers = agreement.keepers
        if 2 * keepers.away >= len(keepers.cards) - keepers.colluding:
            raise RefusedError(
                f"of {len(keepers.cards)} keepers {keepers.away} may be away and {keepers.colluding} work with the server: two "
                "groups of them could each open another try of a round. Let fewer be away, or take more keepers: "
                "their number is more than colluding + 2·away then"
            )
        with transaction(self._connection):
            pinned = self._connection.execute("SELECT context FROM run").fetchone()
            if pinned is None:
                self._connection.execute("INSERT INTO run VALUES (1, ?, ?)", (now(), agreement.context))
            elif bytes(pinned[0]) != agreement.context:
                raise RefusedError(
                    "this node counts its users' participations for another run, and two runs cost them more than either says: "
                    "to take part in this one too, name another file as participations= in the node's configuration"
                )
            users = [f"{agreement.kind} {user}" for user in ids]
            try:
                ParticipationCounter(self._connection, agreement.plan.participation).count(round, users)
            except ValueError as error:
                raise RefusedError(f"this node does not take part in round {round}: {error}") from None
            for user in users:
                tried = "SELECT 1 FROM tries WHERE user = ? AND round = ? AND attempt >= ?"
                if self._connection.execute(tried, (user, round, attempt)).fetchone():
                    raise RefusedError(f"a user of this node was asked for in try {attempt} of round {round} already")
            self._connection.executemany(
                "INSERT OR REPLACE INTO tries VALUES (?, ?, ?)", ((user, round, attempt) for user in users)
            )

    def close(self) -> None:
        """Close the file; what is counted stays."""
        self._connection.close()


def _prepare(connection: sqlite3.Connection) -> None:
    new = make_tables(connection, _SCHEMA)
    connection.execute("SELECT context, participations FROM run, users").fetchone()  # another kind of file has none
    if new:
        connection.execute(f"PRAGMA user_version = {_FORMAT}")
    (written,) = connection.execute("PRAGMA user_version").fetchone()
    if written != _FORMAT:
        raise ValueError(
            f"this node's participations were counted by another version of fedcgd (format {written}, not {_FORMAT}), which "
            "would count none of them: end that run with the version that began it, and name another file as participations= for "
            "another run"
        )
