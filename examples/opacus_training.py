"""An Opacus training loop with correlated noise: what differs from stock Opacus is marked by `# fedcgd`.

python examples/opacus_training.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedcgd import NoiseKey  # fedcgd
from fedcgd.opacus import CorrelatedPrivacyEngine  # fedcgd, in place of `from opacus import PrivacyEngine`

EPOCHS, BATCH = 10, 64


def main() -> None:
    """Train a small network on handwritten digits, one user an image, and print its accuracy and its promise."""
    torch.manual_seed(0)
    inputs, targets = map(torch.tensor, load_digits(return_X_y=True))
    inputs = (inputs / 16).float()
    train, test = slice(0, 1500), slice(1500, None)

    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    engine = CorrelatedPrivacyEngine(NoiseKey.generate())  # fedcgd: all noise comes from this secret
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
        data_loader=DataLoader(TensorDataset(inputs[train], targets[train]), batch_size=BATCH),
        mechanism="lambda-cgd",  # fedcgd: chooses λ for this run; "dp-sgd" is what Opacus does
        sampling="none",  # fedcgd: fixed batches; amplification needs "balls-in-bins"
        target_epsilon=4.0,
        target_delta=1e-5,
        epochs=EPOCHS,
        max_grad_norm=1.0,
    )
    for epoch in range(EPOCHS):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(inputs[test]).argmax(1) == targets[test]).float().mean()
        print(f"epoch {epoch + 1:2}: test accuracy {accuracy:.3f}, ε so far {engine.get_epsilon(1e-5):.2f}")
    print(engine.accountant.plan.mechanism, engine.accountant.plan.guarantee())


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
