"""The ledger of a run in progress: each method is one durable step."""

import json
import secrets
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from fedcgd.keys import NoiseKey, delete_key_file, runs_file
from fedcgd.ledger import model_file
from fedcgd.ledger.registry import Registry
from fedcgd.ledger.store import (
    FORMAT,
    MEMORY,
    checkpoint,
    connect,
    pack_ids,
    reader,
    sha256,
    to_json,
)
from fedcgd.ledger.transactions import now, transaction
from fedcgd.noise import STREAM
from fedcgd.noise.nonce import NONCE_BYTES
from fedcgd.participation.cohorts import History, check_round
from fedcgd.plan import Plan


@dataclass(frozen=True)
class Run:
    """Where a run stands: the `round` to do next, under which nonce each earlier round was released, and what was released."""

    round: int
    nonces: tuple[int, ...]
    model: bytes | None
    state: bytes | None
    layout: str
    """What the model's arrays are, as `record_released` was told."""


_MOST_SEEN = 1_000_000  # users whose records are kept in memory


class _User(NamedTuple):  # made by the ten thousand: four times as fast as a frozen dataclass
    id: int
    participations: int
    last_round: int


class Ledger:
    """A ledger open for writing, by one process at a time. Make one with `Ledger.open`.

    Guarantees, whatever is killed when: no (round, nonce) is released twice, no round is released twice, and every
    participation of a released round is on record. A user's participation is counted when the round is planned, answered or not.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        registry: Registry | None,
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
        self._plan = plan
        self._owner = owner
        self._seen: dict[str, _User | None] = {}  # as recorded: nobody else may write while this process is the owner
        self.stream_id = stream_id
        """Names this run's part of the key: `key.noise_of(stream_id)`, `key.choices_of(stream_id)`."""
        self.simulated = simulated
        """Whether the run's key came from a simulation seed, so that nothing in it is private. For ever."""

    @classmethod
    def open(
        cls, path: Path | str, *, plan: Plan, configuration: Mapping[str, Any], key: NoiseKey, purpose: str = ""
    ) -> Self:
        """The ledger at `path`, made if there is none; ":memory:" keeps it in memory.

        A key that remembers its runs (`key.runs`) refuses to begin one again without its ledger, and to go on from an old copy.
        With a key that does not, never open an old copy: rounds released since then would be released again, with fresh noise,
        and ε spent twice without either copy's knowing.
        A round that was begun and not released is abandoned, and any other process that writes to the ledger is shut out.
        `configuration` is whatever else defines the run, JSON-able. Under one simulation key, which shall repeat, runs have the
        same noise unless their `purpose` differs; under any other key no two runs share noise. Raises ValueError if the ledger is
        sealed, or is that of another plan, configuration, key or definition of the noise.
        """
        values = {
            "plan": to_json(plan.to_description()),
            "configuration": to_json({**configuration, "noise stream": STREAM}),
            "key_fingerprint": key.fingerprint,
            "simulated": int(key.simulated),
        }
        settings = sha256(f"{values['plan']} {values['configuration']} {key.fingerprint}")
        file = None if path == MEMORY else Path(path).resolve()  # links may change while the run goes on
        name = MEMORY if file is None else str(Path(path).absolute())
        if key.runs is not None and key.runs.resolve() == Path(name).resolve():
            raise ValueError(f"{path} is where the key's runs are remembered; the ledger is a file of its own")
        with ExitStack() as stack:
            registry = None if key.runs is None else stack.enter_context(closing(Registry(key.runs)))

            def check_new() -> None:
                if registry is not None:  # first: where a ledger is lost, its model's file may not be
                    registry.check_new(settings, name)
                if file is not None:
                    model_file.check_unused(file)

            if file is not None and not file.exists():  # what is refused leaves no file
                check_new()
            connection = stack.enter_context(closing(connect(path)))
            with transaction(connection):
                new = connection.execute("SELECT 1 FROM run").fetchone() is None
                if new:
                    check_new()
                    _create(connection, values, purpose)
                _check_same(connection, path, values)
                (stream_id,) = connection.execute("SELECT stream_id FROM run").fetchone()
                # Before the run is in the ledger: of what a crash leaves in the registry alone, nothing was ever released.
                if registry is not None and new:
                    registry.begin(stream_id, settings, name)
                elif registry is not None:
                    registry.resume(stream_id, settings, name, _nonces(connection))
                owner = secrets.token_hex(16)
                connection.execute("UPDATE run SET owner = ?", (owner,))
                _abandon(connection, file)
            checkpoint(connection)
            stack.pop_all()
        return cls(connection, registry, plan, owner, stream_id, key.simulated, file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what is recorded stays."""
        self._connection.close()
        if self._registry is not None:
            self._registry.close()

    def resume(self) -> Run:
        """Where the run stands, with the last released model and inner state (None before the first release).

        Raises ValueError, with the remedy, if the file that holds these is missing or is another.
        """
        nonces, last = _nonces(self._connection), model_file.described(self._connection)
        if last is None:
            return Run(len(nonces), nonces, None, None, "")
        model, state = self._in_memory if self._path is None else model_file.read(self._path, last)
        return Run(len(nonces), nonces, model, state, last.layout)

    def history(self, users: Collection[str]) -> History:
        """The participations so far of those `users` that have any."""
        with self._write():
            known = self._known(users)
        return History(
            {user: record.participations for user, record in known.items()},
            {user: record.last_round for user, record in known.items()},
        )

    def plan_round(self, round: int, users: Collection[str]) -> int:
        """The attempt under which `round` is now tried with `users`, who are counted: the number of its earlier tries.

        Raises ValueError, and changes nothing, if it is not this round's turn, if another attempt is in
        flight, or if a user would exceed the plan's participation.
        """
        check_round(self._plan.participation, round)
        with self._write():
            connection = self._connection
            self._check_turn(round)
            counted = self._count(round, users)
            tries = "SELECT count(*) FROM attempts WHERE round = ?"
            attempt: int = connection.execute(tries, (round,)).fetchone()[0]
            connection.execute(
                "INSERT INTO attempts (round, attempt, state, users, planned) VALUES (?, ?, 'planned', ?, ?)",
                (round, attempt, pack_ids(np.array([user.id for user in counted.values()], np.int64)), now()),
            )
        self._seen.update(counted)  # only now, when it is on record
        return attempt

    def record_aggregated(self, round: int, attempt: int, nonce: int) -> None:
        """The sum of the round is there, and its noise, which comes next, is that of `nonce` (`NoiseKey.nonce_of` makes it).

        Raises ValueError unless this attempt is in flight, and if the round had noise of this nonce before.
        """
        packed = nonce.to_bytes(NONCE_BYTES, "big")
        with self._write():
            self._advance(round, attempt, "planned", "aggregated")
            same = "SELECT 1 FROM attempts WHERE round = ? AND nonce = ?"
            if self._connection.execute(same, (round, packed)).fetchone():
                raise ValueError(
                    f"round {round} has had noise of this nonce already; make another with NoiseKey.nonce_of"
                )
            self._connection.execute(
                "UPDATE attempts SET nonce = ? WHERE round = ? AND attempt = ?", (packed, round, attempt)
            )

    def record_released(
        self,
        round: int,
        attempt: int,
        model: bytes | memoryview,
        state: bytes | memoryview = b"",
        layout: str = "",
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """The round is released: `model` is durable together with the inner strategy's `state`, and may now leave the process.

        So are the `metrics` of the release, which `metrics("train")` gives back.

        `layout` says what the model's arrays are, for `fedcgd.ledger.released_model`: JSON of (names, shapes, dtypes).

        Raises ValueError unless this attempt is in flight and aggregated, and if another copy of the run has released the round;
        nothing is recorded then, and nothing may be released. When this returns, the ledger is whole without its `-wal`: its own
        file, and the one with the model.
        """
        with ExitStack() as stack:
            if self._registry is not None:
                (released,) = self._connection.execute(
                    "SELECT count(*) FROM attempts WHERE state = 'released'"
                ).fetchone()
                latest = _nonces(self._connection, "aggregated")
                stack.enter_context(self._registry.release(self.stream_id, released, latest))
            with self._write():
                self._advance(round, attempt, "aggregated", "released")
                if metrics is not None:
                    self._write_metrics("train", round + 1, metrics)
                parts = memoryview(model).cast("B"), memoryview(state).cast("B")
                model_file.describe(self._connection, model_file.write(self._path, round, *parts, layout))
            if self._path is None:
                self._in_memory = parts[0].tobytes(), parts[1].tobytes()
            checkpoint(self._connection)

    def skip(self, round: int, reason: str) -> None:
        """The round is not released this time: its attempt, if one is in flight, is abandoned. Its turn remains."""
        check_round(self._plan.participation, round)
        with self._write():
            _abandon(self._connection, self._path)
            self._check_turn(round)
            self._connection.execute("INSERT INTO skips (round, at, reason) VALUES (?, ?, ?)", (round, now(), reason))

    def pin(self, users: Collection[str], node: str) -> set[str]:
        """Those of `users` that no other node speaks for; from now on, for the whole run, they are `node`'s.

        `node` is a name that outlives connections. "" is a node without one: it keeps nobody, and gets whoever is nobody's.
        """
        with self._write():
            connection = self._connection
            connection.execute("DELETE FROM asked")
            connection.executemany("INSERT OR IGNORE INTO asked VALUES (?)", ((user,) for user in users))
            if node:
                connection.execute("INSERT OR IGNORE INTO hosts SELECT user, ? FROM asked", (node,))
            others = connection.execute("SELECT user FROM asked JOIN hosts USING (user) WHERE node != ?", (node,))
            return set(users) - {user for (user,) in others}

    def record_metrics(self, kind: str, release: int, metrics: Mapping[str, Any]) -> None:
        """Keep what was measured after `release`, for `metrics` to give back when the run goes on."""
        with self._write():
            self._write_metrics(kind, release, metrics)

    def _write_metrics(self, kind: str, release: int, metrics: Mapping[str, Any]) -> None:
        row = (kind, release, json.dumps(dict(metrics)))
        self._connection.execute("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", row)

    def metrics(self, kind: str) -> dict[int, dict[str, Any]]:
        """Release → what `record_metrics` kept of this kind."""
        rows = self._connection.execute("SELECT release, data FROM metrics WHERE kind = ? ORDER BY release", (kind,))
        return {release: json.loads(data) for release, data in rows}

    @contextmanager
    def _write(self) -> Iterator[None]:
        """A transaction of the process that opened the ledger last. Raises ValueError in any other, and once it is sealed."""
        with transaction(self._connection):
            owner, sealed = self._connection.execute("SELECT owner, sealed FROM run").fetchone()
            if sealed is not None:
                raise ValueError(f"the ledger was sealed on {sealed}: its run is over and the key is gone")
            if owner != self._owner:
                raise ValueError(
                    "another process has opened this ledger since; this one must not release anything any more"
                )
            yield

    def _known(self, users: Collection[str]) -> dict[str, _User]:
        """The records of those `users` that have one."""
        if len(set(users)) != len(users):
            raise ValueError(
                f"{len(users) - len(set(users))} users are named twice; a user has one id, and takes part once"
            )
        unseen = sorted(user for user in users if user not in self._seen)
        if unseen:
            if len(self._seen) > _MOST_SEEN:
                self._seen.clear()
                unseen = sorted(users)
            self._connection.execute("DELETE FROM asked")
            self._connection.executemany("INSERT INTO asked VALUES (?)", zip(unseen, strict=True))
            rows = self._connection.execute(
                "SELECT user, id, participations, last_round FROM asked CROSS JOIN users USING (user)"
            )
            self._seen.update(dict.fromkeys(unseen))
            self._seen.update((row[0], _User._make(row[1:])) for row in rows)
        seen = self._seen
        return {user: record for user in users if (record := seen[user]) is not None}

    def _count(self, round: int, users: Collection[str]) -> dict[str, _User]:
        """Count `users` in `round`, once however often it is tried, and return their records."""
        known = self._known(users)
        k, b = self._plan.participation.participations, self._plan.participation.min_separation
        again = [user for user in known.values() if user.last_round != round]
        breaking = sum(user.participations >= k or round - user.last_round < b for user in again)
        if breaking:
            raise ValueError(
                f"{breaking} users would take part more than {k} times, or less than {b} rounds apart, in round {round}; "
                "fedcgd.participation.cohorts.cohort never chooses them"
            )
        foreign = sum((round - user.last_round) % b != 0 for user in again) if self._plan.participation.has_bins else 0
        if foreign:
            raise ValueError(
                f"{foreign} users would take part in round {round}, which is not of their bin (round modulo {b}); "
                "fedcgd.participation.cohorts.cohort never chooses them"
            )
        self._connection.executemany(
            "UPDATE users SET participations = participations + 1, last_round = ? WHERE id = ?",
            ((round, user.id) for user in sorted(again, key=attrgetter("id"))),
        )
        (last,) = self._connection.execute("SELECT coalesce(max(id), 0) FROM users").fetchone()
        new = sorted(set(users) - known.keys())
        ids = range(last + 1, last + 1 + len(new))
        self._connection.executemany(
            "INSERT INTO users (id, user, participations, last_round) VALUES (?, ?, 1, ?)",
            ((id, user, round) for id, user in zip(ids, new, strict=True)),
        )
        counted = {
            name: user if user.last_round == round else _User(user.id, user.participations + 1, round)
            for name, user in known.items()
        }
        return counted | {user: _User(id, 1, round) for id, user in zip(ids, new, strict=True)}

    def _check_turn(self, round: int) -> None:
        # Each by an index of its own: a run of a million rounds has a million attempts.
        (released,) = self._connection.execute("SELECT count(*) FROM attempts WHERE state = 'released'").fetchone()
        (in_flight,) = self._connection.execute(
            "SELECT count(*) FROM attempts WHERE state IN ('planned', 'aggregated')"
        ).fetchone()
        if round != released:
            raise ValueError(f"round must be {released}, the first that is not released, got {round}")
        if in_flight:
            raise ValueError(
                f"an attempt at round {round} is in flight; release it, or call skip, before another begins"
            )

    def _advance(self, round: int, attempt: int, before: str, after: str) -> None:
        column = "aggregated" if after == "aggregated" else "ended"
        changed = self._connection.execute(
            f"UPDATE attempts SET state = ?, {column} = ? WHERE round = ? AND attempt = ? AND state = ?",  # noqa: S608
            (after, now(), round, attempt, before),
        ).rowcount
        if changed != 1:
            raise ValueError(f"attempt {attempt} at round {round} is not {before}, so it cannot become {after}")


def _nonces(connection: sqlite3.Connection, state: str = "released") -> tuple[int, ...]:
    rows = connection.execute("SELECT nonce FROM attempts WHERE state = ? ORDER BY round", (state,))
    return tuple(int.from_bytes(nonce, "big") for (nonce,) in rows)


def seal(path: Path | str, key_file: Path | None) -> None:
    """End the run at `path` for good and delete its key file (None: the key is elsewhere, and yours to delete).

    Without the key nobody, the operator included, can take the noise off what was released. May be repeated. Raises ValueError,
    and neither seals nor deletes, if `key_file` is missing or is another key, or if another run of the key is not sealed.
    """
    with reader(path) as connection:  # it is a ledger: `connect` would make one of any other database
        fingerprint, stream_id = connection.execute("SELECT key_fingerprint, stream_id FROM run").fetchone()
    with ExitStack() as stack:
        registry = None
        if key_file is not None:
            _check_key(key_file, fingerprint, stream_id)
            registry = stack.enter_context(closing(Registry(runs_file(key_file))))
            _check_not_needed(registry, stream_id, key_file)
        connection = stack.enter_context(closing(connect(path)))
        with transaction(connection):
            _abandon(connection, Path(path))
            connection.execute("UPDATE run SET sealed = coalesce(sealed, ?)", (now(),))
        checkpoint(connection)
        if registry is not None:
            registry.seal(stream_id, now())
    if key_file is not None:
        delete_key_file(key_file)


def _check_key(key_file: Path, fingerprint: str, stream_id: str) -> None:
    """Raise ValueError unless `key_file` is the key of that run, or was until the run was sealed."""
    if key_file.exists():
        if NoiseKey.from_file(key_file).fingerprint != fingerprint:
            raise ValueError(f"{key_file} is not the key of this run (fingerprint {fingerprint}); nothing is deleted")
        return
    if runs_file(key_file).exists():
        with closing(Registry(runs_file(key_file))) as registry:
            run = registry.run(stream_id)
        if run is not None and run.sealed is not None:
            return
    raise ValueError(f"there is no key file {key_file}: nothing is sealed, and nothing is deleted")


def _check_not_needed(registry: Registry, stream_id: str, key_file: Path) -> None:
    """Raise ValueError if another run of the key may go on. One that was sealed without its key file says so in its ledger."""
    for run in registry.others(stream_id):
        with suppress(ValueError), reader(run.ledger) as connection:
            stored, sealed = connection.execute("SELECT stream_id, sealed FROM run").fetchone()
            if stored == run.stream_id and sealed is not None:
                registry.seal(run.stream_id, sealed)
                continue
        raise ValueError(
            f"{key_file} is also the key of the run in {run.ledger} ({run.released} rounds released, not sealed): nothing is "
            f"sealed or deleted. Seal that run first with `fedcgd ledger seal {run.ledger}`, then this one with the key file; if "
            "that ledger is lost, seal this run without --key-file and delete the key yourself"
        )


def _create(connection: sqlite3.Connection, values: Mapping[str, Any], purpose: str) -> None:
    # A simulation shall repeat, with a ledger or without one.
    stream_id = purpose if values["simulated"] else secrets.token_hex(16)
    connection.execute(
        "INSERT INTO run (id, format, created, plan, configuration, configuration_hash, stream_id, key_fingerprint, "
        "simulated, owner) VALUES (1, :format, :created, :plan, :configuration, :hash, :stream_id, :key_fingerprint, "
        ":simulated, '')",
        {
            **values,
            "format": FORMAT,
            "created": now(),
            "hash": sha256(values["configuration"]),
            "stream_id": stream_id,
        },
    )


def _check_same(connection: sqlite3.Connection, path: Path | str, values: Mapping[str, Any]) -> None:
    row = connection.execute(
        "SELECT format, sealed, plan, configuration, key_fingerprint, simulated FROM run"
    ).fetchone()
    written, sealed, *stored = row
    if written != FORMAT:
        raise ValueError(f"{path} has format {written}, and this version of fedcgd reads format {FORMAT}")
    if sealed is not None:
        raise ValueError(f"{path} was sealed on {sealed}: its run is over; begin another one with a new ledger and key")
    for name, before in zip(("plan", "configuration"), stored[:2], strict=True):
        differing = differences(json.loads(before), json.loads(values[name]))
        if differing:
            raise ValueError(
                f"{path} is the ledger of another run: its {name} is not the same (on record → here): {', '.join(differing)}; "
                "give the same, or another path"
            )
    if tuple(stored[2:]) != (values["key_fingerprint"], values["simulated"]):
        raise ValueError(
            f"{path} is the ledger of another run: its key fingerprint is {stored[2]}, here it is {values['key_fingerprint']}; "
            "give the same key, or another path"
        )


def differences(before: Any, after: Any, name: str = "") -> list[str]:
    """The settings, nested in dicts, that are not the same, as "name: before → after"."""
    if before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in sorted(before.keys() | after.keys())
            for line in differences(before.get(key, "nothing"), after.get(key, "nothing"), f"{name}.{key}".lstrip("."))
        ]
    before, after = ("there" if isinstance(value, dict) else value for value in (before, after))
    return [f"{name}: {before} → {after}"]


def _abandon(connection: sqlite3.Connection, path: Path | None) -> None:
    """End the attempt that is in flight, if there is one, and leave nothing of it."""
    connection.execute(
        "UPDATE attempts SET state = 'abandoned', ended = ? WHERE state IN ('planned', 'aggregated')", (now(),)
    )
    if path is not None:
        model_file.discard(path, len(_nonces(connection)))
