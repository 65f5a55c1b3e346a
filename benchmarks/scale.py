"""How time and memory grow with rounds, users, parameters and cohorts: one point for each factor of ten.

python benchmarks/scale.py [--only TEXT] [--most 1e7] [--out benchmarks/results/scale.jsonl]

Each point is a process of its own: processor seconds of the step (the least of three, of one where it takes more than 10 s), and
by how many MiB it raised the process's peak. Points that are in the file already are not measured again. Slopes are those of a
straight line through the points on logarithmic axes whose time is at least a thirtieth of the largest: 1 is proportional.

A server's round is given with all that the server holds, the model too. Sizes for which the memory does not suffice now are left
out: the largest takes 16 GiB.
"""

import argparse
import gc
import json
import logging
import math
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from fedcgd import LambdaCGD, Ledger, NoiseKey, Participation, Plan
from fedcgd.native import vector_kernels
from fedcgd.native.vector_kernels import CHUNK
from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Lattice
from fedcgd.noise.stream import kernels
from fedcgd.participation.cohorts import cohort
from fedcgd.release.run_noise import LatticeNormals, NoiseSource
from fedcgd_flower import CorrelatedNoise
from fedcgd_flower.clipping import Clipping, clipped_update
from fedcgd_flower.messages import read_train_message

RESULTS = Path(__file__).parent / "results" / "scale.jsonl"
PLOT = Path(__file__).parent / "results" / "plots" / "scale.png"
KEY = NoiseKey(bytes(32))
NODES = 10
Step = Callable[[], Any]
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # a Message asks for them


def plan(rounds: int, separation: int) -> Plan:
    return Plan(
        mechanism=LambdaCGD(0.9),
        participation=Participation(rounds=rounds, min_separation=separation),
        clip_norm=1.0,
        noise_multiplier=5.0,
        delta=1e-5,
    )


def guarantee(rounds: int, folder: Path) -> Step:
    """ε of a plan of n rounds, each user in 10 of them."""
    return lambda: plan(rounds, max(1, rounds // 10)).guarantee()


def opened(folder: Path, rounds: int, separation: int, statement: str = "", values: tuple[int, ...] = ()) -> Ledger:
    """A ledger in which `statement` has put what the size asks for."""
    kept = folder / "ledger"
    ledger = Ledger.open(kept, plan=plan(rounds, separation), configuration={}, key=KEY)
    if statement:
        ledger._connection.execute(statement, values)
    return ledger


def ledger_round(ledger: Ledger, users: list[str], asked: int) -> Step:
    model = bytes(4000)

    def step() -> None:
        round = ledger._connection.execute("SELECT coalesce(max(round), -1) + 1 FROM attempts").fetchone()[0]
        history = ledger.history(users)
        chosen = cohort(ledger._plan.participation, round, users, history, cohort_size=asked, key=b"key")
        assert chosen is not None
        attempt = ledger.plan_round(round, chosen)
        ledger.record_aggregated(round, attempt, secrets.randbits(120))
        ledger.record_released(round, attempt, model)

    return step


def rounds_on_record(rounds: int, folder: Path) -> Step:
    """A round in the ledger, of 10 users, after n others."""
    statement = (
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < ?1 - 1) INSERT INTO attempts "
        "(round, attempt, nonce, state, users, planned) SELECT i, 0, randomblob(16), 'released', x'', '' FROM n"
    )
    ledger = opened(folder, rounds + 10, 1, statement, (rounds,))
    return ledger_round(ledger, [f"user-{i}" for i in range(10)], 10)


def users_on_record(users: int, folder: Path) -> Step:
    """A round in the ledger, of 1000 users out of 2000 that are there, where it knows so many."""
    statement = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1) INSERT INTO users "
        "(user, participations, last_round) SELECT 'user-' || printf('%08d', i * 7919 % ?1), 1, -1000 FROM n"
    )
    ledger = opened(folder, 100, 2, statement, (users,))
    there = [f"user-{i:08d}" for i in np.random.default_rng(1).choice(users, min(users, 2000), replace=False)]
    return ledger_round(ledger, there, min(users, 2000) // 2)


def asked(size: int, folder: Path) -> Step:
    """A round in the ledger, of so many users out of twice as many."""
    return ledger_round(opened(folder, 100, 2), [f"user-{i:06d}" for i in range(2 * size)], size)


def noise(parameters: int, folder: Path) -> Step:
    """The noise of a round: two vectors and the smoothing, added to integers."""
    total = np.zeros(parameters, np.int64)
    grid = Lattice.fitting(clip_norm=1.0, size=parameters, stddev=1.0)
    source = NoiseSource(LambdaCGD(0.9), 10, LatticeNormals(NoiseStream(bytes(32)), grid))
    return lambda: source.add(total, [1, 2, 3], 1.0)


def update(parameters: int, folder: Path) -> Step:
    """A user's clipped update."""
    model = np.zeros(parameters, np.float32)
    trained = np.empty_like(model)
    for start in range(0, parameters, CHUNK):
        trained[start : start + CHUNK] = 0.01
    grid = Lattice.fitting(clip_norm=1.0, size=parameters, stddev=1.0)
    return lambda: clipped_update(trained, model, Clipping(clip_norm=1.0, grid=grid))


def server_round(parameters: int, folder: Path) -> Step:
    """A round of the strategy with ten nodes, whose replies come one by one, with all that the server holds but a reply."""
    reply = Array(np.ones(parameters, np.int32))

    def step() -> dict[str, float]:
        logging.getLogger("flwr").setLevel(logging.ERROR)
        before, elsewhere = status("VmRSS"), 0.0
        pieces = [len(part) for part in np.array_split(np.empty(parameters, np.bool_), 60)]
        model = ArrayRecord()
        model.update((f"layer {i}", Array(np.ones(size, np.float32))) for i, size in enumerate(pieces))
        inner = FedAvg(min_train_nodes=NODES, min_available_nodes=NODES, fraction_evaluate=0)
        nodes = [SimpleNamespace(node_id=node, name=f"node {node}") for node in range(1, NODES + 1)]
        grid = create_autospec(Grid, instance=True)
        grid.get_node_ids.return_value, grid.get_nodes.return_value = [node.node_id for node in nodes], nodes

        def replies(messages: list[Message]) -> Iterator[Message]:
            nonlocal elsewhere
            begin, tasks = time.process_time(), []
            for number, message in enumerate(messages):
                message.metadata.__dict__["_message_id"] = f"message {number}"
                tasks.append(read_train_message(message)[2])
                message.content = RecordDict()  # it is sent
            gc.collect()  # Flower's records are in cycles
            elsewhere += time.process_time() - begin
            for message, task in zip(messages, tasks, strict=True):
                told = {"round": task.round, "attempt": task.attempt, "answered": 1, "checksum": parameters}
                content = RecordDict({"update": ArrayRecord({"flat": reply}), "fedcgd": ConfigRecord(told)})
                yield Message(content, reply_to=message)

        with CorrelatedNoise(inner, plan(10, 1), key=KEY, ledger=folder / "run", identity="authenticated") as strategy:
            times = []
            for number in (1, 2):  # the second has the memory and the noise of the first
                begin, elsewhere = time.process_time(), 0.0
                messages = list(strategy.configure_train(number, model, ConfigRecord(), grid))
                made = replies(messages)
                del messages
                released, _ = strategy.aggregate_train(number, made)
                assert released is not None
                model = released
                del released
                times.append(time.process_time() - begin - elsewhere)
        return {"seconds": min(times), "mib": status("VmHWM") - before}

    return step


@dataclass(frozen=True)
class Curve:
    name: str
    unit: str
    prepare: Callable[[int, Path], Step]
    sizes: tuple[int, ...]
    held: int = 0
    """Bytes of memory that each of the size takes, where that is much."""


def tens(first: int, last: int) -> tuple[int, ...]:
    return tuple(10**power for power in range(first, last + 1))


CURVES = (
    Curve("ε of a plan", "rounds", guarantee, tens(1, 6)),
    Curve("a round in the ledger, by rounds before", "rounds", rounds_on_record, tens(1, 6)),
    Curve("a round in the ledger, by users on record", "users", users_on_record, tens(1, 7)),
    Curve("a round in the ledger, by cohort", "cohort", asked, tens(1, 5)),
    Curve("noise of a round", "parameters", noise, tens(4, 8)),
    Curve("a user's clipped update", "parameters", update, tens(4, 8)),
    Curve("a server's round with ten nodes", "parameters", server_round, (*tens(6, 8), 5 * 10**8, 10**9), held=29),
)


def status(name: str) -> float:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) / 1024


def available() -> int:
    """Bytes of memory that nobody uses."""
    [line] = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:")]
    return int(line.split()[1]) * 1024


def point(curve: Curve, size: int) -> dict[str, Any]:
    """In a child process, which knows the imports and machine code of this one and has a peak of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, json.dumps(measured(curve, size)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        answer = told.read()
    os.waitpid(child, 0)
    if not answer:
        raise RuntimeError(f"{curve.name}, {size}: the child process failed; what it said is above")
    return {"curve": curve.name, "size": size, **json.loads(answer)}


def measured(curve: Curve, size: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        step = curve.prepare(size, Path(folder))
        held = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak until here
        seconds: list[float] = []
        while len(seconds) < 3 and sum(seconds) < 10:
            begin = time.process_time()
            found = step()
            if isinstance(found, dict):  # what others did
                return found
            seconds.append(time.process_time() - begin)
        return {"seconds": min(seconds), "mib": max(0.0, status("VmHWM") - held)}


def slope(points: list[dict[str, Any]]) -> float:
    """Of log seconds by log size, over the points whose time is at least a thirtieth of the largest."""
    most = max(p["seconds"] for p in points)
    late = [p for p in points if p["seconds"] >= most / 30] if most else points
    if len(late) < 2:
        return math.nan
    x, y = (np.log([p[name] for p in late]) for name in ("size", "seconds"))
    return float(np.polyfit(x, y, 1)[0])


def draw(points: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 9), sharex=True)
    for curve in CURVES:
        own = sorted((p for p in points if p["curve"] == curve.name), key=lambda p: p["size"])
        if own:
            sizes = [p["size"] for p in own]
            label = f"{curve.name} ({curve.unit}), slope {slope(own):.2f}"
            above.loglog(sizes, [max(p["seconds"], 1e-6) for p in own], "o-", label=label)
            below.loglog(sizes, [max(p["mib"], 0.1) for p in own], "o-")
    above.set_ylabel("processor seconds")
    below.set_ylabel("MiB above what was held")
    below.set_xlabel("size")
    above.legend(fontsize=8)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", metavar="TEXT", help="the curves whose name holds it")
    options.add_argument("--most", type=float, default=1e9, help="no larger sizes")
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--plot", type=Path, default=PLOT)
    args = options.parse_args()
    vector_kernels.compiled()
    kernels()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    points = [json.loads(line) for line in lines]
    for curve in (curve for curve in CURVES if args.only in curve.name):
        for size in curve.sizes:
            if size > args.most or any((p["curve"], p["size"]) == (curve.name, size) for p in points):
                continue
            if curve.held * size > available():
                needs = f"{curve.held * size / 2**30:.1f} GiB are needed and {available() / 2**30:.1f} available"
                print(f"{curve.name:45} {size:>12} left out: {needs}", flush=True)
                continue
            made = point(curve, size)
            points.append(made)
            with args.out.open("a") as file:
                file.write(json.dumps(made, ensure_ascii=False) + "\n")
            print(f"{curve.name:45} {size:>12} {made['seconds']:9.4f} s {made['mib']:8.1f} MiB", flush=True)
        own = [p for p in points if p["curve"] == curve.name]
        if own:
            print(f"{curve.name:45} slope {slope(own):.2f}")
    draw(points, args.plot)


if __name__ == "__main__":
    main()
