"""What an operator declares of a run: that it is over (its ledger is sealed, its key deleted), or that a ledger is its latest."""

from contextlib import ExitStack, closing, suppress
from pathlib import Path

from fedcgd.ledger import attempts
from fedcgd.ledger.registry import Registry
from fedcgd.ledger.run_composition import EVALUATION_OF, evaluation_ledger
from fedcgd.ledger.store import RunLock, StoredRun, checkpoint, connect, reader, stored_run, write_later
from fedcgd.ledger.texts import refuse
from fedcgd.noise.keys import NoiseKey, delete_key_file, runs_file
from fedcgd.support.records import now, transaction


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
        if NoiseKey.from_file(key_file).fingerprint != run.defined.key_fingerprint:
            raise refuse("another-key-to-seal", path=key_file, fingerprint=run.defined.key_fingerprint)
        return
    if runs_file(key_file).exists():
        with closing(Registry(runs_file(key_file))) as registry:
            known = registry.run(run.stream_id)
        if known is not None and known.sealed is not None:
            return
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
        raise refuse("key-without-register")
    with reader(path) as connection:
        run, nonces = stored_run(connection), attempts.nonces_of(connection)
    if run.defined.key_fingerprint != key.fingerprint:
        raise refuse("another-key", path=path, there=run.defined.key_fingerprint, here=key.fingerprint)
    if run.sealed is not None:
        raise refuse("sealed", path=path, sealed=run.sealed)
    if key.runs.exists() and (problem := key.record_problem("the register of this key's runs")):
        raise refuse("register-lost", problem=problem)
    with closing(Registry(key.runs, key.record)) as registry, closing(connect(path)) as connection:
        run_hash, name = run.defined.run_hash, str(path.absolute())
        registry.check_unknown(run.stream_id, run_hash, name)
        with transaction(connection):  # first: what is adopted is on record
            write_later(connection, "adoptions", now(), len(nonces), str(key.runs))
        checkpoint(connection)
        registry.adopt(run.stream_id, run_hash, name, nonces)
    return len(nonces)
