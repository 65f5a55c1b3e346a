"""Metrics that clients measured on their users' data and that are reported without noise: no ε covers them."""

import sqlite3
from collections.abc import Mapping
from typing import Any

FORWARDED = "forward_client_metrics"  # in a run's configuration, where it is on
KIND = "evaluate on clients"  # of the metrics on record
CONFIG = (
    "evaluate_config"  # beside them, under release 0: what an inner strategy has made of the evaluation's configuration
)

NOT_COVERED = (
    "Metrics that clients measure on their users' data are forwarded as they are (forward_client_metrics=True): they have no "
    "noise, and no ε covers them."
)


def forwards_client_metrics(connection: sqlite3.Connection, configuration: Mapping[str, Any]) -> bool:
    """Whether the run says so, or such metrics are on record: earlier versions did not put it in the configuration."""
    found = connection.execute("SELECT 1 FROM metrics WHERE kind = ? LIMIT 1", (KIND,)).fetchone()
    return bool(configuration.get(FORWARDED)) or found is not None
