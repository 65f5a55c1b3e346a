"""The model, the data of each node, training and testing."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TEST_EXAMPLES = 297  # held out on the server; the other 1500 are the nodes'


class Net(nn.Module):
    """A small convolutional network for 8 × 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.norm(self.conv(images))))
        logits: Tensor = self.head(x.flatten(1))
        return logits


def load_examples() -> TensorDataset:
    """All digits, always in the same random order, with pixels in [0, 1]."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    return TensorDataset(images[order], torch.tensor(digits.target)[order])


def load_test_data() -> DataLoader:
    """The examples of the server."""
    return DataLoader(TensorDataset(*load_examples()[:TEST_EXAMPLES]), batch_size=64)


def load_data(partition_id: int, num_partitions: int) -> tuple[DataLoader, DataLoader]:
    """The training and the validation examples of a node."""
    images, labels = (part[TEST_EXAMPLES + partition_id :: num_partitions] for part in load_examples().tensors)
    split = len(labels) * 4 // 5
    train = DataLoader(TensorDataset(images[:split], labels[:split]), batch_size=32, shuffle=True)
    return train, DataLoader(TensorDataset(images[split:], labels[split:]), batch_size=32)


def train(net: nn.Module, loader: DataLoader, epochs: int, learning_rate: float) -> float:
    """Train `net` in place; the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate, momentum=0.9)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """(mean loss, accuracy) of `net`."""
    net.eval()
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            outputs = net(images)
            loss += nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
            correct += int((outputs.argmax(1) == labels).sum())
            count += len(labels)
    return loss / count, correct / count
