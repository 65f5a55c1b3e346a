"""A tenth of Fashion-MNIST: so few private examples that many runs fit in an hour, and that noise matters."""

from pathlib import Path

from fedcgd_simulations.models import choose
from fedcgd_simulations.models.small_cnn import tanh_cnn
from fedcgd_simulations.models.softmax import softmax_regression
from fedcgd_simulations.task import Data, Task, classification, split
from fedcgd_simulations.tasks import fashion_mnist


def task(model: str | None, data_dir: Path | None) -> Task:
    """6000 training examples, and the 5000 for validation and 10,000 for test of Fashion-MNIST; a small CNN."""
    factories = {"tanh-cnn": tanh_cnn, "softmax": lambda: softmax_regression(28 * 28, 10)}
    return classification("fashion-mnist-6000", lambda: load(data_dir), choose("fashion-mnist-6000", model, factories))


def load(data_dir: Path | None) -> Data:
    """Pixels in [0, 1], shape (examples, 1, 28, 28)."""
    whole = fashion_mnist.load(data_dir)
    train, _ = split(whole.train, 6000, seed=1)
    return Data(train, whole.validation, whole.test)
