"""A ready public proxy: labelled arrays, and a linear model or a network with one hidden layer, in NumPy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcgd.planning.rehearsal import Floats, Rehearsal, Rows

_HELD_OUT = 0.25
_FEWEST = 8


@dataclass(frozen=True, eq=False)
class ArrayProxy:
    """A classification of *public* examples: what `rehearse` calls. The score is the accuracy on a quarter that is held out.

    Each input is scaled to norm 1, and each layer has a bias.

    Args:
        inputs: shape (examples, features).
        labels: whole numbers from 0, shape (examples,).
        hidden: units of the hidden layer (ReLU); 0 for softmax regression.

    Raises:
        ValueError: for other shapes or labels, fewer than 8 examples, or inputs that are not finite.
    """

    inputs: NDArray[np.floating]
    labels: NDArray[np.integer]
    hidden: int = 0

    def __post_init__(self) -> None:
        shape, labels = np.shape(self.inputs), np.asarray(self.labels)
        if len(shape) != 2 or shape[0] < _FEWEST or not np.isfinite(self.inputs).all():
            raise ValueError(f"inputs must be finite, in at least {_FEWEST} rows of features, got shape {shape}")
        if labels.shape != shape[:1] or labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() < 1:
            raise ValueError(f"labels must be {shape[0]} whole numbers from 0, of two classes at least")
        if self.hidden < 0:
            raise ValueError(f"hidden must not be negative, got {self.hidden}")

    def __call__(self, rehearsal: Rehearsal) -> float:
        """The accuracy, between 0 and 1, of the last model on the quarter that is held out."""
        order = np.random.default_rng(0).permutation(len(self.inputs))
        x, y = np.asarray(self.inputs, np.float32)[order], np.asarray(self.labels)[order]
        x = _with_ones(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12))
        onehot, examples = np.eye(y.max() + 1, dtype=np.float32)[y], round(len(x) * (1 - _HELD_OUT))

        def gradient(flat: Floats, rows: Rows) -> Floats:
            return _clipped_mean(self._layers(flat, x, onehot), x[rows], onehot[rows])

        last = rehearsal.descend(self._start(rehearsal.seed, x, onehot), gradient, examples)
        _, outputs = _forward(self._layers(last, x, onehot), x[examples:])
        return float((outputs.argmax(1) == y[examples:]).mean())

    def _start(self, seed: int, x: Floats, onehot: Floats) -> Floats:
        """Zeros for a linear model; for a network what keeps outputs of about the inputs' size."""
        if not self.hidden:
            return np.zeros(x.shape[1] * onehot.shape[1], np.float32)
        generator = np.random.default_rng([seed, 1])
        lower = generator.normal(size=(x.shape[1], self.hidden)) * np.sqrt(2)
        upper = generator.normal(size=(self.hidden + 1, onehot.shape[1])) / np.sqrt(self.hidden)
        lower[-1] = upper[-1] = 0
        return np.concatenate([lower.ravel(), upper.ravel()]).astype(np.float32)

    def _layers(self, flat: Floats, x: Floats, onehot: Floats) -> list[Floats]:
        """The parameters as matrices, the biases in the last rows."""
        border = x.shape[1] * self.hidden
        lower = [flat[:border].reshape(x.shape[1], self.hidden)] if self.hidden else []
        return [*lower, flat[border:].reshape(-1, onehot.shape[1])]


def _with_ones(x: Floats) -> Floats:
    return np.hstack([x, np.ones((len(x), 1), np.float32)])


def _forward(layers: list[Floats], x: Floats) -> tuple[Floats, Floats]:
    """What the last layer sees, and the outputs, shape (rows, classes)."""
    seen = x if len(layers) == 1 else _with_ones(np.maximum(x @ layers[0], 0))
    return seen, np.asarray(seen @ layers[-1])


def _clipped_mean(layers: list[Floats], x: Floats, onehot: Floats) -> Floats:
    """The mean of the examples' gradients of the cross entropy, each clipped to norm 1, flat."""
    seen, outputs = _forward(layers, x)
    residuals = np.exp(outputs - outputs.max(1, keepdims=True))
    residuals = residuals / residuals.sum(1, keepdims=True) - onehot
    pairs = [(seen, residuals)]  # a layer's gradients are the outer products of these rows
    if len(layers) > 1:
        pairs.insert(0, (x, (residuals @ layers[1][:-1].T) * (seen[:, :-1] > 0)))
    squares = np.sum([(rows**2).sum(1) * (errors**2).sum(1) for rows, errors in pairs], axis=0)
    scale = (1 / np.maximum(np.sqrt(squares), 1) / len(x))[:, None].astype(np.float32)
    return np.concatenate([(rows.T @ (errors * scale)).ravel() for rows, errors in pairs])
