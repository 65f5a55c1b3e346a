"""A model in FSDP2's `fully_shard` beside the same in Opacus' wrapper: time and memory of each process, its noise, same bits.

python benchmarks/shards.py [--ranks 1 2 3 4] [--steps 6] [--whole after-forward|in-a-step]

Eight layers of 1024 by 1024, ghost clipping, 48 examples a step in twelve parts, one thread in each process. Both models take
their steps in turn in the same processes; times are the processor's, of all processes together, and the ratio is the median over
the steps. "gathers" is the share of FSDP2's own all-gathers of parameters. Memory is what processes that train one of the models
alone grow by at most, as the C library keeps what is freed, and where it gives large blocks back at once
(MALLOC_MMAP_THRESHOLD_), which shows what is in use. FSDP2 puts a layer together twice for each part; with --whole after-forward
once, by fully_shard's reshard_after_forward=False, and with --whole in-a-step once for all parts of a step, by
set_reshard_after_backward(False) too. The table, with its machine, is in docs/guides/distributed.md.
"""

import argparse
import hashlib
import multiprocessing
import os
import pickle
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
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
from fedcgd.opacus.shards import _AllGather
from fedcgd.release import NoiseSource

WIDTH, LAYERS, BATCH, PARTS = 1024, 8, 48, 12
WARM = 2  # steps, of which the first compares all gradients
DDP, FSDP2 = "DDP", "FSDP2"


class Training:
    """The model in one of the wrappers, and its steps."""

    def __init__(self, kind: str, ranks: int, steps: int, folder: Path) -> None:
        generator = torch.Generator().manual_seed(1)
        size = BATCH * steps
        data = TensorDataset(
            torch.randn(size, WIDTH, generator=generator), torch.randint(10, (size,), generator=generator)
        )
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.model: nn.Module = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
        if kind == FSDP2:
            mesh = init_device_mesh("cpu", (ranks,))
            for layer in [*layers[::2], self.model[-1], self.model]:  # type: ignore[index]
                fully_shard(layer, mesh=mesh, reshard_after_forward=not os.environ.get("FSDP2_WHOLE"))
            if os.environ.get("FSDP2_WHOLE") == "in-a-step":
                self.model.set_reshard_after_backward(False)
        else:
            self.model = DifferentiallyPrivateDistributedDataParallel(self.model)
        engine = CorrelatedPrivacyEngine(NoiseKey.simulation(1), record=folder / kind)
        private = engine.make_private(
            module=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=BATCH // PARTS),
            accumulation_steps=PARTS,
            grad_sample_mode="ghost",
            assume_independent="rows of linear layers" if kind == FSDP2 else None,
            plan=Plan(
                mechanism=LambdaCGD(0.8),
                participation=Participation(rounds=steps, min_separation=steps),
                clip_norm=1.0,
                noise_multiplier=1.0,
                delta=1e-5,
            ),
        )
        self.steps = self._steps(engine, *private)

    def _steps(self, engine: Any, module: Any, optimizer: Any, loss: Any, loader: Any) -> Iterator[None]:
        done = 0
        for x, y in loader:
            optimizer.zero_grad()
            loss(module(x), y).backward()
            optimizer.step()
            if len(engine.accountant) > done:
                done += 1
                yield

    def digest(self) -> str:
        """What tells the model from others."""
        told = hashlib.sha256()
        for p in self.model.parameters():
            told.update((p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy().tobytes())
        return told.hexdigest()[:8]


def begin(rank: int, ranks: int, folder: Path) -> None:
    """Join the other processes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "meeting"), ranks), rank=rank, world_size=ranks)


def times(rank: int, ranks: int, steps: int, folder: Path) -> Any:
    """Of each kind: (seconds of each step, of FSDP2's all-gathers in each, of the noise, the model)."""
    begin(rank, ranks, folder)
    noise, gathers = times_of(NoiseSource, "add"), times_of(_AllGather, "__call__")
    trainings = {kind: Training(kind, ranks, steps, folder) for kind in (DDP, FSDP2)}
    seconds: dict[str, list[float]] = {kind: [] for kind in trainings}
    noises: dict[str, list[float]] = {kind: [] for kind in trainings}
    gathered: dict[str, list[float]] = {kind: [] for kind in trainings}
    for _ in range(steps):
        for kind, training in trainings.items():
            dist.barrier()
            noise.clear()
            gathers.clear()
            begun = time.process_time()
            next(training.steps)
            dist.barrier()
            seconds[kind].append(time.process_time() - begun)
            noises[kind].append(sum(noise))
            gathered[kind].append(sum(gathers))
    return {
        kind: (seconds[kind][WARM:], gathered[kind][WARM:], statistics.median(noises[kind]), training.digest())
        for kind, training in trainings.items()
    }


def memory(rank: int, ranks: int, kind: str, folder: Path) -> Any:
    """MiB that the process has grown by at most."""
    begin(rank, ranks, folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    training = Training(kind, ranks, WARM + 1, folder)
    for _ in range(WARM + 1):
        next(training.steps)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def times_of(kind: Any, name: str) -> list[float]:
    """The seconds of the processor that each call of a method takes from now on."""
    times: list[float] = []
    method = getattr(kind, name)

    def timed(*given: Any, **options: Any) -> Any:
        begun = time.process_time()
        answer = method(*given, **options)
        times.append(time.process_time() - begun)
        return answer

    setattr(kind, name, timed)
    return times


def run_rank(work: Callable[..., Any], rank: int, ranks: int, given: Any, folder: Path) -> None:
    """A process: what `work` returns goes into a file of `folder`."""
    (folder / f"rank-{rank}").write_bytes(pickle.dumps(work(rank, ranks, given, folder)))


def on_ranks(work: Callable[..., Any], ranks: int, given: Any) -> list[Any]:
    """What `work` returns in each of the processes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [context.Process(target=run_rank, args=(work, rank, ranks, given, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(ranks)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--whole", choices=["after-forward", "in-a-step"], default="")
    arguments = parser.parse_args()
    os.environ["FSDP2_WHOLE"] = arguments.whole  # which the other processes read
    print("          ms of the processor             noise, ms      MiB a rank:         given back at once:")
    print("ranks   DDP  FSDP2 ratio gathers       DDP  FSDP2         DDP  FSDP2           DDP  FSDP2         models")
    for ranks in arguments.ranks:
        found = on_ranks(times, ranks, arguments.steps)
        step, gathers = (
            {kind: [sum(one) for one in zip(*(rank[kind][i] for rank in found), strict=True)] for kind in (DDP, FSDP2)}
            for i in (0, 1)
        )
        ratio = statistics.median(ours / other for ours, other in zip(step[FSDP2], step[DDP], strict=True))
        columns = [1000 * statistics.median(step[kind]) for kind in step]
        share = statistics.median(one / whole for one, whole in zip(gathers[FSDP2], step[FSDP2], strict=True))
        noise = [1000 * max(rank[kind][2] for rank in found) for kind in step]
        grown = []
        for threshold in (None, 2**18):
            if threshold is not None:
                os.environ["MALLOC_MMAP_THRESHOLD_"] = str(threshold)
            grown += [max(on_ranks(memory, ranks, kind)) for kind in step]
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
        models = "/".join(sorted({rank[kind][3] for rank in found for kind in step}))
        print(
            f"{ranks:5} {columns[0]:5.0f} {columns[1]:6.0f} {ratio:5.2f} {share:7.2f} {noise[0]:9.1f} {noise[1]:6.1f} "
            f"{grown[0]:11.0f} {grown[1]:6.0f} {grown[2]:13.0f} {grown[3]:6.0f}   {models:>12}",
            flush=True,
        )


if __name__ == "__main__":
    main()
