"""Rounds whose noise comes from keepers: what they were asked to open, and the rounds that were spent without a release.

Once keepers have been asked, the server cannot take it back: whoever they answered may know the noised sum. So an attempt in
state "opening" becomes "released" or "spent", never "abandoned". A spent round counts as a release in which the model did not
change.
"""

import json
import sqlite3
from dataclasses import dataclass

from fedcgd.support.untrusted import parse_json

SCHEMA = """
CREATE UNIQUE INDEX spent_once ON attempts (round) WHERE state = 'spent';
CREATE UNIQUE INDEX one_opening ON attempts ((1)) WHERE state = 'opening';
CREATE TABLE openings (
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    list_hash BLOB NOT NULL CHECK (length(list_hash) = 32),
    keepers TEXT NOT NULL,
    PRIMARY KEY (round, attempt)
) STRICT
"""

MOST_KEEPERS = 64
KEEPERS = "keepers"  # in a run's configuration: how many, how many may collude or be away, and who they are


@dataclass(frozen=True)
class RecordedOpening:
    """One round that keepers were asked to open: the list they were told, and which of them made noise for it."""

    round: int
    attempt: int
    state: str
    """"opening", "released" or "spent"."""
    list_hash: bytes
    keepers: tuple[str, ...]


def write(connection: sqlite3.Connection, round: int, attempt: int, list_hash: bytes, keepers: tuple[str, ...]) -> None:
    """Record that these keepers are asked to open the list; inside the caller's transaction."""
    connection.execute(
        "INSERT INTO openings VALUES (?, ?, ?, ?)", (round, attempt, list_hash, json.dumps(list(keepers)))
    )


def read(connection: sqlite3.Connection) -> tuple[RecordedOpening, ...]:
    """All rounds that keepers were asked to open, in order."""
    rows = connection.execute(
        "SELECT round, attempt, state, list_hash, keepers FROM openings JOIN attempts USING (round, attempt) ORDER BY round"
    )
    return tuple(
        RecordedOpening(
            round,
            attempt,
            state,
            list_hash,
            tuple(parse_json(keepers, [str], "the keepers of a round on record")),
        )
        for round, attempt, state, list_hash, keepers in rows
    )


def spend(connection: sqlite3.Connection, at: str) -> bool:
    """End the attempt that keepers were asked to open, if one is in flight, as spent; whether there was one."""
    return bool(
        connection.execute("UPDATE attempts SET state = 'spent', ended = ? WHERE state = 'opening'", (at,)).rowcount
    )
