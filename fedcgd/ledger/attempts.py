"""The tries of rounds, each planned, aggregated and released in turn, or abandoned, and the users who took part in them.

At most one try is in flight. Where keepers make the noise, a try goes from "planned" to "opening": the server cannot take that
back, because anyone the keepers answered may know the noised sum. So it becomes "released" or "spent", never "abandoned". A spent
round counts as a release in which the model did not change.
"""

import json
import sqlite3
from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcgd.ledger import model_file
from fedcgd.ledger.model_file import count_models
from fedcgd.ledger.store import pack_ids
from fedcgd.ledger.texts import refuse
from fedcgd.noise.keys import NONCE_BYTES
from fedcgd.participation import Participation
from fedcgd.participation.user_ids import user_ids
from fedcgd.support.records import now
from fedcgd.support.untrusted import parse_json

COUNTED = ("released", "spent")
"""The states of an attempt whose round is over and counts for ε."""

SUMMED = ("aggregated", "opening")
"""The states of an attempt whose sum is there and whose noise comes next: from the server, or from keepers."""


def nonces_of(connection: sqlite3.Connection, *states: str) -> tuple[int, ...]:
    """The nonces of the attempts in one of `states`, round by round; by default of those that count as releases.

    Where keepers make the noise, it is the first 16 bytes of the hash of what they opened.
    """
    states = states or COUNTED
    marks = ", ".join("?" * len(states))
    query = f"SELECT coalesce(nonce, x'') FROM attempts WHERE state IN ({marks}) ORDER BY round"  # noqa: S608
    rows = connection.execute(query, states)
    return tuple(int.from_bytes(nonce, "big") for (nonce,) in rows)


def count_released(connection: sqlite3.Connection) -> int:
    """How many rounds are released, or spent as if they were."""
    return count_models(connection) + _count(connection, "state = 'spent'")


def _count(connection: sqlite3.Connection, condition: str) -> int:
    # Word by word that of an index: a run of a million rounds has a million attempts.
    count: int = connection.execute(f"SELECT count(*) FROM attempts WHERE {condition}").fetchone()[0]  # noqa: S608
    return count


def check_turn(connection: sqlite3.Connection, round: int) -> None:
    """Raise ValueError unless `round` comes next and no attempt at it is in flight."""
    released = count_released(connection)
    if round != released:
        raise refuse("out-of-turn", expected=released, round=round)
    if _count(connection, "state IN ('planned', 'aggregated')") + _count(connection, "state = 'opening'"):
        raise refuse("in-flight", round=round)


def begin(connection: sqlite3.Connection, round: int, users: NDArray[np.int64]) -> int:
    """The attempt under which `round` is tried with the users of these numbers: how often it was tried before."""
    tries = "SELECT count(*) FROM attempts WHERE round = ?"
    attempt: int = connection.execute(tries, (round,)).fetchone()[0]
    connection.execute(
        "INSERT INTO attempts (round, attempt, state, users, planned) VALUES (?, ?, 'planned', ?, ?)",
        (round, attempt, pack_ids(users), now()),
    )
    return attempt


def advance_summed(connection: sqlite3.Connection, round: int, attempt: int, state: str, nonce: bytes) -> None:
    """The sum of a planned attempt is there. Raises ValueError if it was before, or the round had noise of this nonce."""
    same = "SELECT 1 FROM attempts WHERE round = ? AND nonce = ? AND attempt != ?"
    if connection.execute(same, (round, nonce, attempt)).fetchone():
        raise refuse("nonce-used", round=round)
    changes = "state = ?, aggregated = ?, nonce = ? WHERE state = 'planned'"
    _advance(connection, round, attempt, changes, state, now(), nonce)


def advance_released(connection: sqlite3.Connection, round: int, attempt: int) -> None:
    """An attempt whose sum is there is released. Raises ValueError for any other."""
    changes = "state = 'released', ended = ? WHERE state IN ('aggregated', 'opening')"
    _advance(connection, round, attempt, changes, now())


def _advance(connection: sqlite3.Connection, round: int, attempt: int, changes: str, *values: object) -> None:
    query = f"UPDATE attempts SET {changes} AND round = ? AND attempt = ?"  # noqa: S608
    if connection.execute(query, (*values, round, attempt)).rowcount != 1:
        raise refuse("out-of-order", attempt=attempt, round=round)


def abandon(connection: sqlite3.Connection, ledger: Path | None) -> None:
    """End the attempt that is in flight, if there is one, and leave nothing of it next to the ledger's file.

    One that keepers were asked to open is spent.
    """
    spend(connection)
    connection.execute(
        "UPDATE attempts SET state = 'abandoned', ended = ? WHERE state IN ('planned', 'aggregated')", (now(),)
    )
    if ledger is not None:
        model_file.discard(ledger, count_models(connection))


def spend(connection: sqlite3.Connection) -> bool:
    """Mark the attempt that keepers were asked to open as spent; returns whether there was one."""
    spent = connection.execute("UPDATE attempts SET state = 'spent', ended = ? WHERE state = 'opening'", (now(),))
    return bool(spent.rowcount)


@dataclass(frozen=True)
class RecordedOpening:
    """One round that keepers were asked to open: the list they were told, and which of them made noise for it."""

    round: int
    attempt: int
    state: str
    """"opening", "released" or "spent"."""
    list_hash: bytes
    keepers: tuple[str, ...]


def write_opening(connection: sqlite3.Connection, round: int, attempt: int, list_hash: bytes, names: list[str]) -> None:
    """The masked sum is there, and keepers of these names are asked to open the list; inside the caller's transaction."""
    advance_summed(connection, round, attempt, "opening", list_hash[:NONCE_BYTES])
    connection.execute("INSERT INTO openings VALUES (?, ?, ?, ?)", (round, attempt, list_hash, json.dumps(names)))


def read_openings(connection: sqlite3.Connection) -> tuple[RecordedOpening, ...]:
    """All rounds that keepers were asked to open, in order."""
    rows = connection.execute(
        "SELECT round, attempt, state, list_hash, keepers FROM openings JOIN attempts USING (round, attempt) ORDER BY round"
    )
    return tuple(
        RecordedOpening(
            round, attempt, state, digest, tuple(parse_json(names, [str], "the keepers of a round on record"))
        )
        for round, attempt, state, digest, names in rows
    )


_MOST_SEEN = 1_000_000  # users whose records are kept in memory


class Participations(NamedTuple):  # made by the ten thousand: four times as fast as a frozen dataclass
    """One user's number in the ledger, the rounds it was asked in so far, and the last of them."""

    id: int
    participations: int
    last_round: int


class ParticipationCounter:
    """The participations on record: a user who would be asked too often is refused.

    Those that were read are kept in memory: nobody else may write while this process is the ledger's owner.
    """

    def __init__(self, connection: sqlite3.Connection, participation: Participation) -> None:
        self._connection = connection
        self._participation = participation
        connection.execute("CREATE TEMP TABLE IF NOT EXISTS asked (user TEXT PRIMARY KEY) STRICT, WITHOUT ROWID")
        self._seen: dict[str, Participations | None] = {}

    def of(self, users: Collection[str]) -> dict[str, Participations]:
        """Those of `users` that have had any. Raises ValueError if one is named twice, TypeError for what is no list of ids."""
        users = user_ids(users)
        unseen = sorted(user for user in users if user not in self._seen)
        if unseen:
            if len(self._seen) > _MOST_SEEN:
                self._seen.clear()
                unseen = sorted(users)
            self._connection.execute("DELETE FROM asked")
            self._connection.executemany("INSERT INTO asked VALUES (?)", zip(unseen, strict=True))
            rows = self._connection.execute(
                "SELECT user, id, participations, last_round FROM asked CROSS JOIN users USING (user)"
            )
            self._seen.update(dict.fromkeys(unseen))
            self._seen.update((row[0], Participations._make(row[1:])) for row in rows)
        seen = self._seen
        return {user: record for user in users if (record := seen[user]) is not None}

    def count(self, round: int, users: Collection[str]) -> dict[str, Participations]:
        """Count `users` in `round`, once however often it is tried; the result is for `remember` once it is on the disk.

        Raises ValueError, and counts nobody, if a user would exceed the participation.
        """
        known = self.of(users)
        k, b = self._participation.participations, self._participation.min_separation
        again = [user for user in known.values() if user.last_round != round]
        breaking = sum(user.participations >= k or round - user.last_round < b for user in again)
        if breaking:
            raise refuse("too-often", users=breaking, k=k, b=b, round=round)
        foreign = (
            sum((round - user.last_round) % b != 0 for user in again) if self._participation.scheme.has_bins else 0
        )
        if foreign:
            raise refuse("another-bin", users=foreign, round=round, b=b)
        self._connection.executemany(
            "UPDATE users SET participations = participations + 1, last_round = ? WHERE id = ?",
            ((round, user.id) for user in sorted(again, key=attrgetter("id"))),
        )
        (last,) = self._connection.execute("SELECT coalesce(max(id), 0) FROM users").fetchone()
        new = {user: Participations(last + i, 1, round) for i, user in enumerate(sorted(set(users) - known.keys()), 1)}
        self._connection.executemany(
            "INSERT INTO users (id, user, participations, last_round) VALUES (?, ?, 1, ?)",
            ((record.id, user, round) for user, record in new.items()),
        )
        counted = {
            name: user if user.last_round == round else Participations(user.id, user.participations + 1, round)
            for name, user in known.items()
        }
        return counted | new

    def remember(self, counted: dict[str, Participations]) -> None:
        """Keep what `count` returned, now that it is on record."""
        self._seen.update(counted)
