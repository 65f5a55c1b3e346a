"""Following what a page of the documentation starts, to the end of all of it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""What a page says to type."""


def started_by_the_page(home: Path) -> list[int]:
    """Ids of the processes that run with this FLWR_HOME, in whatever session."""
    mark = f"FLWR_HOME={home}\0".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended since, or is another user's
            if mark in (process / "environ").read_bytes() + b"\0":
                found.append(int(process.name))
    return found


def end(home: Path) -> None:
    """End them, and what a keeper among them starts in the meantime."""
    while remaining := started_by_the_page(home):
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def followed(script: str, folder: Path, variables: dict[str, str], limit: float) -> tuple[int, str, list[int]]:
    """(exit code, output, processes that are left half a minute later) of a script whose FLWR_HOME is `folder`/flower."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    left: list[int] = []
    with (folder / "output.log").open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", script], cwd=folder, env=os.environ | {"PATH": path} | variables, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
            deadline = time.monotonic() + (30.0 if code == 0 else 0.0)
            while (left := started_by_the_page(folder / "flower")) and time.monotonic() < deadline:
                time.sleep(0.5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also loops of the shell, which have no FLWR_HOME of their own
            end(folder / "flower")
    return code, (folder / "output.log").read_text(errors="replace"), left
