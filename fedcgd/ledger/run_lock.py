"""One process at a time has a ledger open for writing: a second one is refused before it touches what the first is doing."""

import os
import socket
from contextlib import suppress
from pathlib import Path

from fedcgd.ledger.transactions import now

_held: dict[Path, "RunLock"] = {}
"""The locks of this process, whose own second start of a run takes the first one's lock over, and shuts that out."""


class RunLock:
    """Held from here to `close`, or to the end of the process, however that ends: the system gives it back.

    It is on a file of its own, run.db-lock, because closing the ledger's own would end SQLite's locks.
    """

    def __init__(self, ledger: Path) -> None:
        """Raises ValueError, with the other process, if one that lives has the ledger open."""
        self._path = ledger.with_name(f"{ledger.name}-lock")
        self._process = os.getpid()
        before = _held.get(self._path)
        if before is not None and before._process == self._process:
            self._before: RunLock | None = before
            self._file: int | None = None
        else:  # also in a forked process, which inherits no lock
            self._before, self._file = None, _locked(self._path, ledger)
            _held[self._path] = self

    def take_over(self) -> None:
        """From here on this holds the lock, if another one of this process did: what is refused before leaves it to that one."""
        if self._before is not None:
            self._file, self._before._file = self._before._file, None
            self._before, _held[self._path] = None, self

    def close(self) -> None:
        """Let others open the ledger."""
        file, self._file = self._file, None
        if file is not None and self._process == os.getpid():  # a forked process has none to give back
            del _held[self._path]
            self._path.unlink(missing_ok=True)
            os.close(file)


def _locked(path: Path, ledger: Path) -> int | None:
    """The open and locked file; None where the system has no such locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        holder = os.read(file, 200).decode(errors="replace").strip()
        os.close(file)
        raise ValueError(
            f"{ledger} is open in another process, whose run is not touched ({holder or 'unknown'}). fedcgd ledger show says how "
            "far it is. End that process first: then the run goes on from its last release, or can be sealed"
        ) from error
    except OSError:  # a file system without locks
        os.close(file)
        return None
    if not _is_at(path, file):  # whoever had it has closed, and removed it
        os.close(file)
        return _locked(path, ledger)
    with suppress(OSError):  # a full disk: then nobody is told who holds it
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}, since {now()}\n".encode())
    return file


def _is_at(path: Path, file: int) -> bool:
    """Whether `path` is still the open `file`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
