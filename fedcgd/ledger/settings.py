"""Which run a ledger is of: its plan, its configuration and its key, written once and compared whenever it is opened."""

import json
import secrets
import sqlite3
from collections.abc import Mapping
from typing import Any

from fedcgd.ledger.store import FORMAT, sha256, stored_run, to_json
from fedcgd.ledger.transactions import now
from fedcgd.noise import STREAM
from fedcgd.noise.keys import NoiseKey, runs_file
from fedcgd.plan import Plan, differences, plan_differences

TRAINING = "training"  # of the inner strategy in a run's configuration: what of it changes training

_ANOTHER = (
    "Do not take another path instead: that would be a second run over the same people, and everybody in both would pay for both "
    "(fedcgd ledger compose)"
)


def settings_of(plan: Plan, configuration: Mapping[str, Any], key: NoiseKey) -> dict[str, Any]:
    """What defines a run, as columns of the ledger. Raises ValueError for a configuration that JSON cannot hold."""
    return {
        "plan": to_json(plan.to_description()),
        "configuration": to_json({**configuration, "noise stream": STREAM}),
        "key_fingerprint": key.fingerprint,
        "simulated": int(key.simulated),
    }


def identity_hash(settings: Mapping[str, Any]) -> str:
    """A text that is the same for runs of the same settings."""
    return sha256(f"{settings['plan']} {settings['configuration']} {settings['key_fingerprint']}")


def write(connection: sqlite3.Connection, settings: Mapping[str, Any], purpose: str) -> None:
    """Let the ledger be that of a new run of these settings."""
    # A simulation shall repeat, with a ledger or without one.
    stream_id = purpose if settings["simulated"] else secrets.token_hex(16)
    connection.execute(
        "INSERT INTO run (id, format, created, plan, configuration, configuration_hash, stream_id, key_fingerprint, "
        "simulated, owner) VALUES (1, :format, :created, :plan, :configuration, :hash, :stream_id, :key_fingerprint, "
        ":simulated, '')",
        {
            **settings,
            "format": FORMAT,
            "created": now(),
            "hash": sha256(f"{settings['plan']} {settings['configuration']}"),
            "stream_id": stream_id,
        },
    )


def check_same(connection: sqlite3.Connection, path: str, settings: Mapping[str, Any], key: NoiseKey) -> None:
    """Raise ValueError, with what differs, unless the ledger is that of a run of these settings and `key`, and not sealed."""
    stored = stored_run(connection)
    if stored.format != FORMAT:
        raise ValueError(f"{path} has format {stored.format}, and this version of fedcgd reads format {FORMAT}")
    if stored.sealed is not None:
        raise ValueError(
            f"{path} was sealed on {stored.sealed}: its run is over; begin another one with a new ledger and key"
        )
    for name, before, compared in (
        ("plan", stored.planned, plan_differences),
        ("configuration", stored.settings, differences),
    ):
        differing = compared(before, json.loads(settings[name]))
        if differing:
            raise ValueError(
                f"{path} is the ledger of another run: its {name} is not the same (on record → here): {', '.join(differing)}; "
                f"give the same. {_ANOTHER}"
            )
    lost = f"If it is lost, the run is over: `fedcgd ledger seal {path}`. {_ANOTHER}"
    if (stored.key_fingerprint, stored.simulated) != (settings["key_fingerprint"], settings["simulated"]):
        if key.made is not None and not stored.simulated:
            file = key.made[0].absolute()
            raise ValueError(
                f"there is no key file {file}, and the run in {path} began with a key (fingerprint {stored.key_fingerprint}): "
                f"put its file there again, with its register {runs_file(file).name}, or name the file where it is. {lost}"
            )
        raise ValueError(
            f"{path} is the ledger of another run: its key fingerprint is {stored.key_fingerprint}, here it is "
            f"{settings['key_fingerprint']}; give the key that the run began with. {lost}"
        )
