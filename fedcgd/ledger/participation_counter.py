"""Users' turns: in how many rounds each was asked, and when last. A user who would be asked too often is refused."""

import sqlite3
from collections.abc import Collection
from operator import attrgetter
from typing import NamedTuple

from fedcgd.participation import Participation
from fedcgd.participation.user_ids import user_ids
from fedcgd.support.numbers import plural

USERS = """CREATE TABLE users (
    id INTEGER PRIMARY KEY,
    user TEXT NOT NULL UNIQUE,
    participations INTEGER NOT NULL,
    last_round INTEGER NOT NULL
) STRICT"""
"""The table that turns are counted in."""

_MOST_SEEN = 1_000_000  # users whose records are kept in memory


class Turns(NamedTuple):  # made by the ten thousand: four times as fast as a frozen dataclass
    """One user's number in the ledger, the rounds it was asked in so far, and the last of them."""

    id: int
    participations: int
    last_round: int


class ParticipationCounter:
    """The turns on record. Those that were read are kept: nobody else may write while this process is the ledger's owner."""

    def __init__(self, connection: sqlite3.Connection, participation: Participation) -> None:
        self._connection = connection
        self._participation = participation
        connection.execute("CREATE TEMP TABLE IF NOT EXISTS asked (user TEXT PRIMARY KEY) STRICT, WITHOUT ROWID")
        self._seen: dict[str, Turns | None] = {}

    def of(self, users: Collection[str]) -> dict[str, Turns]:
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
            self._seen.update((row[0], Turns._make(row[1:])) for row in rows)
        seen = self._seen
        return {user: record for user in users if (record := seen[user]) is not None}

    def count(self, round: int, users: Collection[str]) -> dict[str, Turns]:
        """Count `users` in `round`, once however often it is tried; their turns, for `remember` once that is on the disk.

        Raises ValueError, and counts nobody, if a user would exceed the participation.
        """
        known = self.of(users)
        k, b = self._participation.participations, self._participation.min_separation
        again = [user for user in known.values() if user.last_round != round]
        breaking = sum(user.participations >= k or round - user.last_round < b for user in again)
        if breaking:
            raise ValueError(
                f"{plural(breaking, 'user', 'users')} would take part more than {k} times, or less than {b} rounds apart, in "
                f"round {round}; fedcgd.participation.cohorts.cohort never chooses them"
            )
        foreign = (
            sum((round - user.last_round) % b != 0 for user in again) if self._participation.scheme.has_bins else 0
        )
        if foreign:
            raise ValueError(
                f"{plural(foreign, 'user', 'users')} would take part in round {round}, which is not of their bin (round modulo "
                f"{b}); fedcgd.participation.cohorts.cohort never chooses them"
            )
        self._connection.executemany(
            "UPDATE users SET participations = participations + 1, last_round = ? WHERE id = ?",
            ((round, user.id) for user in sorted(again, key=attrgetter("id"))),
        )
        (last,) = self._connection.execute("SELECT coalesce(max(id), 0) FROM users").fetchone()
        new = sorted(set(users) - known.keys())
        ids = range(last + 1, last + 1 + len(new))
        self._connection.executemany(
            "INSERT INTO users (id, user, participations, last_round) VALUES (?, ?, 1, ?)",
            ((id, user, round) for id, user in zip(ids, new, strict=True)),
        )
        counted = {
            name: user if user.last_round == round else Turns(user.id, user.participations + 1, round)
            for name, user in known.items()
        }
        return counted | {user: Turns(id, 1, round) for id, user in zip(ids, new, strict=True)}

    def remember(self, counted: dict[str, Turns]) -> None:
        """Keep what `count` returned, now that it is on record."""
        self._seen.update(counted)
