"""The records of a run as values that JSON can hold, without user ids and models."""

import sqlite3
from pathlib import Path
from typing import Any

from fedcgd.ledger import client_metrics
from fedcgd.ledger.store import reader, stored_run, unpack_ids
from fedcgd.ledger.verification import verify
from fedcgd.support.untrusted import clean, parse_json


def export(path: Path | str) -> dict[str, Any]:
    """The records of a run without user ids and models. Cohort sizes, and metrics of nodes, are not differentially private.

    Args:
        path: the ledger.

    Returns:
        JSON-able values: under `run` its settings, under `verification` what `verify` says, under `attempts` every attempt with
        the size of its cohort, in order, under `releases` what was told with each model, under `measured` what was measured of it
        afterwards, of which `kind`, under `skips` why rounds were not released, and under `users_by_participations` how many
        users took part how often.

    Raises:
        ValueError: if there is no ledger.
    """
    found = records(path)
    return {"run": found.pop("run"), "verification": verify(path).to_description(), **found}


def records(path: Path | str) -> dict[str, Any]:
    """As `export`, but for `verification`: for who verifies the ledger anyway. ValueError if there is none."""
    with reader(path) as connection:
        stored = stored_run(connection)
        run = {**vars(stored.defined), **vars(stored)}
        del run["defined"]
        (users,) = connection.execute("SELECT count(*) FROM users").fetchone()
        run |= {"plan": stored.planned, "configuration": stored.settings, "simulated": bool(stored.defined.simulated)}
        attempts = [
            {**row, "users": len(unpack_ids(row["users"], users))}
            for row in _rows(
                connection, "SELECT round, attempt, state, users, planned, aggregated, ended FROM attempts ORDER BY id"
            )
        ]
        skips = _rows(connection, "SELECT round, at, reason FROM skips ORDER BY id")
        histogram = dict(
            connection.execute("SELECT participations, count(*) FROM users GROUP BY participations ORDER BY 1")
        )
        metrics = _rows(connection, "SELECT kind, release, data FROM metrics ORDER BY kind, release")
        told = [
            (row["kind"], {"release": row["release"]} | parse_json(row["data"], dict, "a metric on record"))
            for row in metrics
        ]
    return {
        "run": run,
        "attempts": attempts,
        "releases": [values for kind, values in told if kind == "train"],
        "measured": [{"kind": kind} | values for kind, values in told if kind not in ("train", client_metrics.CONFIG)],
        "skips": skips,
        "users_by_participations": histogram,
    }


def _rows(connection: sqlite3.Connection, query: str) -> list[dict[str, Any]]:
    """What `query` finds, by the names of its columns."""
    found = connection.execute(query)
    names = [column[0] for column in found.description]
    # What is no JSON is for people to read, and may be anybody's.
    return [
        {
            name: clean(value) if isinstance(value, str) and name != "data" else value
            for name, value in zip(names, row, strict=True)
        }
        for row in found
    ]
