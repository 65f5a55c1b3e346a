"""Whether fedcgd is still as fast, next to its peers, as when benchmarks/results/performance.json was written.

python benchmarks/check.py [--write]

Measures again what that file holds: a server's round, a client's update, noise, calibrations, central steps and simulated users.
Exits with 1 if a ratio of processor times is 20 % worse, or a peak of memory. With `--write`, writes the file instead. Takes
two minutes; no part of the test suite.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import accounting
import client_update
import noise
import numpy as np
import runtime
import server_round
import torch
from torch.nn.functional import cross_entropy

from fedcgd.clipping.flat_models import flatten
from fedcgd.clipping.per_sample_gradients import clipped_gradient_sum, example_loss
from fedcgd.noise.quantisation import Lattice
from fedcgd_simulations.models.cnn import cnn
from fedcgd_simulations.process import settle

COMMITTED = Path(__file__).parent / "results" / "performance.json"
WORSE = 1.2


def measure() -> dict[str, float]:
    """All figures; each is told as it is there.

    Each part has a process of its own: what one has freed, the next would get from the C library without a page fault, and
    page faults are a large part of some peers' times.
    """
    figures: dict[str, float] = {}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        for part in PARTS:
            found = processes.submit(part).result()
            for name, figure in found.items():
                print(f"{name:50} {figure:6.2f}", file=sys.stderr, flush=True)
            figures |= found
    return figures


def server_round_figures() -> dict[str, float]:
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


def noise_figures() -> dict[str, float]:
    return {"noise of two rounds / normal_": noise.measure(size=25_000_000, threads=2, repeats=9)["ratio"]}


def client_updates(parameters: int = 10_000_000, turns: int = 5) -> dict[str, float]:
    """What a message costs a client after its first one, over one `np.linalg.norm(trained - model)` of float64."""
    model, trained = (np.random.default_rng(i).standard_normal(parameters, np.float32) for i in (1, 2))
    ratio = median(
        median(mod - app for mod, app in client_update.alone(parameters, "machine code")[1:])
        / min(seconds(lambda: np.linalg.norm(np.subtract(trained, model, dtype=np.float64))) for _ in range(3))
        for _ in range(turns)
    )
    return {"client's update / NumPy's norm of it": ratio}


def simulated_users(users: int = 64, batch: int = 16, turns: int = 9) -> dict[str, float]:
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


def central_step(model: str, batch: int, mode: str) -> dict[str, float]:
    """Processor time of steps that replay one round of noise, over that of Opacus."""
    found = runtime.measure(model, batch=batch, physical=batch, turns=7, steps=1, mode=mode, variants=[("replay", 2)])
    return {f"step of {model}, {mode} / Opacus": found["rows"][1]["ratio"]}


PARTS: tuple[Callable[[], dict[str, float]], ...] = (
    server_round_figures,
    noise_figures,
    client_updates,
    accounting.speed,
    partial(central_step, "cnn", 32, "hooks"),
    partial(central_step, "bert-tiny", 16, "hooks"),
    partial(central_step, "bert-tiny", 16, "ghost"),
    simulated_users,
)


def worse(before: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """The figures that are more than 20 % above what they were, or are no number. Raises ValueError if others were measured."""
    if before.keys() != now.keys():
        raise ValueError(
            f"{COMMITTED} holds {sorted(before)}, and {sorted(now)} were measured: write it again with --write"
        )
    return [name for name in before if not now[name] <= WORSE * before[name]]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true", help="write the file instead of comparing with it")
    write = options.parse_args().write
    now = measure()
    if write:
        COMMITTED.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n")
        return
    before = json.loads(COMMITTED.read_text())
    found = worse(before, now)
    for name in before:
        print(f"{name:50} {before[name]:6.2f} → {now[name]:6.2f}{'   WORSE' if name in found else ''}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
