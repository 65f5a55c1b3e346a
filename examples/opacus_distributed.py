"""Opacus' training on several devices with correlated noise: what differs from one process is marked by `# several`.

torchrun --nproc-per-node 2 examples/opacus_distributed.py --folder run
"""

import argparse
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedcgd import NoiseKey
from fedcgd.opacus import CorrelatedPrivacyEngine

EPOCHS, BATCH, PARTS = 10, 60, 4


def main() -> None:
    """Train a small network on handwritten digits, one user an image, in all processes that torchrun has started."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--folder", type=Path, required=True, help="key, record and checkpoint; the same for all processes"
    )
    folder: Path = parser.parse_args().folder
    dist.init_process_group(
        "gloo", timeout=timedelta(minutes=5)
    )  # several: "nccl" on GPUs, after torch.cuda.set_device

    torch.manual_seed(0)
    inputs, targets = map(torch.tensor, load_digits(return_X_y=True))
    inputs = (inputs / 16).float()
    train, test = slice(0, 1500), slice(1500, None)  # the whole data set in each process: the engine splits the batches

    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    model = DifferentiallyPrivateDistributedDataParallel(model)  # several
    key = NoiseKey.from_file(folder / "noise.key", create=True)  # several: the same key in each
    engine = CorrelatedPrivacyEngine(key, record=folder / "releases")  # several: each release is there before its noise
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
        data_loader=DataLoader(TensorDataset(inputs[train], targets[train]), batch_size=BATCH // PARTS),
        accumulation_steps=PARTS,  # several: a round's batch comes in four parts, whatever the number of processes
        mechanism="lambda-cgd",
        sampling="none",
        target_epsilon=4.0,
        target_delta=1e-5,
        epochs=EPOCHS,
        max_grad_norm=1.0,
    )
    if (folder / "checkpoint").exists():
        engine.load_checkpoint(path=folder / "checkpoint", module=model, optimizer=optimizer)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    steps = len(loader) * ranks // PARTS
    for epoch in range(len(engine.accountant) // steps, EPOCHS):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(inputs[test]).argmax(1) == targets[test]).float().mean()
        if rank == 0:  # several
            engine.save_checkpoint(path=folder / "checkpoint", module=model, optimizer=optimizer)
            print(
                f"{ranks} processes, epoch {epoch + 1:2}: test accuracy {accuracy:.3f}, ε so far {engine.get_epsilon(1e-5):.2f}"
            )
    if rank == 0:
        print(engine.accountant.plan.mechanism, engine.accountant.plan.guarantee())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
