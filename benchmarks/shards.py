"""A model in FSDP2's `fully_shard` beside the same in Opacus' wrapper: time and memory of each process, its noise, same bits.

python benchmarks/shards.py

Eight layers of 1024 by 1024, ghost clipping, 48 examples a step in twelve parts; the largest numbers of any process, one thread
each. The table, with its machine, is in docs/guides/distributed.md.
"""

import hashlib
import multiprocessing
import pickle
import resource
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from fedcgd import LambdaCGD, NoiseKey, Participation, Plan
from fedcgd.opacus import CorrelatedPrivacyEngine
from fedcgd.release import NoiseSource

WIDTH, LAYERS, STEPS, BATCH, PARTS = 1024, 8, 8, 48, 12


def measure(sharded: bool, rank: int, ranks: int, folder: Path) -> None:
    """A process: (seconds a step, MiB that its memory grew by, seconds of noise, the model's digest) into a file of `folder`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "meeting"), ranks), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    noise = noise_times()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(BATCH * STEPS, WIDTH, generator=generator), torch.randint(10, (BATCH * STEPS,), generator=generator)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    if sharded:
        for layer in [*layers[::2], model[-1], model]:  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
    else:
        model = DifferentiallyPrivateDistributedDataParallel(model)
    engine = CorrelatedPrivacyEngine(NoiseKey.simulation(1), record=folder / "releases")
    module, optimizer, loss, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=BATCH // PARTS),
        accumulation_steps=PARTS,
        grad_sample_mode="ghost",
        assume_independent="rows of linear layers" if sharded else None,
        plan=Plan(
            mechanism=LambdaCGD(0.8),
            participation=Participation(rounds=STEPS, min_separation=STEPS),
            clip_norm=1.0,
            noise_multiplier=1.0,
            delta=1e-5,
        ),
    )
    seconds, begun = [], time.perf_counter()
    for x, y in loader:
        optimizer.zero_grad()
        loss(module(x), y).backward()
        optimizer.step()
        if len(engine.accountant) > len(seconds):
            seconds.append(time.perf_counter() - begun)
            begun = time.perf_counter()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    told = hashlib.sha256()
    for p in model.parameters():
        told.update((p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy().tobytes())
    answer = statistics.median(seconds[2:]), grown, statistics.median(noise), told.hexdigest()
    (folder / f"rank-{rank}").write_bytes(pickle.dumps(answer))


def noise_times() -> list[float]:
    """The seconds of the processor that each round's noise takes from now on."""
    times: list[float] = []
    add = NoiseSource.add

    def timed(*arguments: Any) -> None:
        begun = time.process_time()
        add(*arguments)
        times.append(time.process_time() - begun)

    NoiseSource.add = timed  # type: ignore[method-assign]
    return times


def main() -> None:
    """Print the table."""
    print("        ranks   ms a step   noise, ms   MiB   model")
    context = multiprocessing.get_context("spawn")
    for sharded in (False, True):
        for ranks in (1, 2, 3, 4):
            with tempfile.TemporaryDirectory() as folder:
                given = ranks, Path(folder)
                processes = [context.Process(target=measure, args=(sharded, rank, *given)) for rank in range(ranks)]
                for process in processes:
                    process.start()
                for process in processes:
                    process.join()
                found = [pickle.loads((Path(folder) / f"rank-{rank}").read_bytes()) for rank in range(ranks)]
            seconds, grown, noise, models = zip(*found, strict=True)
            kind, same = "FSDP2" if sharded else "DDP", "/".join(sorted({one[:8] for one in models}))
            numbers = f"{1000 * max(seconds):9.0f} {1000 * max(noise):11.1f} {max(grown):5.0f}"
            print(f"{kind:6} {ranks:5} {numbers}   {same}", flush=True)


if __name__ == "__main__":
    main()
