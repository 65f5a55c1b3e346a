"""A ledger whose key has lost its register: somebody says that it is the latest, and that is on record from then on."""

import sqlite3
from contextlib import closing
from pathlib import Path

from fedcgd.ledger import settings
from fedcgd.ledger.attempts import nonces_of
from fedcgd.ledger.evaluations import EVALUATION_OF, evaluation_ledger
from fedcgd.ledger.registry import RECORD_REMEDY, Registry
from fedcgd.ledger.store import checkpoint, connect, reader, stored_run
from fedcgd.ledger.transactions import now, transaction
from fedcgd.noise.keys import NoiseKey
from fedcgd.support.numbers import plural
from fedcgd.support.untrusted import clean

_TABLE = (
    "CREATE TABLE IF NOT EXISTS adoptions (at TEXT NOT NULL, released INTEGER NOT NULL, register TEXT NOT NULL) STRICT"
)


def adopt(path: Path | str, key: NoiseKey) -> int:
    """Let the register of `key` remember the run at `path`, which it does not know of; that is recorded in the ledger.

    You say that no other copy of the run has released anything since: nothing else can tell, and if one has, ε was spent twice.
    The ledger of the run's private evaluations beside it is adopted with it.

    Args:
        path: the run's latest ledger.
        key: its key, with the file that shall remember its runs (`key.runs`; it is made if it is not there).

    Returns:
        How many rounds the run has released.

    Raises:
        ValueError: if there is no ledger, or it is sealed or of another key; if the key has no register, or that of another key
            or an emptied one lies in its place; and if the register knows of the run, or of one that the key began in its place.
    """
    released = _adopt(Path(path), key)
    beside = evaluation_ledger(Path(path))
    if beside.is_file():
        with reader(path) as training, reader(beside) as connection:
            of_the_training = stored_run(connection).settings.get(EVALUATION_OF) == stored_run(training).stream_id
        if of_the_training:
            _adopt(beside, key)
    return released


def _adopt(path: Path, key: NoiseKey) -> int:
    if key.runs is None:
        raise ValueError("this key has no register: name one with runs= where the key is loaded")
    with reader(path) as connection:
        run = stored_run(connection)
        nonces = nonces_of(connection)
    if run.key_fingerprint != key.fingerprint:
        raise ValueError(
            f"{path} is of the key with fingerprint {run.key_fingerprint}, and this one has {key.fingerprint}; give "
            "the key that the run began with"
        )
    if run.sealed is not None:
        raise ValueError(f"{path} was sealed on {run.sealed}: its run is over, and there is nothing to go on with")
    if key.runs.exists() and (problem := key.record_problem("the register of this key's runs")):
        raise ValueError(f"{problem}. {RECORD_REMEDY}")
    with closing(Registry(key.runs, key.record)) as registry, closing(connect(path)) as connection:
        identity, name = settings.identity_hash(vars(run)), str(path.absolute())
        registry.check_unknown(run.stream_id, identity, name)
        with transaction(connection):  # first: what is adopted is on record
            connection.execute(_TABLE)
            connection.execute("INSERT INTO adoptions VALUES (?, ?, ?)", (now(), len(nonces), str(key.runs)))
        checkpoint(connection)
        registry.adopt(run.stream_id, identity, name, nonces)
    return len(nonces)


def adoptions(connection: sqlite3.Connection) -> tuple[str, ...]:
    """When the ledger was adopted, and after how many rounds; empty for nearly every run."""
    if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'adoptions'").fetchone():
        return ()
    rows = connection.execute("SELECT at, released FROM adoptions ORDER BY at").fetchall()
    return tuple(
        f"on {clean(at, 10)}, after {plural(released, 'round', 'rounds')}, its operator declared this the latest ledger of the "
        "run: the key's register, which would show another copy, was lost"
        for at, released in rows
    )
