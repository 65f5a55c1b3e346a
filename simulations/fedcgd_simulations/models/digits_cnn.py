"""A convolutional network for images of 8 × 8 pixels."""

from torch import nn


def digits_cnn(classes: int = 10) -> nn.Module:
    """Two convolutions and two dense layers with tanh between, for 64 pixels in a row: 9258 weights."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )
