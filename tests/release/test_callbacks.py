"""`on_release` of central training: after each release, with ε so far; and the tools that it can show it in."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedcgd import LambdaCGD, NoiseKey, Participation, Plan
from fedcgd.central import PrivateGradient
from fedcgd.opacus import CorrelatedPrivacyEngine
from fedcgd.release import CentralRelease, to_mlflow, to_tensorboard, to_wandb

DATA = TensorDataset(torch.randn(40, 3), torch.zeros(40, dtype=torch.long))
PLAN = Plan.calibrated(LambdaCGD(0.5), Participation(rounds=8, min_separation=4), clip_norm=1.0, epsilon=4, delta=1e-5)


def check(told: list[CentralRelease]) -> None:
    assert [event.release for event in told] == list(range(1, 9))
    spent = [event.metrics["epsilon"] for event in told]
    assert spent == sorted(spent)
    for event in told:
        assert event.metrics["epsilon"] >= PLAN.guarantee(released=event.release).epsilon * (1 - 1e-9)
        assert event.metrics["delta"] == 1e-5
    assert spent[-1] == pytest.approx(4, rel=1e-2)


def test_the_pure_step_tells_of_each_release() -> None:
    told: list[CentralRelease] = []
    model = nn.Linear(3, 2)
    step = PrivateGradient(
        model, nn.functional.cross_entropy, DATA, PLAN, key=NoiseKey.simulation(0), on_release=told.append
    )
    for _ in range(8):
        step()
    check(told)


def test_the_engine_tells_of_each_release_once_the_model_has_moved() -> None:
    told: list[CentralRelease] = []
    models = []
    model = nn.Linear(3, 2)

    def keep(event: CentralRelease) -> None:
        told.append(event)
        models.append(model.weight.detach().clone())

    begun = model.weight.detach().clone()
    module, optimizer, loader = CorrelatedPrivacyEngine(NoiseKey.simulation(0), on_release=keep).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(DATA, batch_size=10),
        plan=PLAN,
    )
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs), targets).backward()
            assert len(told) < 8
            optimizer.step()
    check(told)
    assert not torch.equal(begun, models[0])
    assert torch.equal(models[-1], model.weight)


class Tool:
    """Keeps what it is called with, under the signatures of SummaryWriter, a W&B run and the module mlflow."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.kept.append((tag, scalar_value, global_step))

    def log(self, data: dict[str, float], step: int) -> None:
        self.kept += [(name, value, step) for name, value in data.items()]

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.log(metrics, step)


@pytest.mark.parametrize("show", [to_tensorboard, to_wandb, to_mlflow])
def test_each_tool_gets_the_metrics_under_the_number_of_the_release(show) -> None:
    tool, event = Tool(), CentralRelease(release=3, plan=PLAN)
    show(tool)(event)
    assert tool.kept == [("epsilon", event.metrics["epsilon"], 3), ("delta", 1e-5, 3)]


def test_guarantees_and_plans_are_tables_in_notebooks_with_all_that_an_epsilon_needs() -> None:
    for html in (PLAN._repr_html_(), PLAN.guarantee()._repr_html_()):
        for name in ("ε", "δ", "adjacency", "sampling", "method"):
            assert f"<th>{name}</th>" in html
    assert "<th>condition</th>" in PLAN.guarantee(released=3)._repr_html_()
    assert "<th>ε</th><td>∞</td>" in replace(PLAN, noise_multiplier=0)._repr_html_()
