"""What the processes of `test_opacus_distributed` run: training on several ranks, and what goes wrong on one of them."""

import os
import pickle
import signal
import warnings
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.batch_memory_manager import BatchMemoryManager
from plans import make_plan
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedcgd import LambdaCGD, Mechanism, NoiseKey, Participation, Plan
from fedcgd.ledger import Ledger
from fedcgd.opacus import CorrelatedPrivacyEngine

EXAMPLES, STEPS, EPOCHS = 48, 4, 2


@dataclass(frozen=True)
class Job:
    """What each rank does."""

    folder: Path
    epochs: int = EPOCHS
    parts: int = 4
    examples: int = EXAMPLES
    sampling: str = "none"
    mechanism: Mechanism = field(default_factory=lambda: LambdaCGD(0.8))
    mode: str = "hooks"
    model: str = "linear"
    dtype: torch.dtype = torch.float32
    noise: str | None = None
    most_rows: int | None = None
    secret: bool = False
    """Take the key in `folder`, in place of a simulation key."""
    trouble: str = ""
    """What goes wrong, on the rank `on_rank`, in the round `in_round`."""
    on_rank: int = 1
    in_round: int = 3
    load: bool = False
    plain: bool = False
    """One process, without a process group."""


def network(kind: str) -> nn.Module:
    """A model with the same weights on each call."""
    torch.manual_seed(3)
    if kind == "linear":
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    if kind == "large":  # more coordinates than the noise's tiles
        return nn.Sequential(nn.Linear(6, 600), nn.Tanh(), nn.Linear(600, 3))
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
    )


def examples(dtype: torch.dtype, count: int = EXAMPLES) -> TensorDataset:
    """The same ones on each call."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs.to(dtype), torch.randint(3, (count,), generator=generator))


def plan_of(job: Job) -> Plan:
    """The plan of the run."""
    rounds = STEPS * EPOCHS
    if job.sampling == "poisson":
        participation = Participation(rounds=rounds, sampling="poisson", sampling_rate=1 / STEPS)
    elif job.sampling == "b-min-sep":
        participation = Participation(
            rounds=rounds, min_separation=2, sampling="b-min-sep", sampling_rate=1 / (STEPS - 1)
        )
    else:
        participation = Participation(rounds=rounds, min_separation=STEPS, sampling=job.sampling)
    return make_plan(job.mechanism, participation, clip_norm=0.5, noise_multiplier=0.7, delta=1e-2)


def train(job: Job, rank: int) -> dict[str, Any]:
    """Train for `job.epochs`; what the model and the run are afterwards."""
    warnings.simplefilter("ignore")
    here = job.trouble if rank == job.on_rank else ""
    data: Any = examples(job.dtype, job.examples)
    model = network(job.model).to(job.dtype)
    if not job.plain:
        model = DifferentiallyPrivateDistributedDataParallel(model)
    seed = 2 if here == "key" else 1
    key = NoiseKey.from_file(job.folder / "noise.key") if job.secret else NoiseKey.simulation(seed)
    engine = CorrelatedPrivacyEngine(key, record=None if job.plain else job.folder / "run.db")
    # Of a round there are as many batches of the loader as `parts`; one part is one for each rank.
    plain_optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    private = engine.make_private(
        module=model,
        optimizer=plain_optimizer,
        data_loader=DataLoader(data, batch_size=job.examples // STEPS // job.parts),
        plan=plan_of(job) if here != "plan" else replace(plan_of(job), noise_multiplier=0.8),
        noise=job.noise,
        grad_sample_mode=job.mode,
        accumulation_steps=job.parts,
    )
    module, optimizer, loader = private[0], private[1], private[-1]
    loss = private[2] if len(private) == 4 else nn.functional.cross_entropy
    if job.load:
        engine.load_checkpoint(path=job.folder / "checkpoint", module=module, optimizer=optimizer)
    go_wrong(here, job, engine)

    def steps(batches: Any) -> None:
        for x, y in batches:
            if here == "fewer" and engine.accountant.released == job.in_round:
                x, y = x[:-1], y[:-1]
            optimizer.zero_grad()
            loss(module(x), y).backward()
            optimizer.step()

    while engine.accountant.released < STEPS * job.epochs:
        if job.most_rows is None:
            steps(loader)
        else:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=job.most_rows, optimizer=optimizer
            ) as batches:
                steps(batches)
    if rank == 0 and not job.load and job.epochs < EPOCHS:
        engine.save_checkpoint(path=job.folder / "checkpoint", module=module, optimizer=optimizer)
    return {
        "model": [p.detach().double().numpy().tobytes() for p in model.parameters()],
        "nonces": engine.accountant.nonces,
        "epsilon": engine.get_epsilon(1e-2) if job.sampling == "none" else None,
        "history": engine.accountant.history,
        "run": engine.accountant.run,
    }


def go_wrong(trouble: str, job: Job, engine: CorrelatedPrivacyEngine) -> None:
    """Prepare what goes wrong on this rank in the middle of a round."""

    if trouble == "dies after the record":
        put = Ledger.record_aggregated

        def put_and_die(*given: Any) -> None:
            put(*given)
            if engine.accountant.released == job.in_round:
                os.kill(os.getpid(), signal.SIGKILL)

        Ledger.record_aggregated = put_and_die  # type: ignore[method-assign]
    elif trouble == "no disk":

        def full(*_: Any) -> None:
            raise OSError("no space left on device")

        Ledger.record_aggregated = full  # type: ignore[method-assign]


def run_rank(job: Job, rank: int, ranks: int, meeting: Path) -> None:
    """A process: trains, and leaves what came out, or the error, beside the file `meeting`, where the ranks find each other."""
    torch.set_num_threads(1)
    answer: Any
    try:
        if not job.plain:
            store = dist.FileStore(str(meeting), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
        answer = train(job, rank)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    meeting.with_name(f"{meeting.name}-{rank}").write_bytes(pickle.dumps(answer))
