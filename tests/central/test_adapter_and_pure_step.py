"""A run through Opacus' hooks and through the pure step: the same batches, the same noise, the same gradients to rounding."""

import pytest
import torch
from plans import make_plan
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fedcgd import DPSGD, BandInvMF, LambdaCGD, NoiseKey, Participation
from fedcgd.central import PrivateGradient
from fedcgd.opacus import CorrelatedPrivacyEngine

ROUNDS, STEPS, EXAMPLES = 12, 6, 48
MECHANISMS = {"lambda": LambdaCGD(0.7), "banded": BandInvMF((1.0, -0.5, -0.1)), "independent": DPSGD()}
SAMPLINGS = {
    "none": {"min_separation": STEPS},
    "balls-in-bins": {"min_separation": STEPS, "sampling": "balls-in-bins"},
    "random-allocation": {"max_participations": 2, "sampling": "random-allocation"},
    "poisson": {"sampling": "poisson", "sampling_rate": 1 / STEPS},
    "cyclic-poisson": {"min_separation": 3, "sampling": "cyclic-poisson", "sampling_rate": 0.5},
    "b-min-sep": {"min_separation": 4, "sampling": "b-min-sep", "sampling_rate": 1 / 3},
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mechanism", "sampling"),
    [*((m, "none") for m in MECHANISMS), *(("independent", s) for s in SAMPLINGS if s != "none")],
)
def test_they_train_the_same_model(mechanism, sampling):
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(EXAMPLES, 1, 6, 6, generator=generator), torch.arange(EXAMPLES) % 3
    data = TensorDataset(inputs, targets)
    participation = Participation(rounds=ROUNDS, **SAMPLINGS[sampling])
    plan = make_plan(MECHANISMS[mechanism], participation, clip_norm=0.4, noise_multiplier=1.1, delta=1e-3)
    pure, adapted = network(), network()
    ours = torch.optim.SGD(pure.parameters(), lr=0.3, momentum=0.5)
    step = PrivateGradient(pure, cross_entropy, data, plan, key=NoiseKey.simulation(7))
    module, theirs, loader = CorrelatedPrivacyEngine(NoiseKey.simulation(7)).make_private(
        module=adapted, optimizer=torch.optim.SGD(adapted.parameters(), lr=0.3, momentum=0.5),
        data_loader=DataLoader(data, batch_size=EXAMPLES // STEPS), plan=plan,
    )  # fmt: skip
    rounds = 0
    for _ in range(ROUNDS // STEPS):
        for batch, labels in loader:
            theirs.zero_grad()
            cross_entropy(module(batch), labels).backward()
            theirs.step()
            step()
            ours.step()
            rounds += 1
            for one, other in zip(pure.parameters(), adapted.parameters(), strict=True):
                torch.testing.assert_close(one, other, atol=2e-4 * rounds, rtol=0)
    assert rounds == step.round == ROUNDS
    assert (
        max(float((p - q).abs().max()) for p, q in zip(pure.parameters(), network().parameters(), strict=True)) > 0.05
    )
