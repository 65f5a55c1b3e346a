"""The loss that recipes are compared on: a quadratic, by a spectrum of public data, by the size of a linear model, or typical."""

import math
from dataclasses import dataclass

import numpy as np

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

    Raises:
        ValueError: for fewer than two classes, no feature, and a share that is not in [0, 1).
    """

    classes: int
    features: int
    mean_share: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("classes", 2), ("features", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")
        if not 0 <= self.mean_share < 1:
            raise ValueError(
                f"mean_share must be at least 0 and below 1, got {self.mean_share}: 0 for standardised inputs, 0.7 for pixels"
            )


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
