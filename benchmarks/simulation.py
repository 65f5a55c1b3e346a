"""Users a second in simulated training of the CIFAR-10 CNN (0.29 M parameters), or of another model, by real `flwr run`s.

python benchmarks/simulation.py [--cohort 128 1000] [--examples 1] [--rounds 6] [--model NAME] [--json FILE]

With one example a user, an update is a clipped gradient; with more, a user trains one epoch over its examples, in batches of 10.
There are 2 nodes. The images are made up, and few of them are for testing. The first round, in which nodes say whom they host, is
left out. On a machine that does other work too, look at the processor time: users for each second of it, all processes together,
and what two cores would make of that, a figure to compare with clock times on 2 idle cores. Results are in docs/performance.md.
"""

import argparse
import json
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fedcgd_simulations.flower_runs import local_superlink, run_app

TICK = os.sysconf("SC_CLK_TCK")


def write_images(folder: Path, train: int) -> None:
    """Files of the form of CIFAR-10's, with `train` training examples and a few for testing."""
    generator = np.random.default_rng(1)
    for name, images in (*((f"data_batch_{i}", -(-train // 5)) for i in range(1, 6)), ("test_batch", 100)):
        records = generator.integers(0, 256, (images, 3073), np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def processor_seconds(home: str) -> float:
    """Of all processes that run with this FLWR_HOME."""
    mark, total = f"FLWR_HOME={home}".encode(), 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        except OSError:  # it has ended since, or is another user's
            continue
    return total / TICK


def measure(cohort: int, examples: int, rounds: int, model: str = "", test_examples: int = 0) -> dict[str, float]:
    users = cohort * rounds
    with tempfile.TemporaryDirectory() as name, local_superlink(Path(name) / "flower") as environment:
        folder = Path(name)
        write_images(folder, -(-users * examples * 10 // 9) + 9)
        config: dict[str, Any] = {
            "task": "cifar10",
            "data-dir": str(folder),
            "model": model,
            "test-examples": test_examples,
            "cohort": cohort,
            "participations": 1,
            "rounds": rounds,
            "epsilon": 8.0,
            "results": str(folder / "results.json"),
        }
        if examples > 1:
            config |= {"users": f"iid:{users}", "local-epochs": 1, "local-batch": 10}
        times, work = [], []

        def note(round: int, _: int) -> None:
            times.append(time.monotonic())
            work.append(processor_seconds(environment["FLWR_HOME"]))

        run_app(environment, config, nodes=2, progress=note)
    seconds = [after - before for before, after in pairwise(times)]
    processor = (work[-1] - work[0]) / (rounds - 1)
    return {
        "cohort": cohort,
        "examples a user": examples,
        "seconds a round": median(seconds),
        "users/s": cohort / median(seconds),
        "processor seconds a round": processor,
        "users/s on 2 cores by processor time": 2 * cohort / processor,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cohort", type=int, nargs="+", default=[128, 1000])
    options.add_argument("--examples", type=int, default=1)
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--model", default="", help="for example vit-b-16, with --test-examples 8")
    options.add_argument("--test-examples", type=int, default=0)
    options.add_argument("--json", type=Path, default=None)
    args = options.parse_args()
    results = [measure(cohort, args.examples, args.rounds, args.model, args.test_examples) for cohort in args.cohort]
    for result in results:
        print("  ".join(f"{name} {value:.4g}" for name, value in result.items()))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
