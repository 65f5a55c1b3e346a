"""A small convolutional network with tanh activations, which suit clipped gradients."""

from torch import nn


def tanh_cnn(classes: int = 10) -> nn.Module:
    """Two convolutions and two dense layers for 28 × 28 images of one channel, 26,010 weights for ten classes.

    The architecture of Papernot et al., "Tempered sigmoid activations for deep learning with differential privacy".
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )
