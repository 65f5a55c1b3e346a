"""The releases of a run of central training, in a file: each round is there, durably, before there is noise of it."""

import json
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcgd.noise import STREAM
from fedcgd.support.files import sync_folder

_FORMAT = "fedcgd releases"
_open_here: "weakref.WeakValueDictionary[Path, ReleaseRecord]" = weakref.WeakValueDictionary()
"""The records that engines of this process keep, by their files."""


class ReleaseRecord:
    """The file `path`: a line of JSON for the run, and one for each time that a round was released, with its nonce.

    A round that is on record and in no checkpoint was lost with its process: it is released again, as another attempt. A line
    that was not written to its end is of a release that did not happen.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._file: int | None = None
        self._process = 0
        """Which one has opened the file: a fork of it has no say in its lock."""
        self._close: Callable[[], Any] = lambda: None
        self._taken_over = False
        self._run: dict[str, Any] = {}
        self._attempts: Counter[int] = Counter()
        """Of each round: how often it is on record."""

    def attempt(self, round: int, run: dict[str, Any]) -> int:
        """How often `round` of `run` was released before; opens the file when it is first asked.

        Args:
            round: the next one.
            run: what names the run: its plan, its key's fingerprint and so on, as JSON has it.

        Raises:
            ValueError: if the file is another run's, or no such record.
            RuntimeError: if another engine has taken it over.
        """
        if self._taken_over:
            raise RuntimeError(
                f"another engine of this process goes on with the run whose record is {self._path}: take the module, the "
                "optimizer and the loader of that one"
            )
        if self._file is None:
            self._open(run)
            lost = sum(1 for one in self._attempts if one >= round)
            if lost:
                warnings.warn(
                    f"{self._path} has {lost} rounds after the {round} that this run goes on from, as no checkpoint has "
                    "them. They are released again, with fresh noise, and ε counts them once: begin a new run if somebody has "
                    "seen a model of theirs",
                    stacklevel=2,
                )
            if missing := round - sum(1 for one in self._attempts if one < round):
                warnings.warn(
                    f"{self._path} lacks {missing} of the {round} rounds that this run goes on from: it was begun later, or "
                    "lost, and whether rounds after these were released before is not known. ε counts each once, which is true "
                    "if nobody has seen a model of a round that is released again",
                    stacklevel=2,
                )
        self._check_run(run, self._run)
        return self._attempts[round]

    def append(self, round: int, nonce: int, ranks: int) -> None:
        """Put on record that `round` is released under `nonce` by so many processes; durable when this returns."""
        self._write({"round": round, "attempt": self._attempts[round], "nonce": f"{nonce:032x}", "ranks": ranks})
        self._attempts[round] += 1

    def _check_run(self, run: dict[str, Any], named: dict[str, Any]) -> None:
        if run != named:
            raise ValueError(
                f"{self._path} is the record of another run: load that run's checkpoint (load_checkpoint), or name a new file"
            )

    def _open(self, run: dict[str, Any]) -> None:
        place, new = self._path.resolve(), not self._path.exists()
        before = _open_here.get(place)
        if before is not None and not new and before._keeps(self._path):
            self._check_run(run, before._run)
            before._taken_over = True
            before._unlock()
            before._close()
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            _lock(file, self._path)
            named = self._read(file)
        except BaseException:
            os.close(file)
            raise
        self._file, self._process = file, os.getpid()
        self._close = weakref.finalize(self, os.close, file)
        _open_here[place] = self
        if named is None:
            self._write({_FORMAT: run})
            if new:
                sync_folder(self._path.parent)
        self._run = run if named is None else named

    def _keeps(self, path: Path) -> bool:
        """Whether the file at `path` is the one that this process opened, and not one that took its place."""
        if self._file is None or self._taken_over or self._process != os.getpid():
            return False
        return os.path.samestat(os.fstat(self._file), path.stat())

    def _unlock(self) -> None:
        """Give the lock back: closing the file does not while a worker of a loader, a fork of this process, has it too."""
        with suppress(ImportError):  # Windows
            import fcntl

            assert self._file is not None
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read(self, file: int) -> dict[str, Any] | None:
        """What names the run of the record, None if it is empty; and how often each round is on it."""
        text = self._path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):  # the process that wrote it was killed before it was durable
            os.ftruncate(file, len(whole))
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            named: dict[str, Any] | None = lines[0][_FORMAT] if lines else None
            self._attempts = Counter(int(line["round"]) for line in lines[1:])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._path} is no record of releases; name a new file") from error
        return named

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        end, octets = os.fstat(self._file).st_size, json.dumps(line).encode() + b"\n"
        try:
            if os.write(self._file, octets) < len(octets):
                raise OSError(f"{self._path} is not written whole: the disk may be full")
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, end)
            raise


def run_of(plan: dict[str, Any], run: str, fingerprint: str) -> dict[str, Any]:
    """What names a run in its record."""
    named: dict[str, Any] = json.loads(
        json.dumps({"run": run, "plan": plan, "key": fingerprint, "noise stream": STREAM})
    )
    return named


def _lock(file: int, path: Path) -> None:
    """Keep other processes off while this one has the file open. Raises ValueError if another one has."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(
            f"another process keeps its releases in {path}, and one file is one run's: end that process to go on with its run, "
            "or name another file for another run"
        ) from error
