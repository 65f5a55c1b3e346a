"""A step on several processes, beside Opacus' own in the same processes: its time, that of the noise, and whether bits stay.

python benchmarks/distributed.py [--turns 5] [--steps 6] [--device cuda]

Batches of 64 rows in all; ratios are medians over turns, in which both loops take their steps one after the other. Two cores of a
loaded virtual machine (x86-64, torch 2.13, Gloo): read the columns of the processor; by the clock, other programs are in it.

    ms a step           by the clock              of the processor, all ranks
    ranks            Opacus fedcgd ratio      Opacus fedcgd ratio    noise, a rank   same bits
    CNN, 26 thousand parameters
        1       440.8      530.9   1.32        22.7       23.6   1.04         1.06           yes
        2       317.9      302.0   0.98        33.3       33.0   1.05         0.84           yes
        4       638.7      764.5   1.34        66.6       60.3   0.93         0.77           yes
    MLP, 235 thousand
        1      4716.2     2643.0   0.56        87.1       54.7   0.67         1.59           yes
        2      1337.7     1044.7   0.78        63.0       40.9   0.63         0.91           yes
        4       548.6      544.1   0.94       101.0       81.9   0.87         1.96           yes
"""

import argparse
import hashlib
import multiprocessing
import pickle
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from fedcgd import LambdaCGD, NoiseKey, Participation, Plan
from fedcgd.opacus import CorrelatedPrivacyEngine
from fedcgd.release import NoiseSource

BATCH, PARTS = 64, 4
RANKS = (1, 2, 4)


def cnn() -> nn.Module:
    """26,010 parameters, of images of 28 by 28."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 16, 8, 2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    """235,146 parameters, of the same images."""
    return nn.Sequential(nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"CNN, 26 thousand parameters": cnn, "MLP, 235 thousand": mlp}


@dataclass
class Times:
    """Of one rank: seconds a step by the clock and of the processor, in each turn; of the noise; what the model is at the end."""

    wall: dict[str, list[float]] = field(default_factory=lambda: {"opacus": [], "fedcgd": []})
    processor: dict[str, list[float]] = field(default_factory=lambda: {"opacus": [], "fedcgd": []})
    noise: list[float] = field(default_factory=list)
    model: str = ""


def measure(name: str, rank: int, ranks: int, turns: int, steps: int, device: str, folder: Path) -> None:
    """A process: both loops in turn, with the same model and so many rows of a batch."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        devices = torch.cuda.device_count()
        torch.cuda.set_device(rank % devices)
        backend = "nccl" if ranks <= devices else "gloo"  # NCCL takes no two processes on one GPU
    store = dist.FileStore(str(folder / "meeting"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    generator = torch.Generator().manual_seed(1)
    size = BATCH * steps
    inputs, labels = torch.randn(size, 784, generator=generator), torch.randint(10, (size,), generator=generator)
    data = TensorDataset(inputs.to(device), labels.to(device))
    times = Times()
    noise_of(times)
    loops = {
        "opacus": opacus(name, data, rank, ranks, device),
        "fedcgd": fedcgd(name, data, turns + 1, steps, device, folder / "one"),
    }
    for turn in range(turns + 1):  # the first one warms up, and looks for leaks
        for kind, loop in loops.items():
            meet(device)
            wall, processor = time.perf_counter(), time.process_time()
            epoch(*loop)
            meet(device)
            if turn:
                times.wall[kind].append((time.perf_counter() - wall) / steps)
                times.processor[kind].append((time.process_time() - processor) / steps)
    noise = list(times.noise)
    in_parts = fedcgd(name, data, 1, steps, device, folder / "four", PARTS)
    epoch(*in_parts)
    octets = b"".join(p.detach().cpu().numpy().tobytes() for p in in_parts[0].parameters())
    times.model, times.noise = hashlib.sha256(octets).hexdigest(), noise
    (folder / f"times-{rank}").write_bytes(pickle.dumps(times))


def meet(device: str) -> None:
    """Wait for this device, and for the other processes."""
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def epoch(model: Any, optimizer: Any, loader: Any) -> None:
    """Train on all batches."""
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def opacus(name: str, data: TensorDataset, rank: int, ranks: int, device: str) -> tuple[Any, ...]:
    """Opacus' own: each rank has its part of the examples, in batches of its part of a batch."""
    torch.manual_seed(0)
    model = DifferentiallyPrivateDistributedDataParallel(MODELS[name]().to(device))
    mine = Subset(data, range(rank, len(data), ranks))
    private: tuple[Any, ...] = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(mine, batch_size=BATCH // ranks),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    return private


def fedcgd(
    name: str, data: TensorDataset, epochs: int, steps: int, device: str, record: Path, parts: int = 1
) -> tuple[Any, ...]:
    """Ours, with a part of the batch for each rank, or `parts` on all of them."""
    torch.manual_seed(0)
    model = DifferentiallyPrivateDistributedDataParallel(MODELS[name]().to(device))
    participation = Participation(rounds=epochs * steps, min_separation=steps)
    private: tuple[Any, ...] = CorrelatedPrivacyEngine(NoiseKey.simulation(1), record=record).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=BATCH // parts),
        accumulation_steps=parts,
        plan=Plan(
            mechanism=LambdaCGD(0.8), participation=participation, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5
        ),
    )
    return private


def noise_of(times: Times) -> None:
    """Note the time that the noise takes from now on."""
    add = NoiseSource.add

    def timed(*arguments: Any) -> None:
        begun = time.process_time()
        add(*arguments)
        times.noise.append(time.process_time() - begun)

    NoiseSource.add = timed  # type: ignore[method-assign]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: NCCL with a GPU for each process, else Gloo"
    )
    arguments = parser.parse_args()
    print("ms a step           by the clock              of the processor, all ranks")
    print("ranks            Opacus fedcgd ratio      Opacus fedcgd ratio    noise, a rank   same bits")
    context = multiprocessing.get_context("spawn")
    for name in MODELS:
        print(name)
        alone = ""
        for ranks in RANKS:
            with tempfile.TemporaryDirectory() as folder:
                given = (ranks, arguments.turns, arguments.steps, arguments.device, Path(folder))
                processes = [context.Process(target=measure, args=(name, rank, *given)) for rank in range(ranks)]
                for process in processes:
                    process.start()
                for process in processes:
                    process.join()
                found: list[Times] = [
                    pickle.loads((Path(folder) / f"times-{rank}").read_bytes()) for rank in range(ranks)
                ]
            wall = {kind: found[0].wall[kind] for kind in ("opacus", "fedcgd")}
            cpu = {
                kind: [sum(turn) for turn in zip(*(one.processor[kind] for one in found), strict=True)] for kind in wall
            }
            alone = alone or found[0].model
            same = "yes" if all(one.model == alone for one in found) else "NO"
            noise = max(statistics.median(one.noise) if one.noise else 0.0 for one in found)
            print(f"{ranks:5}  {_columns(wall)}  {_columns(cpu)} {1000 * noise:12.2f}      {same:>8}", flush=True)


def _columns(seconds: dict[str, list[float]]) -> str:
    ratio = statistics.median(ours / other for ours, other in zip(seconds["fedcgd"], seconds["opacus"], strict=True))
    both = (1000 * statistics.median(seconds[kind]) for kind in ("opacus", "fedcgd"))
    return " ".join(f"{one:10.1f}" for one in both) + f" {ratio:6.2f}"


if __name__ == "__main__":
    main()
