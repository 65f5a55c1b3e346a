"""The server's part: trains, and notes where each round's time goes."""

import json
import resource
import time
from collections import defaultdict
from functools import wraps
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvgM

import fedcgd_flower.cohort as choice_module
import fedcgd_flower.run_loop as run_module
from fedcgd import LambdaCGD, Ledger, NoiseKey, Participation, Plan
from fedcgd_flower import CorrelatedNoise
from fedcgd_load.network import network

LEDGER_STEPS = ("history", "plan_round", "record_aggregated", "record_released", "skip")

server = ServerApp()


class _Clock:
    """Seconds spent in chosen functions since the last look."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def watch(self, owner: Any, name: str, label: str) -> None:
        function = getattr(owner, name)

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds[label] += time.perf_counter() - begin

        setattr(owner, name, timed)

    def look(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train; write to `results` the seconds of each round: whole, in the ledger, waiting for nodes, and choosing users."""
    config = context.run_config
    users, cohort, rounds = (int(config[name]) for name in ("users", "cohort", "rounds"))
    clock = _Clock()
    for step in LEDGER_STEPS:
        clock.watch(Ledger, step, "ledger")
    clock.watch(run_module, "send_and_receive", "nodes")
    clock.watch(choice_module, "cohort", "choosing")
    plan = Plan(
        mechanism=LambdaCGD(0.9),
        participation=Participation(rounds=rounds, min_separation=users // cohort),
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-6,
    )
    strategy = CorrelatedNoise(
        FedAvgM(server_learning_rate=0.5),
        plan,
        cohort_size=cohort,
        key=NoiseKey.from_file(Path(str(config["key-file"])), create=True),
        ledger=Path(str(config["ledger"])),
        expected_users=users,
        min_answers=cohort,
    )
    seen: list[dict[str, float]] = []
    last = time.perf_counter()

    def released(release: int, arrays: ArrayRecord) -> None:
        nonlocal last
        now = time.perf_counter()
        if release:
            seen.append({"whole": now - last, **clock.look()})
        last = now

    strategy.start(grid, ArrayRecord(network().state_dict()), evaluate_fn=released)
    figures = {
        "releases": strategy.releases,
        "rounds": seen,
        "server_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }
    Path(str(config["results"])).write_text(json.dumps(figures))
