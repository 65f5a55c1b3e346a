"""What `clipped_update_mod` adds to a message: processor time for models of several sizes, with NumPy and with machine code.

python benchmarks/client_update.py [--parameters 10000000 25000000] [--repeats 5] [--json FILE]

The app's own training is left out: it answers with arrays that are there. Results are in docs/performance.md.
"""

import argparse
import json
import time
from functools import partial
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
from fedcgd_flower.mod import ClippedUpdateMod

ARRAYS = 60
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # a Message asks for them


def measure(parameters: int, repeats: int) -> list[float]:
    generator = np.random.default_rng(1)
    sizes = [len(part) for part in np.array_split(np.empty(parameters, np.bool_), ARRAYS)]
    model = {f"layer {i}": generator.standard_normal(n, np.float32) for i, n in enumerate(sizes)}
    arrays = ArrayRecord({name: Array(value) for name, value in model.items()})
    trained = ArrayRecord({name: Array(value + np.float32(1e-3)) for name, value in model.items()})
    layout = layout_of(arrays)
    flat = flatten(arrays, layout)
    grid = Grid.fitting(clip_norm=1.0, size=parameters, stddev=1.0)
    task = TrainTask(round=0, attempt=0, clip_norm=1.0, grid=grid, users=("ann",), layout=layout)

    def train(message: Message, context: Any) -> Message:
        return Message(RecordDict({"arrays": trained, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    seconds = []
    for _ in range(repeats):
        message = train_message(1, flat, ConfigRecord(), task)
        message.metadata.__dict__["_message_id"] = "message"
        begin = time.process_time()
        reply = ClippedUpdateMod()(message, SimpleNamespace(node_config={}), train)  # type: ignore[arg-type]
        seconds.append(time.process_time() - begin)
        assert not reply.has_error()
    return seconds


def chosen(form: passes.Passes) -> passes.Passes:
    return form


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parameters", type=int, nargs="+", default=[10_000_000, 25_000_000])
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--json", type=Path, default=None)
    args = options.parse_args()
    forms = {"NumPy": passes.NUMPY, "machine code": passes.compiled()}
    results = []
    for parameters in args.parameters:
        for name, form in forms.items():
            if form is None:
                continue
            passes.compiled = partial(chosen, form)
            passes._through = 2**62  # past the point from which on machine code is used
            seconds = measure(parameters, args.repeats)
            results.append({"parameters": parameters, "form": name, "seconds": median(seconds), "all": seconds})
            print(f"{parameters:>10} {name:14} {median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
