"""Time and memory of a step of central training: the pure step, the adapter and Opacus' own engine, next to each other.

    python benchmarks/pure_step.py --output results/pure_step.jsonl              on a GPU if there is one: two minutes on an H100
    python benchmarks/pure_step.py --tiny --output /tmp/pure_step.jsonl          whether it gets through, on a CPU too

Each way takes turns with `opacus.PrivacyEngine` in one process, and a ratio is the median over turns. Memory, on a GPU, is the
peak of PyTorch's allocator above what was held before the model was there. Inputs are random numbers, where the model is.

Every measurement is a line of JSON as soon as it is there, and one that fails is a line with its error. Each model has a process
of its own, so that a fault of the device ends one of them. A model that the file has lines of is not measured again.
"""

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulations"))

from fedcgd import DPSGD, LambdaCGD, NoiseKey, Participation, Plan
from fedcgd.central import PrivateGradient
from fedcgd.opacus import CorrelatedPrivacyEngine
from fedcgd_simulations.models.bert import VOCABULARY, bert
from fedcgd_simulations.models.cnn import cnn

Step = Callable[[], None]
ROUNDS = 4000  # more than are timed
LONGEST = 5.0  # seconds for the turns of one way, after the first two
OPACUS = "opacus"
WAYS = ("pure", "pure, two rounds' noise", "pure, bf16", "pure, compiled", "adapter")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "linear": (lambda: nn.Linear(784, 10), lambda n: torch.randn(n, 784)),
    "mlp": (mlp, lambda n: torch.randn(n, 784)),
    "cnn": (cnn, lambda n: torch.randn(n, 3, 32, 32)),
    "bert-tiny": (lambda: bert("bert-tiny", None), lambda n: torch.randint(1, VOCABULARY, (n, 128))),
}


def prepare(model: str, way: str, batch: int, device: torch.device) -> Step:
    """A step of `batch` examples, all of them in each."""
    torch.manual_seed(0)
    make, draw = MODELS[model]
    module, inputs, targets = make().to(device), draw(batch).to(device), torch.randint(0, 2, (batch,), device=device)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    plan = Plan(
        mechanism=LambdaCGD(0.9) if way == "pure, two rounds' noise" else DPSGD(),
        participation=Participation(rounds=ROUNDS),
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-5,
    )
    if way.startswith("pure"):
        context: Any = torch.autocast(device.type, torch.bfloat16) if way == "pure, bf16" else nullcontext()
        called: Any = torch.compile(module) if way == "pure, compiled" else module
        gradient = PrivateGradient(called, cross_entropy, TensorDataset(inputs, targets), plan, key=NoiseKey.generate())

        def pure() -> None:
            with context:
                gradient()
            optimizer.step()
            optimizer.zero_grad()

        return pure
    loader = DataLoader(TensorDataset(torch.zeros(batch, 1)), batch_size=batch)
    if way == OPACUS:
        private = PrivacyEngine().make_private(
            module=module,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
    else:
        private = CorrelatedPrivacyEngine(NoiseKey.generate()).make_private(
            module=module, optimizer=optimizer, data_loader=loader, plan=plan
        )
    called, wrapped, batches = private

    def hooked() -> None:
        for _ in batches:  # one, of all examples, which lie where the model is
            cross_entropy(called(inputs), targets).backward()  # type: ignore[no-untyped-call]
            wrapped.step()
            wrapped.zero_grad()

    return hooked


def seconds(step: Step, steps: int, device: torch.device) -> float:
    """Of a step: by the clock on a GPU, of the processor on a CPU."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = clock()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - started) / steps


def prepared(model: str, way: str, batch: int, device: torch.device) -> tuple[Step, float]:
    """A step that was made three times, and the MiB that this took above what there was; NaN on a CPU."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    step = prepare(model, way, batch, device)
    for _ in range(3):
        step()
    return step, (torch.cuda.max_memory_allocated() - before) / 2**20 if device.type == "cuda" else math.nan


def measure(model: str, batch: int, turns: int, write: Callable[[dict[str, Any]], None]) -> None:
    """Each way that there is for `model`, one after the other; `write` gets each as it is there, failed ones with their error."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts: dict[str, Any] = {"kind": "pure step", "model": model, "batch": batch}
    facts |= {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__}
    opacus: Step | None = None
    for way in (OPACUS, *WAYS):
        started, step = time.perf_counter(), None
        try:
            step, mib = prepared(model, way, batch, device)
            ways = [step] if opacus is None else [opacus, step]
            once = [max(1e-5, seconds(one, 2, device)) for one in ways]
            steps = max(1, min(20, int(0.05 / max(once))))
            many = max(2, min(turns, int(LONGEST / (sum(once) * steps))))
            times = [[seconds(one, steps, device) for one in ways] for _ in range(many)]
            found: dict[str, Any] = {"ms": 1e3 * statistics.median(turn[-1] for turn in times), "mib": mib}
            if way == OPACUS or opacus:
                found["ratio"] = statistics.median(turn[-1] / turn[0] for turn in times)
            opacus = step if way == OPACUS else opacus
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        write({**facts, "way": way, **found, "took": time.perf_counter() - started})


def table(records: list[dict[str, Any]]) -> str:
    lines = [f"{'model':10} {'batch':>5}  {'way':24} {'ms':>9} {'× Opacus':>9} {'MiB':>9}"]
    for one in records:
        name = f"{one['model']:10} {one['batch']:5}  {one['way']:24}"
        if "error" in one:
            lines.append(f"{name} {one['error'][:90]}")
        else:
            lines.append(f"{name} {one['ms']:9.3f} {one.get('ratio', float('nan')):9.2f} {one['mib']:9.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=140, help="what is not measured by then is not")
    parser.add_argument("--tiny", action="store_true", help="batches of 2 and 3, two turns")
    parser.add_argument("--one", choices=list(MODELS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.touch()

    def write(record: dict[str, Any]) -> None:
        with given.output.open("a") as file:
            file.write(json.dumps(record) + "\n")

    if given.one:
        for batch in (2, 3) if given.tiny else (64, 512):
            measure(given.one, batch, 2 if given.tiny else given.turns, write)
        return
    started = time.perf_counter()
    for model in MODELS:
        left = given.seconds - (time.perf_counter() - started)
        if left < 5 or any(one["model"] == model for one in _read(given.output)):
            continue
        child = [sys.executable, __file__, "--output", str(given.output), "--turns", str(given.turns), "--one", model]
        try:
            ended = subprocess.run([*child, *["--tiny"] * given.tiny], timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
            ended = -1
        if ended:
            write({"kind": "pure step", "model": model, "batch": 0, "way": "the rest", "error": f"ended with {ended}"})
        print(table([one for one in _read(given.output) if one["model"] == model]), flush=True)
    print(f"\n{table(_read(given.output))}")


def _read(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


if __name__ == "__main__":
    main()
