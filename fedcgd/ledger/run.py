"""The ledger of a run in progress: each method is one durable step."""

import json
import secrets
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedcgd.ledger import attempts, model_file
from fedcgd.ledger.attempts import ParticipationCounter, RecordedOpening
from fedcgd.ledger.registry import RegisteredRun, Registry, read_register
from fedcgd.ledger.store import RunLock, RunSettings, checkpoint, connect, migrate, stored_run, write_run
from fedcgd.ledger.texts import refuse
from fedcgd.noise.keys import NONCE_BYTES, NoiseKey, runs_file
from fedcgd.participation.cohorts import check_round
from fedcgd.participation.history import History
from fedcgd.participation.user_ids import user_ids
from fedcgd.plan import Plan, differences, plan_differences
from fedcgd.support.records import MEMORY, Closable, check_record, now, transaction


@dataclass(frozen=True)
class Run:
    """Where a run stands.

    Attributes:
        round: the one to do next, from 0: so many are released.
        nonces: under which nonce each of them was released.
        model: what was released last; None before the first release.
        state: that of the inner strategy, which belongs to it.
        layout: what the model's arrays are, as `record_released` was told.
    """

    round: int
    nonces: tuple[int, ...]
    model: bytes | None
    state: bytes | None
    layout: str


class Ledger(Closable):
    """A ledger open for writing, by one process at a time. Make one with `Ledger.open`.

    Guarantees, whatever is killed when: no (round, nonce) is released twice, no round is released twice, and every
    participation of a released round is on record. A user's participation is counted when the round is planned, answered or not.

    Attributes:
        stream_id (str): names this run's part of the key: `key.noise_of(stream_id)`, `key.choices_of(stream_id)`.
        simulated (bool): whether the run's key came from a simulation seed, so that nothing in it is private. For ever.

    >>> from fedcgd import DPSGD, Participation
    >>> plan = Plan.calibrated(DPSGD(), Participation(rounds=4), clip_norm=1.0, epsilon=8, delta=1e-5)
    >>> with Ledger.open(":memory:", plan=plan, configuration={}, key=NoiseKey.simulation(1)) as ledger:
    ...     attempt = ledger.plan_round(0, ["ada", "ben"])
    ...     ledger.record_aggregated(0, attempt, nonce=7)
    ...     ledger.record_released(0, attempt, b"model")
    ...     ledger.resume().round
    1
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        registry: Registry | None,
        lock: RunLock | None,
        plan: Plan,
        owner: str,
        stream_id: str,
        simulated: bool,
        path: Path | None,
    ) -> None:
        self._connection = connection
        self._path = path
        self._in_memory = b"", b""  # the last model and state, where there is no path
        self._registry = registry
        self._lock = lock
        self._plan = plan
        self._owner = owner
        self._participations = ParticipationCounter(connection, plan.participation)
        self.stream_id = stream_id
        self.simulated = simulated

    @classmethod
    def open(
        cls, path: Path | str, *, plan: Plan, configuration: Mapping[str, Any], key: NoiseKey, purpose: str = ""
    ) -> Self:
        """The ledger at `path`, made if there is none.

        A ledger of format 3, of an earlier version, goes on as one of today. A round that was begun and not released is
        abandoned. While another process that lives has the ledger open, this is refused; what this process itself has opened
        before is shut out.

        A key that remembers its runs (`key.runs`) refuses to begin one again without its ledger, and to go on from an old copy.
        With a key that does not, never open an old copy: rounds released since then would be released again, with fresh noise,
        and ε spent twice without either copy's knowing.

        Args:
            path: the file; ":memory:" keeps it in memory.
            plan: what runs and what is accounted for.
            configuration: whatever else defines the run, JSON-able.
            key: where the run's noise comes from. It is not written to the ledger.
            purpose: under one simulation key, which shall repeat, runs have the same noise unless this differs; under any other
                key no two runs share noise.

        Raises:
            ValueError: if another process has the ledger open; if it is sealed, or is that of another plan, configuration, key or
                definition of the noise; if others may read it, or write it or the register, or their folders; if the register is
                lost, emptied or another key's; and if it has released rounds that the key's register does not
                know of. A key file that was made just now, for this run,
                is deleted then.
        """
        try:
            opened = cls._open(path, plan, configuration, key, purpose)
        except ValueError:
            discard_unused(key)
            raise
        key.keep_file()
        return opened

    @classmethod
    def _open(cls, path: Path | str, plan: Plan, configuration: Mapping[str, Any], key: NoiseKey, purpose: str) -> Self:
        defined = RunSettings.from_plan(plan, configuration, key)
        path = MEMORY if str(path) == MEMORY else path
        file = None if path == MEMORY else Path(path).resolve()  # links may change while the run goes on
        name = MEMORY if file is None else str(Path(path).absolute())
        if key.runs is not None and key.runs.resolve() == Path(name).resolve():
            raise refuse("ledger-is-the-register", path=path)
        if problem := key.record_problem("the register of this key's runs"):
            raise refuse("register-lost", problem=problem)
        if file is not None:
            check_record(file, "the ledger, which says who took part when,")
        with ExitStack() as stack:
            registry = None if key.runs is None else stack.enter_context(closing(Registry(key.runs)))
            if file is not None and not file.exists():  # what is refused leaves no file
                if registry is not None:  # first: where a ledger is lost, its model's file may not be
                    registry.check_new(defined.run_hash, name)
                model_file.check_unused(file)
            connection = stack.enter_context(closing(connect(path)))
            # Before anything that another process might notice.
            lock = None if file is None else stack.enter_context(closing(RunLock(file)))
            with transaction(connection):
                new = connection.execute("SELECT 1 FROM run").fetchone() is None
                if new:
                    # A simulation shall repeat, with a ledger or without one.
                    write_run(connection, defined, purpose if key.simulated else secrets.token_hex(16))
                migrate(connection, name)
                _check_same(connection, name, defined, key)
                stream_id = stored_run(connection).stream_id
                # First: the key counts them as releases, and compares.
                attempts.spend(connection)
                nonces = attempts.nonces_of(connection)
                # Before the run is in the ledger: of what a crash leaves in the registry alone, nothing was ever released.
                if registry is not None and new:
                    registry.begin(stream_id, defined.run_hash, name)
                elif registry is not None:
                    registry.resume(stream_id, defined.run_hash, name, nonces)
                if file is not None:
                    _note_place(connection, file, len(nonces))
                owner = secrets.token_hex(16)
                connection.execute("UPDATE run SET owner = ?", (owner,))
                attempts.abandon(connection, file)
            if lock is not None:
                lock.take_over()
            checkpoint(connection)
            stack.pop_all()
        return cls(connection, registry, lock, plan, owner, stream_id, key.simulated, file)

    def close(self) -> None:
        """Close the file; what is recorded stays."""
        self._connection.close()
        for held in (self._registry, self._lock):
            if held is not None:
                held.close()

    def other_runs(self) -> list[RegisteredRun]:
        """The other runs that have released rounds, sealed ones and those of earlier keys too, by when they began.

        As far as the key's register remembers them: it stays when a key is deleted, and a key made in its place goes on with it.
        """
        return [] if self._registry is None else self._registry.others(self.stream_id)

    def resume(self) -> Run:
        """Where the run stands, with the last released model and inner state.

        Raises:
            ValueError: with the remedy, if the file that holds these is missing or is another.
        """
        nonces, last = attempts.nonces_of(self._connection), model_file.described(self._connection)
        if last is None:
            return Run(len(nonces), nonces, None, None, "")
        model, state = self._in_memory if self._path is None else model_file.read(self._path, last)
        return Run(len(nonces), nonces, model, state, last.layout)

    def history(self, users: Collection[str]) -> History:
        """The participations so far of those users that have any.

        Args:
            users: their ids.
        """
        with self._write():
            known = self._participations.of(users)
        return History(
            {user: record.participations for user, record in known.items()},
            {user: record.last_round for user, record in known.items()},
        )

    def plan_round(self, round: int, users: Collection[str]) -> int:
        """Begin an attempt at a round: its users are counted as having taken part, whether they answer or not.

        Args:
            round: the first that is not released, from 0.
            users: the ids of those who are asked.

        Returns:
            The attempt: how often the round was tried before.

        Raises:
            ValueError: and changes nothing, if it is not this round's turn, if another attempt is in flight, or if a user would
                exceed the plan's participation.
        """
        check_round(self._plan.participation, round)
        with self._write():
            attempts.check_turn(self._connection, round)
            counted = self._participations.count(round, users)
            ids = np.array([one.id for one in counted.values()], np.int64)
            attempt = attempts.begin(self._connection, round, ids)
        self._participations.remember(counted)  # only now, when it is on record
        return attempt

    def record_aggregated(self, round: int, attempt: int, nonce: int) -> None:
        """The sum of the round is there, and its noise, which comes next, is that of `nonce`.

        Args:
            round: the round, from 0.
            attempt: what `plan_round` returned.
            nonce: what `NoiseKey.nonce_of` made for this sum, below 2¹²⁸.

        Raises:
            ValueError: unless this attempt is in flight, and if the round had noise of this nonce before.
        """
        with self._write():
            attempts.advance_summed(self._connection, round, attempt, "aggregated", nonce.to_bytes(NONCE_BYTES, "big"))

    def record_opening(self, round: int, attempt: int, list_hash: bytes, keepers: Sequence[str]) -> int:
        """The masked sum of the round is there, and `keepers`, who are asked next, make its noise; the result is its nonce.

        From here on the round is released or spent: it cannot be tried again.

        Args:
            round: the round, from 0.
            attempt: its try, which is in flight.
            list_hash: SHA-256 of what they are asked to open (`fedcgd.keepers.keeper.list_hash`).
            keepers: their names.

        Raises:
            ValueError: unless this attempt is in flight.
        """
        with self._write():
            attempts.write_opening(self._connection, round, attempt, list_hash, list(keepers))
        return int.from_bytes(list_hash[:NONCE_BYTES], "big")

    def openings(self) -> tuple[RecordedOpening, ...]:
        """What keepers were asked to open, round by round."""
        return attempts.read_openings(self._connection)

    def spend(self, round: int, reason: str) -> None:
        """The round that keepers were asked to open ends without a new model, and counts as released all the same.

        Args:
            round: the round in state "opening".
            reason: for the record.

        Raises:
            ValueError: if no such round is in flight, or another copy of the run has gone so far.
        """
        with self._counted(), self._write():
            if not attempts.spend(self._connection):
                raise refuse("not-opening", round=round)
            if self._path is not None:
                model_file.discard(self._path, model_file.count_models(self._connection))
            self._connection.execute("INSERT INTO skips (round, at, reason) VALUES (?, ?, ?)", (round, now(), reason))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """The block lets the attempt whose sum is there count as a release; no other copy of the run can do so meanwhile."""
        if self._registry is None:
            yield
            return
        released = attempts.count_released(self._connection)
        latest = attempts.nonces_of(self._connection, *attempts.SUMMED)
        with self._registry.release(self.stream_id, released, latest):
            yield

    def record_released(
        self,
        round: int,
        attempt: int,
        model: bytes | memoryview,
        state: bytes | memoryview = b"",
        layout: str = "",
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """The round is released: the model is durable, and may now leave the process.

        When this returns, the ledger is whole without its `-wal`: its own file, and the one with the model.

        Args:
            round: the round, from 0.
            attempt: what `plan_round` returned.
            model: the new model, which `resume` gives back.
            state: that of the inner strategy, durable together with the model.
            layout: what the model's arrays are, for `fedcgd.ledger.released_model`: JSON of (names, shapes, dtypes).
            metrics: of the release, JSON-able, which `metrics("train")` gives back.

        Raises:
            ValueError: unless this attempt is in flight and its sum is there, and if another copy of the run has released the
                round; nothing is recorded then, and nothing may be released.
        """
        with self._counted():
            with self._write():
                models = model_file.count_models(self._connection)  # rounds, but for spent ones
                attempts.advance_released(self._connection, round, attempt)
                if metrics is not None:
                    self._write_metrics("train", round + 1, metrics)
                parts = memoryview(model).cast("B"), memoryview(state).cast("B")
                model_file.describe(self._connection, model_file.write(self._path, models, *parts, layout))
            if self._path is None:
                self._in_memory = parts[0].tobytes(), parts[1].tobytes()
            checkpoint(self._connection)

    def skip(self, round: int, reason: str) -> None:
        """The round is not released this time: its attempt, if one is in flight, is abandoned. Its turn remains.

        Args:
            round: the round, from 0.
            reason: for the record.

        Raises:
            ValueError: if it is not this round's turn.
        """
        check_round(self._plan.participation, round)
        with self._write():
            attempts.abandon(self._connection, self._path)
            attempts.check_turn(self._connection, round)
            self._connection.execute("INSERT INTO skips (round, at, reason) VALUES (?, ?, ?)", (round, now(), reason))

    def bind_users(self, users: Collection[str], node: str, *, single: bool = False) -> set[str]:
        """Those of `users` that no other node speaks for; from now on, for the whole run, they are `node`'s.

        Args:
            users: whom the node names.
            node: its name, which outlives connections. "" is a node without one: it keeps nobody, and gets users of no node.
            single: whether the node is one user: then the answer is nobody, if it has spoken for another one in this run.

        Raises:
            TypeError: for what is no list of ids.
            ValueError: if a user is named twice.
        """
        users = user_ids(users)
        with self._write():
            connection = self._connection
            if (
                single
                and connection.execute(
                    "SELECT 1 FROM hosts WHERE node = ? AND user NOT IN (SELECT value FROM json_each(?))",
                    (node, json.dumps(list(users))),
                ).fetchone()
            ):
                return set()
            connection.execute("DELETE FROM asked")
            connection.executemany("INSERT OR IGNORE INTO asked VALUES (?)", ((user,) for user in users))
            if node:
                connection.execute("INSERT OR IGNORE INTO hosts SELECT user, ? FROM asked", (node,))
            others = connection.execute("SELECT user FROM asked JOIN hosts USING (user) WHERE node != ?", (node,))
            return set(users) - {user for (user,) in others}

    def record_metrics(self, kind: str, release: int, metrics: Mapping[str, Any]) -> None:
        """Keep what was measured after a release, for `metrics` to give back when the run goes on.

        Args:
            kind: what was measured, such as "evaluate".
            release: the number of the release, from 1; 0 for the initial model.
            metrics: JSON-able.
        """
        with self._write():
            self._write_metrics(kind, release, metrics)

    def _write_metrics(self, kind: str, release: int, metrics: Mapping[str, Any]) -> None:
        row = (kind, release, json.dumps(dict(metrics)))
        self._connection.execute("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", row)

    def metrics(self, kind: str) -> dict[int, dict[str, Any]]:
        """What was measured of this kind, by release.

        Args:
            kind: as in `record_metrics`; "train" is what `record_released` was given.
        """
        rows = self._connection.execute("SELECT release, data FROM metrics WHERE kind = ? ORDER BY release", (kind,))
        return {release: json.loads(data) for release, data in rows}

    @contextmanager
    def _write(self) -> Iterator[None]:
        """A transaction of the process that opened the ledger last. Raises ValueError in any other, and once it is sealed."""
        with transaction(self._connection):
            owner, sealed = self._connection.execute("SELECT owner, sealed FROM run").fetchone()
            if sealed is not None:
                raise refuse("sealed", path=self._path or "this ledger", sealed=sealed)
            if owner != self._owner:
                raise refuse("opened-again", path=self._path or "this ledger")
            yield


def discard_unused(key: NoiseKey) -> None:
    """Delete the file of a key that was made for a run which is refused, so that nobody takes it for that run's.

    Not if the register has a run that began since: another process may have found the file.
    """
    if key.made is None or key.runs is None:
        return
    if not key.runs.exists() or all(run.begun < key.made[1] for run in read_register(key.runs)):
        key.discard_file()


def _check_same(connection: sqlite3.Connection, path: str, defined: RunSettings, key: NoiseKey) -> None:
    """Raise ValueError, with what differs, unless the ledger is that of a run of these settings and `key`, and not sealed."""
    stored = stored_run(connection)
    if stored.sealed is not None:
        raise refuse("sealed", path=path, sealed=stored.sealed)
    differing = {
        "plan": plan_differences(stored.planned, json.loads(defined.plan)),
        "configuration": differences(stored.settings, json.loads(defined.configuration)),
    }
    for what, found in differing.items():
        if found:
            raise refuse(f"another-{what}", path=path, differing=", ".join(found))
    there = stored.defined
    if (there.key_fingerprint, there.simulated) != (defined.key_fingerprint, defined.simulated):
        if key.made is not None and not there.simulated:
            file = key.made[0].absolute()
            register = runs_file(file).name
            raise refuse("key-lost", path=path, file=file, register=register, there=there.key_fingerprint)
        raise refuse("another-key", path=path, there=there.key_fingerprint, here=defined.key_fingerprint)


def _note_place(connection: sqlite3.Connection, file: Path, released: int) -> None:
    """Keep which file the ledger is: one that was copied, moved to another disk or restored is another, and says so then."""
    inode = file.stat().st_ino
    if connection.execute("SELECT inode FROM places ORDER BY rowid DESC").fetchone() != (inode,):
        connection.execute("INSERT INTO places VALUES (?, ?, ?)", (now(), released, inode))
