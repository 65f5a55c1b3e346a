"""Files that somebody relies on are written whole or not at all: a full disk or a Ctrl-C leaves what was there."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path | str) -> Iterator[Path]:
    """Yields a path to write to, which takes the place of `path` when the block ends without an error, and else is removed.

    It lies beside `path` and has its suffix. What is no ordinary file, such as /dev/stdout, is yielded itself.
    """
    target = Path(path).resolve()  # what a link points to, and not the link
    if target.exists() and not target.is_file():
        yield target
        return
    part = target.with_name(f"{target.stem}.{secrets.token_hex(4)}.part{target.suffix}")
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def check_private(path: Path, what: str, mode: int | None = None) -> None:
    """Raise ValueError, with the remedy, if others than its owner may read or write the file.

    Args:
        path: the file.
        what: what the message calls it, for example "key file".
        mode: its mode, where it is open and known; else that of the file at `path`.
    """
    mode = stat.S_IMODE(path.stat().st_mode if mode is None else mode)
    if mode & 0o077 and os.name != "nt":  # Windows has access lists in place of modes
        raise ValueError(f"{what} {path} has mode {mode:04o}: others may read it; run chmod 600 {path}")


def sync_folder(folder: Path) -> None:
    """Make durable which files are in `folder`; what is in them is made so by their own `fsync`."""
    if os.name == "nt":  # where a folder cannot be opened, and NTFS keeps a journal of such changes
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
