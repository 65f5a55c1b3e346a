"""Invariant: whatever an engine releases is on its account: a second model ends the run of the first."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedcgd import LambdaCGD, NoiseKey
from fedcgd.opacus import CorrelatedPrivacyEngine


def step(module, optimizer, loader) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()


def test_an_engine_accounts_for_one_model() -> None:
    data = TensorDataset(torch.randn(12, 4), torch.zeros(12, dtype=torch.long))
    engine = CorrelatedPrivacyEngine(NoiseKey.simulation(3))
    made = []
    for sigma in (0.3, 30.0):
        model = torch.nn.Linear(4, 2)
        made.append(
            engine.make_private(
                module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(data, batch_size=4), mechanism=LambdaCGD(0.5), sampling="none",
                noise_multiplier=sigma, max_grad_norm=1.0, epochs=1, target_delta=1e-5,
            )
        )  # fmt: skip
    (first, optimizer, loader), (second, other, batches) = made
    with pytest.raises(RuntimeError, match="private again"):
        step(first, optimizer, loader)
    step(second, other, batches)
    assert len(engine.accountant) == 3
