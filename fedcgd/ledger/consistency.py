"""What in a ledger contradicts each other: attempts, skips, metrics, the last model, and the register of its key."""

import sqlite3
from collections.abc import Iterator
from datetime import datetime
from itertools import chain
from pathlib import Path

from fedcgd.ledger import attempts, model_file
from fedcgd.ledger.registry import read_register
from fedcgd.ledger.settings import identity_hash
from fedcgd.ledger.store import stored_run
from fedcgd.noise.keys import NONCE_BYTES
from fedcgd.support.numbers import plural
from fedcgd.support.untrusted import clean, parse_json

_HEX = set("0123456789abcdef")
_STREAM_ID_DIGITS = 32

# State of an attempt → whether its sum is on record (when it was made, and under which nonce), and whether its end is.
_RECORDED = {
    "planned": (False, False),
    "aggregated": (True, False),
    "opening": (True, False),
    "released": (True, True),
    "spent": (True, True),
}


def table_problems(connection: sqlite3.Connection) -> list[str]:
    """What the tables of a ledger say that cannot all be true, in words."""
    return [
        *_of_attempts(connection),
        *_of_skips(connection),
        *_of_users(connection),
        *_of_metrics(connection),
        *_of_the_last_model(connection),
        *_of_openings(connection),
        *_of_the_run(connection),
    ]


def _of_attempts(connection: sqlite3.Connection) -> Iterator[str]:
    """Attempts are numbered without gaps, each at its round's turn, and only the last of them may be in flight."""
    counted = tries = last = out_of_turn = missing = incomplete = without = left_open = 0
    in_flight = False
    columns = "id, round, attempt, state, nonce IS NOT NULL, aggregated IS NOT NULL, ended IS NOT NULL"
    for id, round, attempt, state, nonce, summed, ended in connection.execute(
        f"SELECT {columns} FROM attempts ORDER BY id"  # noqa: S608
    ):
        left_open += in_flight
        in_flight = not ended
        out_of_turn += round != counted
        missing += id != last + 1 or (round == counted and attempt != tries)
        # An abandoned attempt may have had its sum or not.
        expected = _RECORDED.get(state, (bool(summed), True))
        bare = state in attempts.COUNTED and not nonce
        without += bare
        incomplete += not bare and (bool(nonce), bool(summed), bool(ended)) != (expected[0], *expected)
        last, tries = id, attempt + 1
        if state in attempts.COUNTED:
            counted, tries = counted + 1, 0
    if out_of_turn:
        yield (
            plural(out_of_turn, "attempt is", "attempts are") + " at a round before which another one is not released"
        )
    if missing:
        yield f"attempts are missing, or numbered anew, at {plural(missing, 'place', 'places')}"
    if without:
        yield plural(without, "released round has", "released rounds have") + " no nonce, and so no noise"
    if incomplete:
        attempts_have = plural(incomplete, "attempt has", "attempts have")
        yield f"{attempts_have} a sum, a nonce or an end that does not belong to the state on record, or none where one does"
    if left_open:
        yield f"{plural(left_open, 'attempt was', 'attempts were')} still in flight when another began"


def _of_skips(connection: sqlite3.Connection) -> Iterator[str]:
    released = attempts.count_released(connection)
    rows = connection.execute("SELECT id, round FROM skips ORDER BY id").fetchall()
    rounds = [round for _, round in rows]
    if [id for id, _ in rows] != list(range(1, len(rows) + 1)) or rounds != sorted(rounds):
        yield "skips are missing, or out of order"
    if any(not 0 <= round <= released for round in rounds):
        yield "a round is skipped whose turn never came"


def _of_users(connection: sqlite3.Connection) -> Iterator[str]:
    if connection.execute("SELECT count(*) != coalesce(max(id), 0) FROM users").fetchone()[0]:
        yield "users are missing from the table of users: their numbers have gaps"


def _of_metrics(connection: sqlite3.Connection) -> Iterator[str]:
    """Metrics are of releases on record, and what they say of ε is said of these."""
    released = attempts.count_released(connection)
    beyond = "SELECT count(*) FROM metrics WHERE release NOT BETWEEN 0 AND ?"
    if (number := connection.execute(beyond, (released,)).fetchone()[0]) > 0:
        yield f"{plural(number, 'metric is', 'metrics are')} of a release that is not on record"
    unknown = (
        "SELECT count(*) FROM metrics WHERE kind = 'train' AND release BETWEEN 0 AND ? "
        "AND release - 1 NOT IN (SELECT round FROM attempts WHERE state = 'released')"
    )
    if (number := connection.execute(unknown, (released,)).fetchone()[0]) > 0:
        yield f"{plural(number, 'metric', 'metrics')} of training belong to a round that gave no model"
    told = connection.execute("SELECT release, data FROM metrics WHERE kind = 'train'")
    wrong = sum(
        parse_json(data, dict, "a metric on record").get("releases", release) != release for release, data in told
    )
    if wrong:
        yield f"{plural(wrong, 'metric', 'metrics')} of training count other releases than their own"


def _of_the_last_model(connection: sqlite3.Connection) -> Iterator[str]:
    latest, models = model_file.described(connection), attempts.count_models(connection)
    if (latest is None) != (models == 0) or (latest is not None and latest.round != models - 1):
        here = "none" if latest is None else f"number {latest.round + 1}"
        yield f"the last model on record is {here}, and {plural(models, 'model is', 'models are')} released"


def _of_openings(connection: sqlite3.Connection) -> Iterator[str]:
    """What keepers opened is released or spent, and nothing is spent that they were not asked to open."""
    undone = (
        "SELECT count(*) FROM openings LEFT JOIN attempts USING (round, attempt) "
        "WHERE coalesce(state, '') NOT IN ('opening', 'released', 'spent')"
    )
    unasked = (
        "SELECT count(*) FROM attempts LEFT JOIN openings USING (round, attempt) "
        "WHERE state IN ('opening', 'spent') AND list_hash IS NULL"
    )
    if (number := connection.execute(undone).fetchone()[0]) > 0:
        yield f"keepers were asked to open {plural(number, 'round', 'rounds')} that count as neither released nor spent"
    if (number := connection.execute(unasked).fetchone()[0]) > 0:
        yield f"{plural(number, 'round is', 'rounds are')} spent that no keepers were asked to open"


def _of_the_run(connection: sqlite3.Connection) -> Iterator[str]:
    run = stored_run(connection)
    if not run.simulated and not (len(run.stream_id) == _STREAM_ID_DIGITS and set(run.stream_id) <= _HEX):
        yield f"the run is called private, and its stream is that of a simulation or made up ({run.stream_id!r})"
    if not set(run.key_fingerprint) <= _HEX:
        yield f"the key's fingerprint is none: {run.key_fingerprint!r}"
    flying = "SELECT count(*) FROM attempts WHERE state IN ('planned', 'aggregated', 'opening')"
    if run.sealed is not None and connection.execute(flying).fetchone()[0]:
        yield "the run is sealed, and an attempt is in flight"
    if wrong := {text for moments in _chains(connection) for text in moments if _moment(text) is None}:
        yield f"{plural(len(wrong), 'time', 'times')} on record cannot be read"


def disorder(connection: sqlite3.Connection) -> int:
    """How many times on record are before the one that they must follow: a clock was set back, or somebody wrote them."""
    found = 0
    for moments in _chains(connection):
        before = None
        for moment in map(_moment, moments):
            found += None not in (moment, before) and moment < before  # type: ignore[operator]
            before = moment or before
    return found


def _chains(connection: sqlite3.Connection) -> Iterator[Iterator[str]]:
    """Every time on record, in rows of which each is before the next."""
    run = stored_run(connection)
    attempts = connection.execute("SELECT planned, aggregated, ended FROM attempts ORDER BY id")
    in_turn = (moment for row in attempts for moment in row)
    yield (moment for moment in chain([run.created], in_turn, [run.sealed]) if moment is not None)
    # A skip follows the release of the round before, and comes before that of its own.
    skips = connection.execute(
        "SELECT before.ended, at, after.ended FROM skips "
        "LEFT JOIN attempts AS before ON before.round = skips.round - 1 AND before.state IN ('released', 'spent') "
        "LEFT JOIN attempts AS after ON after.round = skips.round AND after.state IN ('released', 'spent')"
    )
    for row in skips:
        yield (moment for moment in (run.created, *row) if moment is not None)


def _moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


def compare_with_register(connection: sqlite3.Connection, register: Path) -> tuple[list[str], list[str]]:
    """Where a ledger differs from what the register of its key's runs knows of the run: what contradicts it, and what to ask.

    The register is written after the ledger: a crash in between leaves the ledger one round ahead, and no more. A seal that it
    does not know is no contradiction: `seal` without the key file writes into the ledger alone.

    Raises ValueError if there is no register at `register`.
    """
    run = stored_run(connection)
    known = next((one for one in read_register(register) if one.stream_id == run.stream_id), None)
    if known is None:
        return [f"{register}, the register of its key's runs, does not know of this run"], []
    nonces = attempts.nonces_of(connection)
    problems, notes = [], []
    if known.settings != identity_hash(vars(run)):
        problems.append(f"plan, configuration or key are not those with which {register} knows the run")
    if len(nonces) < known.released:
        problems.append(
            f"the key has released {plural(known.released, 'round', 'rounds')} of this run ({register}), and "
            f"{len(nonces)} are on record: it is an older copy, or releases were taken out"
        )
    elif len(nonces) > known.released + 1:
        problems.append(
            f"{plural(len(nonces), 'round is', 'rounds are')} on record, and {register} knows of {known.released}: "
            "it is an older copy of the register"
        )
    elif known.released and nonces[known.released - 1].to_bytes(NONCE_BYTES, "big") != known.nonce:
        problems.append(
            f"round {known.released} was released under another nonce than {register} knows: another copy of "
            "this ledger went on, or somebody changed it"
        )
    if known.sealed is not None and run.sealed is None:
        problems.append(
            f"the run was sealed on {clean(known.sealed)} ({register}), and this ledger is not: it is an older copy"
        )
    if known.sealed is None and run.sealed is not None:
        notes.append(
            f"the ledger says that the run was sealed on {run.sealed}, and {register} does not: the seal was written by hand, "
            "or its key was kept elsewhere; ask whether it is deleted"
        )
    return problems, notes
