"""A node's own count of its users' turns: a server that lies about them, or begins a second run, gets nothing from the node."""

import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import Self

from fedcgd.files import sync_folder
from fedcgd.keepers.agreement import Agreement
from fedcgd.keepers.record import RefusedError
from fedcgd.ledger.participation_counter import USERS, ParticipationCounter
from fedcgd.ledger.transactions import MEMORY, Closable, make_tables, now, open_file, transaction

_SCHEMA = f"""
CREATE TABLE run (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    created TEXT NOT NULL,
    context BLOB NOT NULL CHECK (length(context) = 32)
) STRICT;
{USERS}"""


class NodeTurns(Closable):
    """In how many rounds of one run each user of a node was asked, and when last. Make one with `NodeTurns.open`.

    Guarantee: in the one run that the file belongs to, no user of this node is in more sums, or in sums closer together, than the
    plan allows; whatever the server says, and whatever is killed when: a turn is on the disk before it is taken.

    Args:
        connection: to the file.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """The turns in a file, made if there is none (readable by its owner only).

        Args:
            path: the file; ":memory:" keeps it in memory.

        Raises:
            ValueError: if the file holds anything else.
        """
        new = path != MEMORY and not Path(path).exists()
        connection = open_file(path, "a node's count of turns", _prepare)
        if new:
            sync_folder(Path(path).resolve().parent)
        return cls(connection)

    def count(self, agreement: Agreement, round: int, users: Collection[str]) -> None:
        """Count a turn of each of `users`, once however often the round is tried; durable when this returns.

        Args:
            agreement: of the run that asks. The first one stays: a file is for one run.
            round: the round, from 0.
            users: those of this node who are asked for.

        Raises:
            RefusedError: for another run, and if the plan does not allow the turn; then nobody's is counted.
        """
        with transaction(self._connection):
            pinned = self._connection.execute("SELECT context FROM run").fetchone()
            if pinned is None:
                self._connection.execute("INSERT INTO run VALUES (1, ?, ?)", (now(), agreement.context))
            elif bytes(pinned[0]) != agreement.context:
                raise RefusedError(
                    "this node counts its users' turns for another run, and two runs cost them more than either says: to take "
                    "part in this one too, name another file as turns= in the node's configuration"
                )
            try:
                ParticipationCounter(self._connection, agreement.plan.participation).count(round, users)
            except ValueError as error:
                raise RefusedError(f"this node does not take part in round {round}: {error}") from None

    def close(self) -> None:
        """Close the file; what is counted stays."""
        self._connection.close()


def _prepare(connection: sqlite3.Connection) -> None:
    make_tables(connection, _SCHEMA)
    connection.execute("SELECT context, participations FROM run, users").fetchone()  # another kind of file has none
