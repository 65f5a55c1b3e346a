"""The records of a run as values that JSON can hold, without user ids and models."""

import json
from pathlib import Path
from typing import Any

from fedcgd.ledger import client_metrics
from fedcgd.ledger.store import reader, unpack_ids
from fedcgd.ledger.verification import verify


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
    with reader(path) as connection:
        columns = "created, plan, configuration, configuration_hash, stream_id, key_fingerprint, simulated, sealed"
        values = connection.execute(f"SELECT {columns} FROM run").fetchone()  # noqa: S608
        run = dict(zip(columns.split(", "), values, strict=True))
        run |= {name: json.loads(run[name]) for name in ("plan", "configuration")}
        run["simulated"] = bool(run["simulated"])
        attempts = [
            {
                "round": round,
                "attempt": attempt,
                "state": state,
                "users": len(unpack_ids(packed)),
                "planned": planned,
                "aggregated": aggregated,
                "ended": ended,
            }
            for round, attempt, state, packed, planned, aggregated, ended in connection.execute(
                "SELECT round, attempt, state, users, planned, aggregated, ended FROM attempts ORDER BY id"
            )
        ]
        skips = [
            {"round": round, "at": at, "reason": reason}
            for round, at, reason in connection.execute("SELECT round, at, reason FROM skips ORDER BY id")
        ]
        metrics = connection.execute("SELECT release, data FROM metrics WHERE kind = 'train' ORDER BY release")
        releases = [{"release": release} | json.loads(data) for release, data in metrics]
        others = connection.execute(
            "SELECT kind, release, data FROM metrics WHERE kind NOT IN ('train', ?) ORDER BY kind, release",
            (client_metrics.CONFIG,),
        )
        measured = [{"kind": kind, "release": release} | json.loads(data) for kind, release, data in others]
        histogram = dict(
            connection.execute("SELECT participations, count(*) FROM users GROUP BY participations ORDER BY 1")
        )
    return {
        "run": run,
        "verification": verify(path).to_description(),
        "attempts": attempts,
        "releases": releases,
        "measured": measured,
        "skips": skips,
        "users_by_participations": histogram,
    }
