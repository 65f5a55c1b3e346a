"""How time and memory grow with rounds, users, parameters and cohorts: one point for each factor of ten.

python benchmarks/scale.py [--only TEXT] [--most 1e7] [--out benchmarks/results/scale.jsonl]

Each point is a process of its own: processor seconds of the step (the least of three, of one where it takes more than 10 s), and
by how many MiB it raised the process's peak. Points that are in the file already are not measured again. Slopes are those of a
straight line through the points on logarithmic axes whose time is at least a thirtieth of the largest: 1 is proportional.

A model in eight shards, all at once, is eight processes of Ray on this machine: their processor seconds together, the seconds by
the clock, and all that they hold. Sizes for which the memory does not suffice now are left out: the largest takes 15 GiB.
"""

import argparse
import json
import math
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcgd import passes
from fedcgd.ledger import Ledger
from fedcgd.mechanisms import LambdaCGD
from fedcgd.noise import NoiseStream
from fedcgd.noise.compiled import kernels
from fedcgd.noise.keys import NoiseKey
from fedcgd.noise.quantisation import Lattice, add_noise
from fedcgd.participation import Participation
from fedcgd.participation.cohorts import cohort
from fedcgd.passes import CHUNK
from fedcgd.plan import Plan
from fedcgd.release.noise_source import LatticeNormals, NoiseSource
from fedcgd_flower.update import write_clipped_update

RESULTS = Path(__file__).parent / "results" / "scale.jsonl"
PLOT = Path(__file__).parent / "results" / "plots" / "scale.png"
KEY = NoiseKey(bytes(32))
SHARDS = 8
SHARD = 10**9 // SHARDS
Step = Callable[[], Any]


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
    return lambda: write_clipped_update(np.empty(len(model), np.int32), trained, model, clip_norm=1.0, grid=grid)


class Shard:
    """A part of a model and of a round's sum, in a process of its own."""

    def __init__(self, number: int, size: int, whole: int) -> None:
        self._held = status("VmRSS")
        self._start, self._model, self._sum = number * size, np.ones(size, np.float32), np.ones(size, np.int64)
        self._stddev, self._grid = 1.0, Lattice.fitting(clip_norm=1.0, size=whole, stddev=1.0)
        self._stream = NoiseStream(bytes(32))
        kernels()

    def finish(self, round: int) -> tuple[float, float]:
        """The noise of two rounds and the smoothing go to the sum, and its mean to the model: (processor seconds, MiB held)."""
        begin = time.process_time()
        terms = [(round, round, 1.0), (round - 1, round - 1, -0.9)]
        add_noise(self._sum, self._stream, terms, self._stddev, self._grid, start=self._start, threads=1)
        made = passes.compiled() or passes.NUMPY
        made.mean(self._model, self._sum, self._grid.step, 1.0, 100.0, self._model)
        return time.process_time() - begin, status("VmHWM") - self._held


def shards(parameters: int, folder: Path) -> Step:
    """The end of a round for a model in shards, all there at once."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    import ray

    def step() -> dict[str, float]:
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
        try:
            made = ray.remote(Shard).options(num_cpus=2 / SHARDS)
            actors = [made.remote(i, parameters // SHARDS, parameters) for i in range(SHARDS)]
            ray.get([actor.finish.remote(1) for actor in actors])  # all are there
            found = []
            for round in range(2, 5):
                begin = time.perf_counter()
                told = ray.get([actor.finish.remote(round) for actor in actors])
                seconds, held = (sum(each) for each in zip(*told, strict=True))
                found.append({"seconds": seconds, "clock": time.perf_counter() - begin, "mib": held})
            return min(found, key=lambda one: one["seconds"])
        finally:
            ray.shutdown()

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
    Curve("noise of a round", "parameters", noise, (*tens(4, 8), SHARD)),
    Curve("a user's clipped update", "parameters", update, (*tens(4, 8), SHARD)),
    Curve("eight shards at once, as Ray actors", "parameters", shards, (*tens(7, 8), 5 * 10**8, 10**9), held=16),
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
    passes.compiled()
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
