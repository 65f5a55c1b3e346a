"""Users a second in simulated training of the CIFAR-10 CNN (0.29 M parameters), or of another model, by real `flwr run`s.

python benchmarks/simulation.py [--case 128 1 …] [--repeats 2] [--pfl PYTHON] [--json FILE]

A case is a cohort and the examples of a user. With one example, an update is a clipped gradient; with more, a user trains one
epoch over its examples, in batches of 10. There are 2 nodes,
or one for each raylet. The images are made up, and one is for testing, since evaluation
belongs to no user. The first round, in which nodes say whom they host, is left out. On a machine that does other work too, look
at the processor time: of all processes together, and what two cores would make of that, to compare with times on 2 idle cores.
A vision transformer of 86 million parameters: --model vit-b-16 --case 4 1 --rounds 2 --repeats 1.

pfl-research takes turns with it, one process with one thread and with two, if PYTHON is an interpreter that has it (this one,
unless said otherwise; "none" leaves it out). Exits with 1 if it should have been measured and was not. The three usual cases take
five minutes on two idle cores. Results are in benchmarks/diary.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pfl_simulation import NOT_THERE

from fedcgd_simulations.flower_runs import local_superlink, run_app

TICK = os.sysconf("SC_CLK_TCK")
PARTS = {"flwr-simulation": "server's peak MiB", "ray::ClientAppActor": "an actor's peak MiB"}
CASES = [[128, 1], [1000, 1], [16, 50]]
PEER = Path(__file__).with_name("pfl_simulation.py")
PEER_USERS = {
    True: 128,
    False: 8,
}  # a round, with one example a user, and with more: its time a user is that of any round


def write_images(folder: Path, train: int) -> None:
    """Files of the form of CIFAR-10's, with `train` training examples and a few for testing."""
    generator = np.random.default_rng(1)
    for name, images in (*((f"data_batch_{i}", -(-train // 5)) for i in range(1, 6)), ("test_batch", 100)):
        records = generator.integers(0, 256, (images, 3073), np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def processes(home: str) -> Iterator[Path]:
    """The /proc folders of those that run with this FLWR_HOME."""
    mark = f"FLWR_HOME={home}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended since, or is another user's
            if mark in (process / "environ").read_bytes().split(b"\0"):
                yield process


def processor_seconds(home: str) -> float:
    """Of all processes together."""
    total = 0
    for process in processes(home):
        with suppress(OSError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / TICK


def peaks(home: str) -> dict[str, float]:
    """The most MiB that the server had in main memory so far, and the most of an actor that trains."""
    found = dict.fromkeys(PARTS.values(), 0.0)
    for process in processes(home):
        with suppress(OSError, StopIteration):
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            lines = (process / "status").read_text().splitlines()
            most = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**10
            for mark, name in PARTS.items():
                if mark in command:
                    found[name] = max(found[name], most)
    return found


@contextmanager
def raylets(count: int, home: Path) -> Iterator[None]:
    """A Ray cluster of `count` raylets with a processor each, on which simulations run meanwhile; with 0, Flower starts Ray.

    Its processes get this FLWR_HOME, by which they are found.
    """
    if not count:
        yield
        return
    from ray.cluster_utils import Cluster  # starts nothing, but takes a second

    os.environ["FLWR_HOME"] = str(home)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(count - 1):
            cluster.add_node(num_cpus=1)
        os.environ["RAY_ADDRESS"] = cluster.address
        yield
    finally:
        for name in ("RAY_ADDRESS", "FLWR_HOME"):
            os.environ.pop(name, None)
        cluster.shutdown()


def measure(
    cohort: int, examples: int, rounds: int, model: str = "", test_examples: int = 1, on: int = 0
) -> dict[str, float]:
    users = cohort * rounds
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(raylets(on, folder / "flower"))
        environment = stack.enter_context(local_superlink(folder / "flower"))
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
            config |= {"users": f"iid:{users}", "local-epochs": 1, "local-batch": 10, "local-learning-rate": 0.1}
        times, work, memory = [], [], {}

        def note(round: int, _: int) -> None:
            times.append(time.monotonic())
            work.append(processor_seconds(environment["FLWR_HOME"]))
            memory.update(peaks(environment["FLWR_HOME"]))

        run_app(environment, config, nodes=max(2, on), progress=note)
    seconds = (times[-1] - times[0]) / (rounds - 1)  # lines of Flower's log come in lots, four a second
    processor = (work[-1] - work[0]) / (rounds - 1)
    return {
        "seconds a round": seconds,
        "users/s": cohort / seconds,
        "processor seconds a user": processor / cohort,
        **memory,
    }


def peer(python: str, examples: int, threads: int) -> dict[str, float] | None:
    """What pfl takes; None where it is not installed. Raises CalledProcessError if it fails."""
    cohort = PEER_USERS[examples == 1]
    command = [python, str(PEER), "--cohort", str(cohort), "--examples", str(examples), "--threads", str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == NOT_THERE:
        return None
    done.check_returncode()
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def compare(ours: Sequence[Mapping[str, float]], theirs: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Medians of ours, and with `theirs` (with one thread, with two, each time) ours next to theirs, as (median, least, most).

    By the clock pfl has the better number of threads; by processor time one thread, which is its cheapest.
    """
    figures: dict[str, Any] = {name: median(run[name] for run in ours) for name in ours[0]}
    figures["users/s on 2 cores by processor time"] = 2 / figures["processor seconds a user"]
    if theirs:
        clock = [our["users/s"] / max(run["users/s"] for run in turn) for our, turn in zip(ours, theirs, strict=True)]
        name = "processor seconds a user"
        work = [turn[0][name] / our[name] for our, turn in zip(ours, theirs, strict=True)]
        figures["pfl users/s"] = median(max(run["users/s"] for run in turn) for turn in theirs)
        figures["pfl processor seconds a user"] = median(turn[0][name] for turn in theirs)
        for label, ratios in (("clock", clock), ("processor time", work)):
            figures[f"times pfl by {label}"] = [median(ratios), min(ratios), max(ratios)]
    return figures


def shown(value: Any) -> str:
    return f"{value[0]:.2f} ({value[1]:.2f} to {value[2]:.2f})" if isinstance(value, list) else f"{value:.4g}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--case", type=int, nargs=2, action="append", metavar=("COHORT", "EXAMPLES"))
    options.add_argument("--rounds", type=int, default=12)
    options.add_argument("--repeats", type=int, default=2)
    options.add_argument("--model", default="", help="for example vit-b-16")
    options.add_argument(
        "--raylets", type=int, default=0, help="on a Ray cluster of so many, with a processor each, and no pfl"
    )
    options.add_argument("--pfl", default=sys.executable, metavar="PYTHON")
    options.add_argument("--json", type=Path, default=None)
    args = options.parse_args()
    wanted = args.pfl != "none" and not args.model and not args.raylets
    results: list[dict[str, Any]] = []
    for cohort, examples in args.case or CASES:
        ours, theirs = [], []
        for _ in range(args.repeats):
            ours.append(measure(cohort, examples, args.rounds, args.model, on=args.raylets))
            turn = [peer(args.pfl, examples, threads) for threads in (1, 2)] if wanted else []
            theirs.append([run for run in turn if run is not None])
        results.append({"cohort": cohort, "examples a user": examples, **compare(ours, theirs if all(theirs) else [])})
        print("  ".join(f"{name} {shown(value)}" for name, value in results[-1].items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if wanted and not all("pfl users/s" in result for result in results):
        sys.exit(f"pfl was not measured: {args.pfl} does not have it (--pfl PYTHON names another interpreter, or none)")


if __name__ == "__main__":
    main()
