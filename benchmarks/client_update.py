"""What `clipped_update_mod` adds to a message: processor time for models of several sizes, with NumPy and with machine code.

python benchmarks/client_update.py [--parameters 10000000 25000000] [--repeats 5] [--json FILE]

A message comes in, the app reads the model's arrays and answers with arrays that are there, the reply goes out. Counted is what
that takes longer than the same app takes by itself, on the same arrays in an ordinary message, which it is given just before. A
deployed ClientApp is a new process for each message, so each repeat is one, in turns between the forms; what comes after its
first message stands beside it. Loading machine code counts, compiling it does not: that happens once on a machine. Results are
in benchmarks/diary.md.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedcgd.native import vector_kernels
from fedcgd.noise.quantisation import Lattice
from fedcgd_flower.clipping import Clipping
from fedcgd_flower.layout import flatten, layout_of
from fedcgd_flower.messages import TrainTask, train_message
from fedcgd_flower.mod import clipped_update_mod

ARRAYS = 60
MESSAGES = 4  # of one process
FORMS = ("NumPy", "machine code")
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # a Message asks for them


def alone(parameters: int, form: str) -> list[tuple[float, float]]:
    """Seconds that each message to this process takes, and those of the app without the mod."""
    if form == "NumPy":
        vector_kernels.compiled = lambda: None  # type: ignore[assignment]
    generator = np.random.default_rng(1)
    sizes = [len(part) for part in np.array_split(np.empty(parameters, np.bool_), ARRAYS)]
    model = {f"layer {i}": generator.standard_normal(n, np.float32) for i, n in enumerate(sizes)}
    arrays = ArrayRecord({name: Array(value) for name, value in model.items()})
    trained = ArrayRecord({name: Array(value + np.float32(1e-3)) for name, value in model.items()})
    layout = layout_of(arrays)
    flat = flatten(arrays, layout)
    grid = Lattice.fitting(clip_norm=1.0, size=parameters, stddev=1.0)
    task = TrainTask(round=0, attempt=0, clipping=Clipping(clip_norm=1.0, grid=grid), users=("ann",), layout=layout)
    node: Any = SimpleNamespace(node_config={"user-id": "ann"})

    def train(message: Message, context: Any) -> Message:
        assert len(message.content.array_records["arrays"].to_numpy_ndarrays()) == ARRAYS
        return Message(RecordDict({"arrays": trained, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    def took(message: Message, work: Callable[[], Message]) -> float:
        message.metadata.__dict__["_message_id"] = "message"
        begin = time.process_time()
        reply = work()
        seconds = time.process_time() - begin
        assert not reply.has_error()
        return seconds

    seconds: list[tuple[float, float]] = []
    for _ in range(MESSAGES):
        plain = Message(RecordDict({"arrays": arrays, "config": ConfigRecord()}), dst_node_id=1, message_type="train")
        of_the_app = took(plain, partial(train, plain, node))
        message = train_message(flat, ConfigRecord(), task)
        seconds.append((took(message, partial(clipped_update_mod, message, node, train)), of_the_app))
    if form != "NumPy":
        assert vector_kernels.compiled() is not None, "fedcgd was installed without a C compiler"
    return seconds


def in_new_process(parameters: int, form: str) -> list[tuple[float, float]]:
    command = [sys.executable, __file__, "--parameters", str(parameters), "--alone", form]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [(with_mod, without) for with_mod, without in json.loads(done.stdout)]


def measure(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """The table, a row for each size, form and kind of message; printed too."""
    results = []
    in_new_process(2**20, "machine code")  # warms the disk
    print(
        f"{'parameters':>10} {'':12} {'message':>7} {'added to the app (spread)':>32} {'with / without (spread)':>26}"
    )
    for parameters in sizes:
        runs = [{form: in_new_process(parameters, form) for form in FORMS} for _ in range(repeats)]
        for form in FORMS:
            for kind, part in (("first", slice(1)), ("later", slice(1, None))):
                pairs = [pair for run in runs for pair in run[form][part]]
                added = sorted(with_mod - without for with_mod, without in pairs)
                ratios = sorted(with_mod / without for with_mod, without in pairs)
                row = {"parameters": parameters, "form": form, "message": kind, "added": median(added)}
                row |= {"added_spread": [added[0], added[-1]], "ratio": median(ratios)}
                results.append(row | {"ratio_spread": [ratios[0], ratios[-1]]})
                print(
                    f"{parameters:>10} {form:12} {kind:>7} "
                    f"{f'{median(added):.3f} s ({added[0]:.3f} to {added[-1]:.3f})':>32} "
                    f"{f'{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})':>26}",
                    flush=True,
                )
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
