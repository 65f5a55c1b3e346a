"""Files that somebody relies on are written whole or not at all: a full disk or a Ctrl-C leaves what was there."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path | str) -> Iterator[Path]:
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


def sync_folder(folder: Path) -> None:
    """Make durable which files are in `folder`; what is in them is made so by their own `fsync`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
