"""The loss that recipes are compared on: a quadratic, by a spectrum of public data, by the size of a linear model, or typical."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.planning.rules import RULES
from fedcgd.quadratic import Spectrum

_LAWS = RULES.landscapes


@dataclass(frozen=True, kw_only=True)
class LinearModel:
    """What is public of softmax regression, or of a linear layer on frozen features, for inputs of norm about 1 and a bias.

    Args:
        classes: how many outputs.
        features: how many inputs.
        mean_share: the part that the inputs' mean has of their square norm: 0 after standardising, 0.7 to 0.9 for raw pixels.
            `private_mean` finds it of private inputs, within the budget.
        shares: the part that each direction has of the inputs' square norm about their mean, the largest first; default: 1/i of
            the first for the i-th. `of_public_inputs` measures it.

    Raises:
        ValueError: for fewer than two classes, no feature, a mean_share that is not in [0, 1), and shares that are not one for
            each feature.
    """

    classes: int
    features: int
    mean_share: float = 0.0
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name, least in (("classes", 2), ("features", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")
        if not 0 <= self.mean_share < 1:
            raise ValueError(
                f"mean_share must be at least 0 and below 1, got {self.mean_share}: 0 for standardised inputs, 0.7 for pixels"
            )
        if self.shares is not None and len(self.shares) != self.features:
            raise ValueError(f"shares must be one for each of the {self.features} features, got {len(self.shares)}")

    @staticmethod
    def of_public_inputs(inputs: ArrayLike, *, classes: int) -> "LinearModel":
        """That of inputs like these, which must be nobody's private data: their mean and their directions are looked at.

        Args:
            inputs: shape (examples, features), scaled here to norm 1; a thousand tell the first hundred directions.
            classes: how many outputs.

        Raises:
            ValueError: for another shape, fewer than two examples, numbers that are not finite, and inputs that are all alike.
        """
        rows = np.asarray(inputs, np.float64)
        if rows.ndim != 2 or len(rows) < 2 or not np.isfinite(rows).all():
            raise ValueError(
                f"public inputs must be finite numbers of shape (examples, features), two examples at least, got {rows.shape}"
            )
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(float).tiny)
        rows = rows - rows.mean(0)
        within = np.linalg.eigvalsh(rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows)[::-1].clip(min=0)
        mean_share = 1 - float(within.sum()) / len(rows)
        if mean_share > 1 - 1e-9:
            raise ValueError(f"public inputs must differ from each other, got {len(rows)} that are all alike")
        shares = np.zeros(rows.shape[1])
        shares[: len(within)] = within / within.sum()
        return LinearModel(classes=classes, features=len(shares), mean_share=mean_share, shares=tuple(shares.tolist()))


@dataclass(frozen=True)
class Landscape:
    """½·Σ_i counts_i·μ_i·e_i² with `eigenvalues` μ_i, where at the start μ_i·e_i² = `energies[i]`; updates have norm up to 1."""

    eigenvalues: Vector
    counts: Vector
    energies: Vector

    @staticmethod
    def typical(*, deep: bool = False) -> "Landscape":
        """That of a typical model, by power laws; a deep one ends as well, at smaller rates."""
        middle, counts = _directions(_LAWS.directions)
        scale = _LAWS.deep if deep else 1.0
        (largest, decay), (energy, energy_decay) = _LAWS.curvature, _LAWS.energy
        return Landscape(scale * largest * middle**-decay, counts, energy / scale * middle**-energy_decay)

    @staticmethod
    def linear(model: LinearModel) -> "Landscape":
        """That of softmax regression at its start: the inputs' second moments over the classes, once for each class but one.

        What all inputs have in common, the bias and a mean, bends the loss most, and nothing is to be won there. The gradient of
        an example is as long as its inputs with the bias, √2, times its residual, √(1 − 1/classes) at the start. With more than
        two classes all of them are clipped: as if the loss were so much flatter, while the noise stays what it is.
        """
        middle, counts = _directions(model.features)
        energy, decay = _LAWS.linear_energy
        inputs, energies = middle**-_LAWS.input_decay, middle**-decay
        if model.shares is not None:
            inputs = np.add.reduceat(model.shares, np.cumsum(counts.astype(int)) - counts.astype(int)) / counts
        shared, others = model.mean_share, model.classes - 1
        clipped = 1 / math.sqrt(2 * others / model.classes)
        own = (1 - shared) * inputs / (inputs @ counts)
        won = clipped * energy * math.log(model.classes) / others * energies / (energies @ counts)
        return Landscape(
            clipped * np.concatenate([[1 + shared], own]) / model.classes,
            np.concatenate([[1.0], counts]) * others,
            np.concatenate([[0.0], won]),
        )

    @staticmethod
    def from_spectrum(spectrum: Spectrum) -> "Landscape":
        """That of a model whose spectrum was measured on public data, with the clip norm as the unit of its gradients."""
        values, counts = spectrum.arrays()
        rank = np.cumsum(counts) - (counts - 1) / 2
        energy, decay = _LAWS.spectrum_energy
        return Landscape(values, counts, energy * rank**-decay)


def _directions(count: int) -> tuple[Vector, Vector]:
    """(i, how many) for `count` directions, of which those that are much alike are put together."""
    exact, groups = _LAWS.counted
    further = (
        np.unique(np.geomspace(exact + 1, count + 1, groups).round()) if count > exact else np.array([count + 1.0])
    )
    borders = np.unique(np.concatenate([np.arange(1.0, min(exact, count) + 1), further]))
    first, counts = borders[:-1], np.diff(borders)
    return np.sqrt(first * (first + counts - 1)), counts
