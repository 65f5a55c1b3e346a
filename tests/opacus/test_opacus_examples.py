"""The programs that Opacus ships as examples, on small data: mnist, cifar10, imdb, char-lstm (dcgan: test_opacus_gan)."""

import pytest
import torch
from opacus.layers import DPLSTM
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fedcgd import NoiseKey
from fedcgd.opacus import CorrelatedPrivacyEngine

EXAMPLES, STEPS, EPOCHS = 32, 4, 2


class TextClassifier(nn.Module):
    """imdb.py: embedded words of a fixed length, their mean, two layers."""

    def __init__(self):
        super().__init__()
        self.emb, self.fc1, self.fc2 = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(self.emb(x).mean(1))))


class CharLSTM(nn.Module):
    """char-lstm-classification.py: characters, a recurrent layer, its last output."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.out = nn.Embedding(30, 8), DPLSTM(8, 12, batch_first=True), nn.Linear(12, 3)

    def forward(self, x):
        return self.out(self.lstm(self.embedding(x))[0][:, -1])


def mnist():
    layers = [nn.Conv2d(1, 4, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(4, 8, 4, 2), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(128, 8), nn.ReLU(), nn.Linear(8, 10))


def cifar10():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)]
    return ModuleValidator.fix(nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 10)))


PROGRAMS = {
    "mnist": (mnist, (1, 28, 28), 10, torch.optim.SGD),
    "cifar10": (cifar10, (3, 16, 16), 10, torch.optim.RMSprop),
    "imdb": (TextClassifier, 20, 2, torch.optim.Adam),
    "char-lstm": (CharLSTM, 9, 3, torch.optim.SGD),
}


@pytest.mark.parametrize(
    ("mechanism", "sampling"), [("dp-sgd", "poisson"), ("lambda-cgd:0.7", "none")], ids=["independent", "correlated"]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_loops_of_opacus_examples_run(name, mechanism, sampling):
    make, shape, classes, optimizer = PROGRAMS[name]
    torch.manual_seed(0)
    inputs = torch.randn(EXAMPLES, *shape) if isinstance(shape, tuple) else torch.randint(1, 30, (EXAMPLES, shape))
    data, model = TensorDataset(inputs, torch.arange(EXAMPLES) % classes), make()
    before = [p.detach().clone() for p in model.parameters()]
    engine = CorrelatedPrivacyEngine(NoiseKey.simulation(1))
    module, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer(model.parameters(), lr=0.05),
        data_loader=DataLoader(data, batch_size=EXAMPLES // STEPS), mechanism=mechanism, sampling=sampling,
        target_epsilon=8.0, target_delta=1e-3, epochs=EPOCHS, max_grad_norm=1.2,
    )  # fmt: skip
    for _ in range(EPOCHS):
        module.train()
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as batches:
            for x, y in batches if name == "cifar10" else loader:
                optimizer.zero_grad()
                functional.cross_entropy(module(x), y).backward()
                optimizer.step()
        module.eval()
        with torch.no_grad():
            assert module(inputs).isfinite().all()
    assert engine.accountant.released == STEPS * EPOCHS
    assert engine.get_epsilon(1e-3) == pytest.approx(8.0, rel=0.02)
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
