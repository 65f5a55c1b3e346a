"""The runs that a key has begun, in a small file next to the key: so that a run is not begun again when its ledger is lost.

And the end of a run: its ledger is sealed, and its key deleted.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fedcgd.ledger import attempts
from fedcgd.ledger.store import RunLock, StoredRun, checkpoint, connect, migrate, reader, stored_run
from fedcgd.ledger.texts import refuse
from fedcgd.noise.keys import NONCE_BYTES, NoiseKey, delete_key_file, runs_file
from fedcgd.support.records import check_record, check_tables, make_record, now, read_only, record_name, transaction

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    stream_id TEXT PRIMARY KEY,
    settings TEXT NOT NULL,
    ledger TEXT NOT NULL,
    begun TEXT NOT NULL,
    released INTEGER NOT NULL,
    nonce BLOB,
    sealed TEXT
) STRICT
"""

_COLUMNS = "stream_id, settings, ledger, begun, released, nonce, sealed"


@dataclass(frozen=True)
class RegisteredRun:
    """A run that a key has begun: which ledger it was last seen in, and how many rounds it had released, the last as `nonce`."""

    stream_id: str
    settings: str
    ledger: str
    begun: str
    released: int
    nonce: bytes | None
    sealed: str | None


def read_register(path: Path) -> list[RegisteredRun]:
    """The runs in the register at `path`, which is only read. Raises ValueError if it is none."""
    if not path.is_file():
        raise refuse("register-missing", path=path)
    try:
        record_name(path)
        with read_only(path) as connection:
            check_tables(connection, _SCHEMA)
            if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'runs'").fetchone():
                return []  # made with its key, before the first run
            rows = connection.execute(f"SELECT {_COLUMNS} FROM runs ORDER BY begun")  # noqa: S608
            return [RegisteredRun(*row) for row in rows]
    except (sqlite3.DatabaseError, ValueError) as error:
        raise refuse("unreadable-register", path=path, error=error) from error


def register_beside(ledger: Path, named: Path | None = None) -> Path | None:
    """The register that knows of the ledger's run: `named`, or one of its folder (noise.key.runs); None if there is none."""
    with reader(ledger) as connection:
        stream_id = stored_run(connection).stream_id
    beside = sorted(ledger.resolve().parent.glob("*.runs"))
    for path in beside if named is None else [named, *beside]:
        with suppress(ValueError):
            if any(run.stream_id == stream_id for run in read_register(path)):
                return path
    return None


class Registry:
    """The runs of one key, in the file `path` (mode 0600, SQLite), which many processes may use. It holds no secret.

    Each release is written here after it is in the ledger and before it leaves the process; it gets into the ledger only while
    this file is locked and at its turn. So a ledger that is behind this file is an old copy, or lacks its `-wal`; and one whose
    last nonce differs is a copy that went its own way.
    Raises ValueError, with the remedy, for what must not go on; sqlite3.OperationalError if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        check_record(path, "the register of the key's runs,")
        try:
            make_record(path)
            record_name(path)
            self._connection = sqlite3.connect(path, timeout=60.0, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode = PERSIST")
            self._connection.execute("PRAGMA synchronous = EXTRA")
            self._connection.execute(_SCHEMA)
        except (OSError, ValueError, sqlite3.DatabaseError) as error:
            raise refuse("unreadable-register", path=path, error=error) from error

    def close(self) -> None:
        self._connection.close()

    def check_new(self, settings: str, ledger: str) -> None:
        """Raise ValueError if the key has begun a run of these `settings` that released anything or was sealed."""
        for run in self._runs("settings = ? AND (released > 0 OR sealed IS NOT NULL)", settings):
            raise refuse("begun-before", run=run, ledger=ledger, sealed=run.sealed or "no")

    def begin(self, stream_id: str, settings: str, ledger: str) -> None:
        """Remember a new run of these `settings`. Raises ValueError as `check_new` does."""
        with transaction(self._connection):
            self.check_new(settings, ledger)
            # A run that never released anything may begin again; the process that began it can then release nothing any more.
            unused = "DELETE FROM runs WHERE settings = ? AND released = 0 AND sealed IS NULL"
            self._connection.execute(unused, (settings,))
            self._insert(stream_id, settings, ledger)

    def resume(self, stream_id: str, settings: str, ledger: str, nonces: Sequence[int]) -> None:
        """Go on with a run whose ledger has released under these `nonces`. Raises ValueError if that ledger is not the latest."""
        with transaction(self._connection):
            found = self.run(stream_id)
            if found is None:
                for run in self._runs("settings = ?", settings):
                    raise refuse("begun-again", run=run, path=ledger)
                if nonces:
                    raise refuse("unknown-to-the-register", path=ledger, rounds=len(nonces), register=self._path)
                self._insert(stream_id, settings, ledger)
                return
            if len(nonces) < found.released:
                raise refuse("old-copy", path=ledger, rounds=len(nonces), released=found.released)
            if found.released and nonces[found.released - 1].to_bytes(NONCE_BYTES, "big") != found.nonce:
                raise refuse("copy-went-on", path=ledger, round=found.released)
            self._write(stream_id, len(nonces), nonces)
            self._connection.execute("UPDATE runs SET ledger = ? WHERE stream_id = ?", (ledger, stream_id))

    @contextmanager
    def release(self, stream_id: str, released: int, latest: Sequence[int]) -> Iterator[None]:
        """The block puts the round after the `released` ones into the ledger; no other copy of the run can do so meanwhile.

        `latest` holds the nonce of the round, as it is on record: nothing, if its sum is not there yet.

        Raises ValueError before the block, so that nothing is recorded, if another copy of the run has gone so far.
        """
        with transaction(self._connection):
            found, round = self.run(stream_id), released + len(latest)
            if found is not None and found.released < round - 1:
                raise refuse("interrupted", round=round, register=self._path)
            if found is None or found.released > round - 1:
                raise refuse("another-copy", round=round, known=0 if found is None else found.released)
            yield
            self._write(stream_id, round, latest)

    def seal(self, stream_id: str, sealed: str) -> None:
        """The run is over."""
        self._connection.execute("UPDATE runs SET sealed = ? WHERE stream_id = ?", (sealed, stream_id))

    def run(self, stream_id: str) -> RegisteredRun | None:
        """What is known of one run."""
        return next(iter(self._runs("stream_id = ?", stream_id)), None)

    def others(self, stream_id: str) -> list[RegisteredRun]:
        """The other runs that have released something, as far as this file knows: of this key, or of one that was here before."""
        return self._runs("stream_id != ? AND released > 0", stream_id)

    def _insert(self, stream_id: str, settings: str, ledger: str) -> None:
        self._connection.execute(
            "INSERT INTO runs (stream_id, settings, ledger, begun, released) VALUES (?, ?, ?, ?, 0)",
            (stream_id, settings, ledger, now()),
        )

    def _write(self, stream_id: str, released: int, nonces: Sequence[int]) -> None:
        last = nonces[-1].to_bytes(NONCE_BYTES, "big") if nonces else None
        self._connection.execute(
            "UPDATE runs SET released = ?, nonce = ? WHERE stream_id = ?", (released, last, stream_id)
        )

    def _runs(self, condition: str, value: str) -> list[RegisteredRun]:
        rows = self._connection.execute(
            f"SELECT {_COLUMNS} FROM runs WHERE {condition} ORDER BY begun",  # noqa: S608
            (value,),
        )
        return [RegisteredRun(*row) for row in rows]


def seal(path: Path | str, key_file: Path | None) -> None:
    """End a run for good and delete its key file. May be repeated.

    Without the key nobody, the operator included, can remove the noise from what was released.

    Args:
        path: the ledger.
        key_file: the key; None if it is elsewhere, and yours to delete.

    Raises:
        ValueError: and neither seals nor deletes, if the key file is missing or is another key, if another run of the key is
            not sealed, or if another process has the ledger open.
    """
    with reader(path) as connection:  # it is a ledger: `connect` would make one of any other database
        run = stored_run(connection)
    with ExitStack() as stack:
        stack.enter_context(closing(RunLock(Path(path).resolve())))
        registry = None
        if key_file is not None:
            _check_key(key_file, run)
            registry = stack.enter_context(closing(Registry(runs_file(key_file))))
            _check_not_needed(registry, run.stream_id, key_file)
        connection = stack.enter_context(closing(connect(path)))
        with transaction(connection):
            migrate(connection, path)
            attempts.abandon(connection, Path(path))
            connection.execute("UPDATE run SET sealed = coalesce(sealed, ?)", (now(),))
        checkpoint(connection)
        if registry is not None:
            registry.seal(run.stream_id, now())
    if key_file is not None:
        delete_key_file(key_file)


def _check_key(key_file: Path, run: StoredRun) -> None:
    """Raise ValueError unless `key_file` is the key of `run`, or was until the run was sealed."""
    if key_file.exists():
        if NoiseKey.from_file(key_file).fingerprint != run.defined.key_fingerprint:
            raise refuse("another-key-to-seal", path=key_file, fingerprint=run.defined.key_fingerprint)
        return
    register = runs_file(key_file)
    if not (register.exists() and any(one.sealed for one in read_register(register) if one.stream_id == run.stream_id)):
        raise refuse("no-key-to-seal", path=key_file)


def _check_not_needed(registry: Registry, stream_id: str, key_file: Path) -> None:
    """Raise ValueError if another run of the key may go on. One that was sealed without its key file says so in its ledger."""
    for run in registry.others(stream_id):
        if run.sealed is not None:
            continue
        with suppress(ValueError), reader(run.ledger) as connection:
            stored = stored_run(connection)
            if stored.stream_id == run.stream_id and stored.sealed is not None:
                registry.seal(run.stream_id, stored.sealed)
                continue
        raise refuse("key-of-another-run", path=key_file, run=run)
