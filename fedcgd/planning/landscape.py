"""The loss that recipes are compared on: a quadratic, by a spectrum of public data, by the size of a linear model, or typical."""

import math
from dataclasses import dataclass

import numpy as np

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.quadratic import Spectrum

DIRECTIONS = 600
LARGEST = 0.6
DECAY = 2.25
ENERGY = 0.33
ENERGY_DECAY = 1.8
"""The typical landscape: DIRECTIONS of curvature LARGEST·i^−DECAY, in which a loss of ENERGY·i^−ENERGY_DECAY is to be won, for
updates clipped to norm 1. Found by trying them on 35 networks and 17 linear models (docs/guides/planning.md)."""

DEEP = 2.0
"""A network with two hidden layers or more is as much more sensitive to its weights: so much smaller are its best rates."""

_INPUT_DECAY = 0.8
_LINEAR_ENERGY = 0.75
_LINEAR_ENERGY_DECAY = 0.95
"""Of a linear model: direction i of the inputs has a share ∝ i^−_INPUT_DECAY of their square norm; of the loss log(classes),
_LINEAR_ENERGY can be won, in parts ∝ i^−_LINEAR_ENERGY_DECAY. Found by trying on eleven
sets; what they are matters little (docs/guides/planning.md)."""

_SPECTRUM_ENERGY, _SPECTRUM_ENERGY_DECAY = 0.26, 0.92
"""Of a measured spectrum: the loss that is to be won in its directions, _SPECTRUM_ENERGY·i^−_SPECTRUM_ENERGY_DECAY."""

_EXACT = 8  # directions that are counted one by one; the others are put together, more and more of them
_BINS = 16


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
        middle, counts = _directions(DIRECTIONS)
        scale = DEEP if deep else 1.0
        return Landscape(scale * LARGEST * middle**-DECAY, counts, ENERGY / scale * middle**-ENERGY_DECAY)

    @staticmethod
    def linear(model: LinearModel) -> "Landscape":
        """That of softmax regression at its start: the inputs' second moments over the classes, once for each class but one.

        What all inputs have in common, the bias and a mean, bends the loss most, and nothing is to be won there.
        """
        middle, counts = _directions(model.features)
        inputs, energies = middle**-_INPUT_DECAY, middle**-_LINEAR_ENERGY_DECAY
        shared, others = model.mean_share, model.classes - 1
        own = (1 - shared) * inputs / (inputs @ counts)
        won = _LINEAR_ENERGY * math.log(model.classes) / others * energies / (energies @ counts)
        return Landscape(
            np.concatenate([[1 + shared], own]) / model.classes,
            np.concatenate([[1.0], counts]) * others,
            np.concatenate([[0.0], won]),
        )

    @staticmethod
    def from_spectrum(spectrum: Spectrum) -> "Landscape":
        """That of a model whose spectrum was measured on public data, with the clip norm as the unit of its gradients."""
        values, counts = spectrum.arrays()
        rank = np.cumsum(counts) - (counts - 1) / 2
        return Landscape(values, counts, _SPECTRUM_ENERGY * rank**-_SPECTRUM_ENERGY_DECAY)


def _directions(count: int) -> tuple[Vector, Vector]:
    """(i, how many) for `count` directions, of which those that are much alike are put together."""
    further = (
        np.unique(np.geomspace(_EXACT + 1, count + 1, _BINS).round()) if count > _EXACT else np.array([count + 1.0])
    )
    borders = np.unique(np.concatenate([np.arange(1.0, min(_EXACT, count) + 1), further]))
    first, counts = borders[:-1], np.diff(borders)
    return np.sqrt(first * (first + counts - 1)), counts
