"""Time of a round's steps in a ledger of many users, and of a large model's release.

python benchmarks/ledger.py [--users 10000000] [--cohort 10000] [--parameters 25000000]

On 2 virtual cores of an AMD EPYC, which other work shared (load 9), with 10 million users and cohorts of 10,000: history 0.3 s,
plan 0.7 s, aggregated and released 10 ms; with 25 million float32 parameters released takes 0.9 to 2.9 s; verify 18 s; file
653 MiB.
"""

import argparse
import random
import sqlite3
import tempfile
import time
from pathlib import Path

from fedcgd.ledger import Ledger, verify
from fedcgd.mechanisms import LambdaCGD
from fedcgd.noise.keys import NoiseKey
from fedcgd.participation import Participation
from fedcgd.plan import Plan

PLAN = Plan(
    mechanism=LambdaCGD(0.9),
    participation=Participation(rounds=3900, min_separation=390),
    clip_norm=1.0,
    noise_multiplier=3.0,
    delta=1e-5,
)


def fill(path: Path, users: int) -> None:
    """As if all the users had been seen before the first round (their participations are not: verify must not be asked)."""
    connection = sqlite3.connect(path)
    connection.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
        "INSERT INTO users (user, participations, last_round) SELECT 'device-' || printf('%08d', i * 7919 % ?), 0, -1000 FROM n",
        (users, users),
    )
    connection.commit()
    connection.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--users", type=int, default=10_000_000)
    options.add_argument("--cohort", type=int, default=10_000)
    options.add_argument("--parameters", type=int, default=25_000_000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--folder", type=Path, default=None)
    args = options.parse_args()
    generator = random.Random(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "ledger"
        key = NoiseKey.generate()
        Ledger.open(path, plan=PLAN, configuration={}, key=key).close()
        begin = time.perf_counter()
        fill(path, args.users)
        print(
            f"{args.users} users filled in: {time.perf_counter() - begin:.1f} s, {path.stat().st_size / 2**20:.0f} MiB"
        )
        for parameters in (1000, args.parameters):
            model = generator.randbytes(1 << 20) * (4 * parameters // (1 << 20)) or bytes(4 * parameters)
            with Ledger.open(path, plan=PLAN, configuration={}, key=key) as ledger:
                for _ in range(args.rounds):
                    round = ledger.resume().round
                    users = [f"device-{i:08d}" for i in generator.sample(range(args.users), args.cohort)]
                    times = [time.perf_counter()]
                    history = ledger.history(users)
                    times.append(time.perf_counter())
                    free = [user for user in users if history.last_rounds[user] < 0]
                    attempt = ledger.plan_round(round, free)
                    times.append(time.perf_counter())
                    ledger.record_aggregated(round, attempt, round)
                    times.append(time.perf_counter())
                    ledger.record_released(round, attempt, model, b"")
                    times.append(time.perf_counter())
                    steps = "  ".join(
                        f"{name} {1e3 * (b - a):.0f}"
                        for name, a, b in zip(
                            ("history", "plan", "aggregated", "released"), times, times[1:], strict=False
                        )
                    )
                    print(
                        f"{parameters} parameters, cohort {args.cohort}: {1e3 * (times[-1] - times[0]):.0f} ms ({steps})"
                    )
        begin = time.perf_counter()
        verify(path)
        print(f"verify: {time.perf_counter() - begin:.1f} s; file {path.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
