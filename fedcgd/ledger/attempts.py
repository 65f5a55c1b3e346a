"""The tries of rounds, each planned, aggregated and released in turn, or abandoned. At most one is in flight."""

import sqlite3
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcgd.ledger import model_file, openings
from fedcgd.ledger.store import pack_ids
from fedcgd.ledger.transactions import now

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
    # Each by an index of its own, as what is in flight: a run of a million rounds has a million attempts.
    return count_models(connection) + _count(connection, "spent")


def count_models(connection: sqlite3.Connection) -> int:
    """How many models are released: in a spent round there is no new one."""
    return _count(connection, "released")


def _count(connection: sqlite3.Connection, state: str) -> int:
    # Written out, so that SQLite takes the index of that state.
    count: int = connection.execute(f"SELECT count(*) FROM attempts WHERE state = '{state}'").fetchone()[0]  # noqa: S608
    return count


def check_turn(connection: sqlite3.Connection, round: int) -> None:
    """Raise ValueError unless `round` comes next and no attempt at it is in flight."""
    released = count_released(connection)
    (in_flight,) = connection.execute(
        "SELECT count(*) FROM attempts WHERE state IN ('planned', 'aggregated')"
    ).fetchone()
    in_flight += _count(connection, "opening")
    if round != released:
        raise ValueError(f"round must be {released}, the first that is not released, got {round}")
    if in_flight:
        raise ValueError(f"an attempt at round {round} is in flight; release it, or call skip, before another begins")


def begin(connection: sqlite3.Connection, round: int, users: NDArray[np.int64]) -> int:
    """The attempt under which `round` is tried with the users of these numbers: how often it was tried before."""
    tries = "SELECT count(*) FROM attempts WHERE round = ?"
    attempt: int = connection.execute(tries, (round,)).fetchone()[0]
    connection.execute(
        "INSERT INTO attempts (round, attempt, state, users, planned) VALUES (?, ?, 'planned', ?, ?)",
        (round, attempt, pack_ids(users), now()),
    )
    return attempt


def advance(connection: sqlite3.Connection, round: int, attempt: int, before: str, after: str) -> None:
    """Raise ValueError unless the attempt is in state `before`; it is in state `after` then."""
    column = "aggregated" if after in SUMMED else "ended"
    changed = connection.execute(
        f"UPDATE attempts SET state = ?, {column} = ? WHERE round = ? AND attempt = ? AND state = ?",  # noqa: S608
        (after, now(), round, attempt, before),
    ).rowcount
    if changed != 1:
        raise ValueError(f"attempt {attempt} at round {round} is not {before}, so it cannot become {after}")


def summed_state(connection: sqlite3.Connection, round: int, attempt: int) -> str:
    """The state that an attempt is released from: "opening" where keepers make its noise, else "aggregated"."""
    found = connection.execute(
        "SELECT state FROM attempts WHERE round = ? AND attempt = ?", (round, attempt)
    ).fetchone()
    return "opening" if found == ("opening",) else "aggregated"


def abandon(connection: sqlite3.Connection, ledger: Path | None) -> None:
    """End the attempt that is in flight, if there is one, and leave nothing of it beside the ledger's file.

    One that keepers were asked to open is spent.
    """
    openings.spend(connection, now())
    connection.execute(
        "UPDATE attempts SET state = 'abandoned', ended = ? WHERE state IN ('planned', 'aggregated')", (now(),)
    )
    if ledger is not None:
        model_file.discard(ledger, count_models(connection))
