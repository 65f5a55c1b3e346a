"""What `clipped_update_mod` adds to a message: processor time for models of several sizes, with NumPy and with machine code.

python benchmarks/client_update.py [--parameters 10000000 25000000] [--repeats 5] [--json FILE]

A message comes in, the app answers with arrays that are there, the reply goes out: all of it but the app's own part counts. A
deployed ClientApp is a new process for each message, so each repeat is one, in turns between the forms; what comes after its
first message stands beside it. Loading machine code counts, compiling it does not: that happens once on a machine. Results are
in docs/performance.md.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedcgd import passes
from fedcgd.noise.quantisation import Grid
from fedcgd_flower.layout import flatten, layout_of
from fedcgd_flower.messages import TrainTask, train_message
from fedcgd_flower.mod import clipped_update_mod

ARRAYS = 60
MESSAGES = 4  # of one process
FORMS = ("NumPy", "machine code")
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # a Message asks for them


def alone(parameters: int, form: str) -> list[float]:
    """Seconds that each message to this process takes."""
    if form == "NumPy":
        passes._PATIENCE = math.inf  # type: ignore[assignment]
    generator = np.random.default_rng(1)
    sizes = [len(part) for part in np.array_split(np.empty(parameters, np.bool_), ARRAYS)]
    model = {f"layer {i}": generator.standard_normal(n, np.float32) for i, n in enumerate(sizes)}
    arrays = ArrayRecord({name: Array(value) for name, value in model.items()})
    trained = ArrayRecord({name: Array(value + np.float32(1e-3)) for name, value in model.items()})
    layout = layout_of(arrays)
    flat = flatten(arrays, layout)
    grid = Grid.fitting(clip_norm=1.0, size=parameters, stddev=1.0)
    task = TrainTask(round=0, attempt=0, clip_norm=1.0, grid=grid, users=("ann",), layout=layout)
    node: Any = SimpleNamespace(node_config={"user-id": "ann"})
    of_the_app = 0.0

    def train(message: Message, context: Any) -> Message:
        nonlocal of_the_app
        begin = time.process_time()
        reply = Message(RecordDict({"arrays": trained, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)
        of_the_app = time.process_time() - begin
        return reply

    seconds = []
    for _ in range(MESSAGES):
        message = train_message(1, flat, ConfigRecord(), task)
        message.metadata.__dict__["_message_id"] = "message"
        begin = time.process_time()
        reply = clipped_update_mod(message, node, train)
        seconds.append(time.process_time() - begin - of_the_app)
        assert not reply.has_error()
    if form != "NumPy":
        assert passes.compiled() is not None, "there is no C compiler: pip install 'fedcgd[fast]'"
    return seconds


def in_new_process(parameters: int, form: str) -> list[float]:
    command = [sys.executable, __file__, "--parameters", str(parameters), "--alone", form]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def measure(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """The table, a row for each size and form; printed too."""
    results = []
    in_new_process(passes._PATIENCE + 1, "machine code")  # compiles it, if nobody has
    print(f"{'parameters':>10} {'':12} {'first message of a process':>32} {'later ones':>12}")
    for parameters in sizes:
        runs = [{form: in_new_process(parameters, form) for form in FORMS} for _ in range(repeats)]
        for form in FORMS:
            first = [run[form][0] for run in runs]
            later = [seconds for run in runs for seconds in run[form][1:]]
            results.append({"parameters": parameters, "form": form, "first": first, "later": later})
            spread = f"{median(first):.3f} s ({min(first):.3f} to {max(first):.3f})"
            print(f"{parameters:>10} {form:12} {spread:>32} {median(later):10.3f} s")
    return results


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parameters", type=int, nargs="+", default=[10_000_000, 25_000_000])
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--json", type=Path, default=None)
    options.add_argument("--alone", choices=FORMS, default=None, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.alone:
        print(json.dumps(alone(args.parameters[0], args.alone)))
        return
    results = measure(args.parameters, args.repeats)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
