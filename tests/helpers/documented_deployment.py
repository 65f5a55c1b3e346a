"""Starting what a page of the documentation starts."""

import contextlib
import time
from pathlib import Path


def started_by_the_page(home: Path) -> list[int]:
    """Ids of the processes that run with this FLWR_HOME, in whatever session."""
    mark = f"FLWR_HOME={home}\0".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended since, or is another user's
            if mark in (process / "environ").read_bytes() + b"\0":
                found.append(int(process.name))
    return found


def left_after(home: Path, seconds: float) -> list[int]:
    """The processes that have not ended by themselves within `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := started_by_the_page(home)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left
