"""Handwritten digits of 8 × 8 pixels, from scikit-learn: small, and always at hand."""

from pathlib import Path

import torch
from sklearn.datasets import load_digits

from fedcgd_simulations.models import choose
from fedcgd_simulations.models.digits_cnn import digits_cnn
from fedcgd_simulations.models.softmax import softmax_regression
from fedcgd_simulations.task import Data, Examples, Task, classification, split


def task(model: str | None, data_dir: Path | None) -> Task:
    """1260 training, 180 validation and 357 test examples; softmax regression, or a small CNN (`tanh-cnn`)."""
    factories = {"softmax": lambda: softmax_regression(64, 10), "tanh-cnn": digits_cnn}
    return classification("digits", load, choose("digits", model, factories))


def load() -> Data:
    """The digits with pixels in [0, 1]; 1260 = 60 · 21 = 140 · 9 training examples fill many sizes of cohort."""
    raw = load_digits()
    inputs = torch.tensor(raw.data / 16, dtype=torch.float32)
    examples = Examples(inputs, torch.tensor(raw.target, dtype=torch.long))
    validation, test, train = split(examples, 180, 357, seed=0)
    return Data(train, validation, test)
