"""The end of a run for good: its ledger is sealed and its key deleted."""

from contextlib import ExitStack, closing, suppress
from pathlib import Path

from fedcgd.ledger import attempts
from fedcgd.ledger.registry import Registry
from fedcgd.ledger.run_lock import RunLock
from fedcgd.ledger.store import StoredRun, checkpoint, connect, reader, stored_run
from fedcgd.ledger.transactions import now, transaction
from fedcgd.noise.keys import NoiseKey, delete_key_file, runs_file
from fedcgd.support.numbers import plural


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
        if NoiseKey.from_file(key_file).fingerprint != run.key_fingerprint:
            raise ValueError(
                f"{key_file} is not the key of this run (fingerprint {run.key_fingerprint}); nothing is deleted"
            )
        return
    if runs_file(key_file).exists():
        with closing(Registry(runs_file(key_file))) as registry:
            known = registry.run(run.stream_id)
        if known is not None and known.sealed is not None:
            return
    raise ValueError(f"there is no key file {key_file}: nothing is sealed, and nothing is deleted")


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
        released = plural(run.released, "round", "rounds")
        raise ValueError(
            f"{key_file} is also the key of the run in {run.ledger} ({released} released, not sealed): nothing is "
            f"sealed or deleted. Seal that run first with `fedcgd ledger seal {run.ledger}`, then this one with the key file; if "
            "that ledger is lost, seal this run without --key-file and delete the key yourself"
        )
