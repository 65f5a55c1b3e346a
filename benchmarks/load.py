"""Rounds under load, by real `flwr run`s with the ledger on: seconds a round, where they go, memory.

python benchmarks/load.py [--rounds 5] [--only TEXT] [--json FILE]

Three loads: 10,000 users in a round, hosted by 4 nodes, which are processes of their own on the loopback interface; the same
with simulated nodes; and 500 simulated nodes of one user each, all of them in every round. Each user is one made-up example of
64 numbers, and trains a network of 4810 parameters, which takes 0.1 ms: any real training makes the ledger's share smaller. The
first round, in which nodes start and say whom they host, is left out of the averages.

On 2 virtual cores of an AMD EPYC, otherwise idle, in seconds and MiB:

                                    round    nodes  choosing   ledger   share    server       all
10,000 users, 4 SuperNodes          17.82    17.51     0.091    0.167     0.9       681      3944
10,000 users, 4 simulated nodes      3.04     2.82     0.119    0.085     2.8       737      2634
500 simulated nodes of one user      3.46     3.36     0.001    0.005     0.2       749      2285

Why the last takes so long for so few users, and far longer on a busy machine, is in benchmarks/diary.md, "Waiting for replies".
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulations"))

from fedcgd.ledger import verify
from fedcgd_simulations.flower_runs import flower_environment, free_port, local_superlink, stop

APP = Path(__file__).resolve().parent / "load_app"
TIMEOUT = 1800.0


@dataclass(frozen=True)
class Load:
    name: str
    nodes: int
    users: int
    cohort: int
    simulated: bool


LOADS = (
    Load("10,000 users, 4 SuperNodes", nodes=4, users=20_000, cohort=10_000, simulated=False),
    Load("10,000 users, 4 simulated nodes", nodes=4, users=20_000, cohort=10_000, simulated=True),
    Load("500 simulated nodes of one user", nodes=500, users=500, cohort=500, simulated=True),
)


@dataclass(frozen=True)
class Measured:
    """Means over the rounds after the first, in seconds; memory in MiB."""

    load: Load
    rounds: int
    first_round: float
    round: float
    nodes: float
    choosing: float
    ledger: float
    slowest_ledger: float
    server_peak: float
    all_peak: float
    epsilon: float

    @property
    def ledger_share(self) -> float:
        return self.ledger / self.round


def measure(load: Load, rounds: int) -> Measured:
    superlink = local_superlink if load.simulated else partial(loopback, nodes=load.nodes)
    with tempfile.TemporaryDirectory() as folder, superlink(Path(folder) / "flower") as environment:
        ledger, results = Path(folder) / "run.db", Path(folder) / "results.json"
        config: dict[str, Any] = {"nodes": load.nodes, "users": load.users, "cohort": load.cohort, "rounds": rounds}
        config |= {"ledger": str(ledger), "results": str(results), "key-file": str(Path(folder) / "noise.key")}
        with peak_memory(environment["FLWR_HOME"]) as peak:
            output = _run(environment, load, config)
        if not results.exists():
            raise RuntimeError(f"{load.name}: the run did not finish; its last words: {output[-3000:]}")
        figures = json.loads(results.read_text())
        verification = verify(ledger)
        if (figures["releases"], verification.released, verification.problems) != (rounds, rounds, ()):
            raise RuntimeError(f"{load.name}: {verification}")
        assert verification.guarantee is not None
        first, *rest = figures["rounds"]
        mean = {name: statistics.fmean(each.get(name, 0.0) for each in rest) for name in first}
        return Measured(
            load=load,
            rounds=rounds,
            first_round=first["whole"],
            round=mean["whole"],
            nodes=mean["nodes"],
            choosing=mean["choosing"],
            ledger=mean["ledger"],
            slowest_ledger=max(each["ledger"] for each in rest),
            server_peak=figures["server_peak_mib"],
            all_peak=peak[0],
            epsilon=verification.guarantee.epsilon,
        )


@contextmanager
def loopback(home: Path, nodes: int) -> Iterator[dict[str, str]]:
    """A SuperLink and its SuperNodes, each a process; yields the environment in which `flwr run APP loopback` finds it."""
    home.mkdir(parents=True)
    environment = flower_environment(home)
    address = f"127.0.0.1:{free_port()}"
    (home / "config.toml").write_text(f'[superlink.loopback]\naddress = "{address}"\ninsecure = true\n')
    host, port = address.split(":")
    commands = [["flower-superlink", "--insecure", "--host", host, "--port", port, "--database", "state.db"]]
    for number in range(nodes):
        node = ["flower-supernode", "--insecure", "--superlink", address, "--host", host, "--port", str(free_port())]
        commands.append([*node, "--node-config", f"partition-id={number}"])
    with ExitStack() as stack:
        for number, command in enumerate(commands):
            output = stack.enter_context((home / f"process-{number}.log").open("wb"))
            process = subprocess.Popen(
                command, env=environment, cwd=home, stdout=output, stderr=output, start_new_session=True
            )
            stack.callback(stop, process)
        yield environment


def _run(environment: Mapping[str, str], load: Load, config: Mapping[str, Any]) -> str:
    settings = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
    command = ["flwr", "run", str(APP), "--stream", "--run-config", settings]
    if load.simulated:
        command += ["--federation-config", f"num-supernodes={load.nodes} client-resources-num-cpus=1"]
    else:
        command.insert(3, "loopback")
        _wait_for("loopback", environment)
    done = subprocess.run(
        command,
        env=dict(environment),
        cwd=environment["FLWR_HOME"],  # a neutral directory: Ray's workers import from the working directory first
        timeout=TIMEOUT,
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


def _wait_for(superlink: str, environment: Mapping[str, str]) -> None:
    deadline = time.monotonic() + 120.0
    while subprocess.run(["flwr", "ls", superlink], env=dict(environment), check=False, capture_output=True).returncode:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the SuperLink {superlink} did not start")
        time.sleep(1.0)


@contextmanager
def peak_memory(home: str) -> Iterator[list[float]]:
    """The most MiB that all processes with this FLWR_HOME held at once, what they share counted once; looked at every second."""
    peak = [0.0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            peak[0] = max(peak[0], _held(f"FLWR_HOME={home}".encode()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def _held(mark: bytes) -> float:
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                lines = (process / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except OSError:  # it has ended since, or is another user's
            continue
    return total / 2**10


def table(measured: list[Measured]) -> str:
    head = f"{'':32}{'round':>9}{'nodes':>9}{'choosing':>10}{'ledger':>9}{'share':>8}{'server':>10}{'all':>10}"
    units = f"{'':32}{'s':>9}{'s':>9}{'s':>10}{'s':>9}{'%':>8}{'MiB':>10}{'MiB':>10}"
    rows = [
        f"{m.load.name:32}{m.round:9.2f}{m.nodes:9.2f}{m.choosing:10.3f}{m.ledger:9.3f}{100 * m.ledger_share:8.1f}"
        f"{m.server_peak:10.0f}{m.all_peak:10.0f}"
        for m in measured
    ]
    return "\n".join([head, units, *rows])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--only", default="", metavar="TEXT", help="the loads whose name holds it")
    options.add_argument("--json", type=Path, default=None)
    args = options.parse_args()
    measured = []
    for load in (load for load in LOADS if args.only in load.name):
        begin = time.monotonic()
        measured.append(measure(load, args.rounds))
        print(f"{load.name}: {time.monotonic() - begin:.0f} s in all, {measured[-1].first_round:.1f} s for round 1")
    print(table(measured))
    if args.json:
        args.json.write_text(json.dumps([asdict(m) | {"ledger_share": m.ledger_share} for m in measured], indent=1))


if __name__ == "__main__":
    main()
