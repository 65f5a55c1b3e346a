"""Run the Flower app from a script, on a SuperLink that ends with the script, and find out whether it really finished."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

APP = Path(__file__).resolve().parents[1]
_READY_TIMEOUT = 180.0  # a machine with other work takes a minute
_MARKED_TIMEOUT = 30.0
_MARK = "FEDCGD_SUPERLINK"
_ROUND = re.compile(r"\[ROUND (\d+)/(\d+)\]")  # as the strategy logs it


def free_port() -> int:
    """A TCP port on the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads its own session, and all that is in it."""
    for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, sign)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait(10.0)


def _end_marked(mark: str) -> None:
    """Kill every process that was started with `mark` ("NAME=value") in its environment, until there is none; on Linux.

    A SuperLink's executor, its simulation and Ray have sessions of their own, and nobody ends what is just being started.
    """
    deadline = time.monotonic() + _MARKED_TIMEOUT
    while (found := _marked(mark)) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked(mark: str) -> list[int]:
    """The processes with `mark` in the environment that they were started with; those that have ended have none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or gone
            if os.fsencode(mark) in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def flower_environment(home: Path) -> dict[str, str]:
    """Environment in which Flower works offline and keeps its state in `home`."""
    return os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        # Ray's workers are 15 nicer than who starts them: then nodes stand still while anything else runs on their cores.
        "RAY_worker_niceness": "0",
        # The server's torch has a thread for each core, and nodes train on the cores: a thread that is ahead sleeps, not spins.
        "OMP_WAIT_POLICY": "passive",
        # Nor has NumPy's BLAS threads, which would stand still for ever if it is in use when Ray forks (`fedcgd.native.threads`).
        "OPENBLAS_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


@contextmanager
def local_superlink(home: Path) -> Iterator[dict[str, str]]:
    """A simulating SuperLink on free loopback ports; yields the environment in which `flwr run` finds it.

    Flower would start one by itself, but detached, and nobody would end it. Raises RuntimeError if it does not come up.
    """
    home.mkdir(parents=True, exist_ok=True)
    port, control = free_port(), free_port()
    environment = flower_environment(home) | {
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control),
    }
    mark = f"{os.getpid()}-{port}"
    log = home / "superlink.log"
    command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--control-api-address", f"127.0.0.1:{control}"]
    with ExitStack() as stack:
        output = stack.enter_context(log.open("wb"))
        stack.callback(_end_marked, f"{_MARK}={mark}")
        process = subprocess.Popen(
            command, env=environment | {_MARK: mark}, cwd=home, stdout=output, stderr=output, start_new_session=True
        )
        stack.callback(stop, process)
        deadline = time.monotonic() + _READY_TIMEOUT
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the local SuperLink did not start; its last words: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield environment


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def run_app(
    environment: Mapping[str, str],
    run_config: Mapping[str, str | int | float | bool],
    *,
    nodes: int = 2,
    timeout: float = 1800.0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """`flwr run` of this app; the results that it wrote to `run_config["results"]`, as the JSON they are.

    `progress(round, rounds)` is called as rounds are released. Raises RuntimeError, with the end of the log, if the run did not
    finish all its rounds, whatever its exit code said.
    """
    results = Path(str(run_config["results"]))
    results.unlink(missing_ok=True)
    settings = " ".join(f"{key}={json.dumps(value)}" for key, value in run_config.items())
    command = ["flwr", "run", str(APP), "--stream", "--run-config", settings]
    command += ["--federation-config", f"num-supernodes={nodes} client-resources-num-cpus=1"]
    words: deque[str] = deque(maxlen=60)  # an error quotes them
    # A neutral directory: Ray's workers import from the working directory first.
    with subprocess.Popen(
        command,
        env=dict(environment),
        cwd=environment["FLWR_HOME"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        late = threading.Timer(timeout, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                words.append(line)
                found = _ROUND.search(line)
                if found and progress is not None and "not released" not in line:
                    progress(int(found[1]), int(found[2]))
            process.wait()
        finally:
            late.cancel()
            process.kill()  # it has ended, unless the loop was left by an exception
    if process.returncode or not results.exists():
        raise RuntimeError(f"the federated run did not finish: it wrote no results. Its last words:\n{''.join(words)}")
    written: dict[str, Any] = json.loads(results.read_text())
    if written["releases"] != written["rounds"]:
        raise RuntimeError(f"the federated run released {written['releases']} of {written['rounds']} rounds")
    return written
