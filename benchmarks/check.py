"""Whether fedcgd is as fast, next to its peers, as in benchmarks/results/performance.json, and as it should be.

python benchmarks/check.py [--write] [--only TEXT] [--json]

Measures again what that file holds: a server's round, a client's update, noise at each level of the processor's instructions,
calibrations, steps of central training with their first step and memory, simulated users and commands. Figures are compared with
those of the same family of processors alone: another one has other ratios. A figure above its goal is marked.

Exits with 1 if a figure is 20 % worse than before, or a peak of memory. With `--write`, writes the family's figures instead.
Takes six minutes on two quiet cores; no part of the test suite. A GPU's figures: benchmarks/gpu.sh.
"""

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import accounting
import client_update
import noise
import numpy as np
import pure_step
import runtime
import server_round
import torch
from torch.nn.functional import cross_entropy

from fedcgd import LambdaCGD, Participation, calibrate, compute_epsilon
from fedcgd.clipping.flat_models import flatten
from fedcgd.clipping.per_sample_gradients import clipped_gradient_sum, example_loss
from fedcgd.mechanisms import BSR
from fedcgd.native import library
from fedcgd.noise.quantisation import Lattice
from fedcgd_simulations.models.cnn import cnn
from fedcgd_simulations.process import settle

COMMITTED = Path(__file__).parent / "results" / "performance.json"
WORSE = 1.2
Figures = dict[str, float]
"""Ratios of processor times or peaks, unless the name ends with its unit."""

GOALS: Figures = {
    "server round / Flower DP with fixed clipping": 0.4,
    "server round in a new process, the median of the second to the last / Flower": 0.4,
    "noise of two rounds / normal_": 1.0,
    "client's update / NumPy's norm of it": 1.0,
    # Of processor time, which other work does not change as much: 5 s by the clock of two cores.
    "calibrate under b-min-sep, 1000 rounds, ε = 8, s": 8.0,
    "calibrate under b-min-sep, 1000 rounds, ε = 2, s": 8.0,
    "ε of a σ under b-min-sep, 1000 rounds, s": 8.0,
    "step of linear, pure / Opacus": 1.0,
    "step of linear, adapter / Opacus": 1.0,
    **{f"step of {model}, {way} / Opacus": 1.1 for model in ("mlp", "cnn", "bert-tiny") for way in ("pure", "adapter")},
    "step of bert-tiny, ghost / Opacus": 1.1,
    **{f"first step of {model}, adapter / a step": 4.0 for model in ("mlp", "cnn", "bert-tiny")},
    "memory of a step of cnn, pure / Opacus": 1.0,
    "memory of a step of cnn, adapter / Opacus": 1.0,
    "fedcgd account --help, s": 0.4,
    "fedcgd plan, s": 2.0,
}
"""What is wanted. The other figures are only compared with what they were."""


def processor() -> str:
    """The family of this processor: of others the ratios differ. By Linux' names; elsewhere what Python knows."""
    described = Path("/proc/cpuinfo")
    text = described.read_text().split("\n\n")[0] if described.exists() else ""
    known = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    if "vendor_id" not in known:
        return f"{platform.machine()} {platform.processor()}".strip()
    return f"{known['vendor_id']} family {known['cpu family']} model {known['model']}, {library._levels()[0]}"


def measure(only: str) -> Figures:
    """All figures of the parts whose name holds `only`; each is told as it is there.

    Each part has a process of its own: what one has freed, the next would get from the C library without a page fault, and
    page faults are a large part of some peers' times.
    """
    figures: Figures = {}
    for name, part in PARTS.items():
        if only in name:
            found = in_a_process(part)
            for figure in found.items():
                print("{:80} {:6.2f}".format(*figure), file=sys.stderr, flush=True)
            figures |= found
    return figures


def in_a_process(work: Callable[[], Any]) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        return processes.submit(work).result()


def server_round_figures() -> Figures:
    sizes = server_round.options().parse_args([])
    strategies = server_round.measure(sizes)
    ours, fedavg = strategies[server_round.OURS], strategies["FedAvg"]
    models = (ours["peak_mib"] - fedavg["peak_mib"]) * server_round.MIB / (4 * sizes.parameters)
    return {
        "server round / Flower DP with fixed clipping": ours["ratio"],
        "server round in a new process, the median of the second to the last / Flower": median(
            ours["fresh"]["ratio"][1:]
        ),
        "server's peak above FedAvg's, in models": models,
    }


def noise_figures(level: str) -> Figures:
    """With the builds of `level` and below, as on a processor that has no more; nothing where this one has less."""
    levels = library._levels()
    if level not in levels:
        return {}
    library._levels = lambda: levels[levels.index(level) :]  # type: ignore[assignment]
    name = "noise of two rounds / normal_" + (f", {level}" if level != levels[0] else "")
    return {name: noise.measure(size=25_000_000, threads=2, repeats=9)["ratio"]}


def client_updates(parameters: int = 10_000_000, turns: int = 5) -> Figures:
    """What a message costs a client after its first one, over one `np.linalg.norm(trained - model)` of float64."""
    model, trained = (np.random.default_rng(i).standard_normal(parameters, np.float32) for i in (1, 2))
    ratio = median(
        median(mod - app for mod, app in client_update.alone(parameters, "machine code")[1:])
        / min(seconds(lambda: np.linalg.norm(np.subtract(trained, model, dtype=np.float64))) for _ in range(3))
        for _ in range(turns)
    )
    return {"client's update / NumPy's norm of it": ratio}


def b_min_sep_figures() -> Figures:
    """A user in one of a hundred rounds, at least 66 apart."""
    who = Participation(rounds=1000, min_separation=66, sampling="b-min-sep", sampling_rate=1 / 35)
    found = {
        f"calibrate under b-min-sep, 1000 rounds, ε = {epsilon}, s": seconds(
            partial(calibrate, BSR(4), who, epsilon=epsilon, delta=1e-5)
        )
        for epsilon in (8, 2)
    }
    asked = partial(compute_epsilon, LambdaCGD(0.9), who, noise_multiplier=1.0, delta=1e-5)
    return found | {"ε of a σ under b-min-sep, 1000 rounds, s": seconds(asked)}


def simulated_users(users: int = 64, batch: int = 16, turns: int = 9) -> Figures:
    """The clipped gradients of users with one image each, over gradients of batches of them; the CNN, as a node trains it."""
    settle()
    torch.manual_seed(0)
    model = cnn()
    inputs, targets = torch.randn(users, 3, 32, 32), torch.randint(10, (users,))
    loss = example_loss(model, lambda outputs, targets: cross_entropy(outputs, targets, reduction="none"))
    flat = flatten(model)
    grid = Lattice.fitting(clip_norm=1.0, size=len(flat), stddev=1.0)

    def private() -> None:
        _, finite = clipped_gradient_sum(loss, flat, (inputs, targets), clip_norm=1.0, grid=grid)
        assert finite == users

    def plain() -> None:
        for some, wanted in zip(inputs.split(batch), targets.split(batch), strict=True):
            model.zero_grad()
            cross_entropy(model(some), wanted).backward()  # type: ignore[no-untyped-call]

    private()
    plain()  # both take longer the first time
    ratio = median(seconds(private) / seconds(plain) for _ in range(turns))
    return {"simulated user / gradient without privacy": ratio}


def seconds(work: Callable[[], object]) -> float:
    """Of the processor."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def central_steps(model: str, batch: int, turns: int = 15) -> Figures:
    """Steps of λ-CGD by the pure step and by the adapter over Opacus' with hooks, and how long their first ones take."""
    warnings.simplefilter("ignore")
    device = torch.device("cpu")
    found: Figures = {}
    opacus = pure_step.prepare(model, pure_step.OPACUS, batch, device)
    for _ in range(3):
        opacus()
    for name, way in (("pure", "pure, two rounds' noise"), ("adapter", "adapter")):
        step = pure_step.prepare(model, way, batch, device)
        first = seconds(step)
        for _ in range(2):
            step()
        many = max(
            1, math.ceil(0.02 / seconds(opacus))
        )  # the clock of the processor ticks in hundredths of a second at worst
        pairs = [(pure_step.seconds(step, many, device), pure_step.seconds(opacus, many, device)) for _ in range(turns)]
        found[f"step of {model}, {name} / Opacus"] = median(ours / theirs for ours, theirs in pairs)
        found[f"first step of {model}, {name} / a step"] = first / median(ours for ours, _ in pairs)
    return found


def ghost_step() -> Figures:
    """A step of BERT-tiny that replays one round of noise, over that of Opacus, both with ghost clipping."""
    found = runtime.measure(
        "bert-tiny", batch=16, physical=16, turns=7, steps=1, mode="ghost", variants=[("replay", 2)]
    )
    return {"step of bert-tiny, ghost / Opacus": found["rows"][1]["ratio"]}


def step_memory(model: str, batch: int, way: str) -> float:
    """MiB by which three steps raise the process's peak above what it held with the libraries loaded."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = pure_step.prepare(model, way, batch, torch.device("cpu"))
    for _ in range(3):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def memory_figures(model: str = "cnn", batch: int = 64) -> Figures:
    """Each way in a process of its own, whose peak is its own, and in which what is freed goes back to the system at once."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # else glibc keeps up to a third more
    mib = {way: in_a_process(partial(step_memory, model, batch, way)) for way in (pure_step.OPACUS, "pure", "adapter")}
    return {
        f"memory of a step of {model}, {way} / Opacus": mib[way] / mib[pure_step.OPACUS] for way in ("pure", "adapter")
    }


def commands() -> Figures:
    """Processor seconds of two commands, each in a process of its own and with nothing kept: the least of three."""
    asked = {
        "fedcgd account --help, s": ["account", "--help"],
        "fedcgd plan, s": ["plan", "--users", "1000", "--epsilon", "4", "--delta", "1e-5"],
    }
    return {name: min(command_seconds(words) for _ in range(3)) for name, words in asked.items()}


def command_seconds(words: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {"PATH": str(Path(sys.executable).parent), "FEDCGD_CACHE": folder, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "-m", "fedcgd.cli", *words], check=True, stdout=subprocess.DEVNULL, env=environment
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


PARTS: dict[str, Callable[[], Figures]] = {
    "server": server_round_figures,
    **{f"noise {level}": partial(noise_figures, level) for level in ("x86-64-v4", "x86-64-v3", "x86_64", "aarch64")},
    "client": client_updates,
    "balls-in-bins": accounting.speed,
    "b-min-sep": b_min_sep_figures,
    **{
        f"step {model}": partial(central_steps, model, batch)
        for model, batch in {"linear": 64, "mlp": 64, "cnn": 32, "bert-tiny": 16}.items()
    },
    "step ghost": ghost_step,
    "memory": memory_figures,
    "simulation": simulated_users,
    "commands": commands,
}


def worse(before: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """The figures that are more than 20 % above what they were, or are no number. Raises ValueError for one that is new."""
    if new := sorted(now.keys() - before.keys()):
        raise ValueError(f"{COMMITTED} does not hold {new}: write it again with --write")
    return [name for name in now if not now[name] <= WORSE * before[name]]


def table(before: Mapping[str, float], now: Mapping[str, float]) -> str:
    lines = [f"{'':80} {'before':>7} {'now':>7} {'goal':>5}"]
    found = worse(before, now) if before else []
    for name, figure in now.items():
        goal = GOALS.get(name, math.inf)
        marks = ["WORSE"] * (name in found) + ["above its goal"] * (figure > goal)
        then = f"{before[name]:7.2f}" if name in before else f"{'–':>7}"
        wanted = f"{goal:5g}" if math.isfinite(goal) else f"{'–':>5}"
        lines.append(f"{name:80} {then} {figure:7.2f} {wanted}   {', '.join(marks)}".rstrip())
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--write", action="store_true", help="write this family's figures instead of comparing with them"
    )
    options.add_argument(
        "--only", default="", metavar="TEXT", help=f"parts whose name holds it, of: {', '.join(PARTS)}"
    )
    options.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = options.parse_args()
    families: dict[str, Figures] = json.loads(COMMITTED.read_text())
    family = processor()
    now = measure(given.only)
    if given.write:
        families[family] = families.get(family, {}) | now
        COMMITTED.write_text(json.dumps(families, indent=1, ensure_ascii=False) + "\n")
    before = families.get(family, {})
    print(json.dumps({family: now}, ensure_ascii=False) if given.json else f"{family}\n{table(before, now)}")
    if not before:
        print(f"No figures of this family are known, only of: {'; '.join(families)}.", file=sys.stderr)
    sys.exit(bool(before and worse(before, now)))


if __name__ == "__main__":
    main()
