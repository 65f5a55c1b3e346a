"""Small Opacus runs for tests: an engine with its plan, and the sums of its rounds as they meet their noise."""

import pytest
import torch
from plans import make_plan
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedcgd import LambdaCGD, NoiseKey, Participation
from fedcgd.central.releases import Releases
from fedcgd.opacus import CorrelatedPrivacyEngine
from fedcgd.opacus.rounds import StepError

MODES = ["hooks", "functorch", "ghost"]


def examples(size, *, scale=100.0, seed=2):
    """`size` examples of three classes whose gradients are far longer than 1."""
    generator = torch.Generator().manual_seed(seed)
    inputs = scale * torch.randn(size, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (size,), generator=generator))


def network():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def private(model, loader, *, engine=None, **options):
    """What `make_private` of `engine` returns, without a plan: DP-SGD unless `options` say something else."""
    usual = {"mechanism": "dp-sgd", "sampling": "none", "noise_multiplier": 1.0, "max_grad_norm": 1.0, "epochs": 1}
    usual |= {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "target_delta": 1e-3}
    engine = engine or CorrelatedPrivacyEngine(NoiseKey.simulation(0))
    return engine.make_private(module=model, data_loader=loader, **usual | options)


class Run:
    """An engine, what it made private, and `sums`: of each released round, on the grid, before its noise."""

    def __init__(
        self,
        monkeypatch,
        *,
        data=None,
        size=12,
        batch=4,
        epochs=2,
        clip_norm=1.0,
        model=None,
        mode="hooks",
        key=None,
        rate=0.01,
        everything=False,
        accumulation=1,
        noise_multiplier=1.0,
        record=None,
        optimizer=torch.optim.SGD,
        **options,
    ):
        torch.manual_seed(0)
        self.data = examples(size) if data is None else data
        self.model = nn.Linear(6, 3) if model is None else model
        self.steps = -(-len(self.data) // batch) // accumulation
        self.plan = make_plan(
            LambdaCGD(0.8),
            Participation(rounds=epochs * self.steps, min_separation=self.steps),
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
        )
        self.base = optimizer([p for p in self.model.parameters() if p.requires_grad or everything], lr=rate)
        self.engine = CorrelatedPrivacyEngine(key or NoiseKey.simulation(1), record=record)
        private = self.engine.make_private(
            module=self.model,
            optimizer=self.base,
            data_loader=DataLoader(self.data, batch_size=batch),
            plan=self.plan,
            grad_sample_mode=mode,
            accumulation_steps=accumulation,
            **options,
        )
        self.module, self.optimizer, self.loader = private[0], private[1], private[-1]
        self.loss = private[2] if mode == "ghost" else nn.CrossEntropyLoss()
        self.sums, release = [], Releases.release

        def listening(releases, total, round, rows):
            if releases is self.engine.accountant.rounds.releases:
                self.sums.append(total * releases.step)
            return release(releases, total, round, rows)

        monkeypatch.setattr(Releases, "release", listening)

    @property
    def released(self):
        return self.engine.accountant.released

    def backward(self, batch):
        self.loss(self.module(batch[0]), batch[1]).backward()

    def step(self, batch):
        self.optimizer.zero_grad()
        self.backward(batch)
        self.optimizer.step()

    def train(self, step=None, then=None):
        """One epoch of `step` for each batch, with `then` after it."""
        for batch in self.loader:
            (step or self.step)(batch)
            if then:
                then()

    def norms(self):
        return [float(total.norm()) for total in self.sums]


def refused(*reasons):
    """A context in which a step or a batch is refused for one of these reasons."""
    return pytest.raises(StepError, check=lambda error: error.reason in reasons)
