"""What the processes of `test_pure_step_ranks` run: one model trained by several, or by one."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from plans import make_plan
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fedcgd import LambdaCGD, NoiseKey, Participation
from fedcgd.central import PrivateGradient

ROUNDS = 6


class Network(nn.Module):
    """Dropout, layer normalisation, a buffer, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(6, 50), nn.LayerNorm(50), nn.Dropout(0.2)
        self.kept, self.last = nn.Linear(50, 50), nn.Linear(50, 3)
        self.kept.requires_grad_(False)
        self.register_buffer("scale", torch.full((50,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.kept(self.drop(torch.tanh(self.norm(self.first(x))))) * self.scale)


def train(folder: Path, kind: str, group: dist.ProcessGroup | None) -> torch.Tensor:
    rank = 0 if group is None else dist.get_rank(group)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(36, 6, generator=generator), torch.randint(0, 3, (36,), generator=generator))
    model = Network()
    record = folder / f"{kind}.db" if "recorded" in kind else None
    plan = make_plan(
        LambdaCGD(0.5), Participation(rounds=ROUNDS, min_separation=3), clip_norm=0.3, delta=1e-3,
        noise_multiplier=0.0 if "noiseless" in kind else 0.7,
    )  # fmt: skip
    step = PrivateGradient(
        model, cross_entropy, data, plan, key=NoiseKey.simulation(2), record=record, micro_batch=4, group=group
    )
    if "sharded" in kind:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for t in range(ROUNDS):
        if "failing" in kind and rank == 1 and t == 2:
            data.tensors[1].fill_(99)
        step()
        optimizer.step()
    values = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([value.detach().flatten() for value in values])


def main(folder: Path, kinds: list[str], rank: int, count: int) -> None:
    warnings.filterwarnings("ignore", ".*NO NOISE")
    torch.set_num_threads(1)
    group = None
    if count:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{count}", rank=rank, world_size=count)
        group = dist.group.WORLD
    for kind in kinds:
        try:
            found = train(folder, kind, group)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        torch.save(found, folder / f"{kind}-{rank}-of-{count}.pt")
    if count:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[4].split(","), int(sys.argv[2]), int(sys.argv[3]))
