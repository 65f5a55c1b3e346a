"""Central training on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.batch_memory_manager import BatchMemoryManager
from plans import make_plan
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedcgd import BSR, NoiseKey, Participation, Plan
from fedcgd.opacus import CorrelatedPrivacyEngine


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


class Reader(nn.Module):
    """One of each kind of layer that has its own way in the Opacus engine."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.pixels, self.norm = nn.Embedding(20, 6), nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.along, self.last = nn.Linear(6, 5), nn.Linear(100, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.pixels(self.words(tokens)[:, None])
        return self.last(self.along(torch.relu(self.norm(x))).flatten(1))


def private(
    model: nn.Module, data: TensorDataset, plan: Plan, *, batch: int = 1, optimizer=None, record=None, **options
):
    """(module, optimizer, loss, loader) of an engine with a simulation's key; the optimizer is SGD."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    module, optimizer, *criterion, loader = CorrelatedPrivacyEngine(NoiseKey.simulation(1), record=record).make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=batch), plan=plan, **options
    )
    return module, optimizer, criterion[0] if criterion else nn.CrossEntropyLoss(), loader


PLAN = make_plan(BSR(3), Participation(rounds=6, min_separation=3), clip_norm=0.5, noise_multiplier=1.0)


def train(device: str, mode: str, noise: str) -> Tensor:
    torch.manual_seed(0)
    model = Reader().to(device)
    data = TensorDataset(torch.randint(0, 20, (12, 5)), torch.randint(0, 3, (12,)))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    module, optimizer, loss, loader = private(
        model, data, PLAN, batch=4, optimizer=adam, grad_sample_mode=mode, noise=noise
    )
    for _ in range(2):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as parts:
            for tokens, targets in parts:
                optimizer.zero_grad()
                loss(module(tokens.to(device)), targets.to(device)).backward()
                optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()


def train_in_a_group(device: str, wrapper: str, folder: Path, mode: str = "ghost") -> Tensor:
    """A model that one process trains in `wrapper`: "" is none, "ddp" Opacus'."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 600), nn.Tanh(), nn.Linear(600, 3)).to(device)
    if wrapper == "ddp":
        model = DifferentiallyPrivateDistributedDataParallel(model)
    data = TensorDataset(torch.randn(24, 6), torch.randint(0, 3, (24,)))
    module, optimizer, loss, loader = private(
        model, data, PLAN, batch=4, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        record=folder / f"releases of {wrapper or 'one process'}", accumulation_steps=2, grad_sample_mode=mode,
        assume_independent="rows of linear layers",
    )  # fmt: skip
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss(module(x.to(device)), y.to(device)).backward()
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()
