"""The loss that recipes are compared on: a quadratic, by a spectrum of public data, by the size of a linear model, or typical."""

import math
from dataclasses import dataclass, replace

import numpy as np

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.quadratic import Spectrum

DIRECTIONS = 600
LARGEST = 0.22
ENERGY = 0.26
ENERGY_DECAY = 0.92
"""The typical landscape: DIRECTIONS of curvature LARGEST/i, in which a loss of ENERGY·i^−ENERGY_DECAY is to be won, for updates
clipped to norm 1. Found by trying them on eleven sets and two networks (docs/guides/planning.md); the order of recipes depends on
them little, the learning rate by a factor of two or three."""

_INPUT_DECAY = 0.8
_LINEAR_ENERGY = 0.75
_LINEAR_ENERGY_DECAY = 0.95
_SHARED = 0.9
"""Of a linear model: direction i of the inputs has a share ∝ i^−_INPUT_DECAY of their square norm; of the loss log(classes),
_LINEAR_ENERGY can be won, in parts ∝ i^−_LINEAR_ENERGY_DECAY. Of inputs that are not centred, _SHARED is the same for all. Found
by trying on eleven sets; what they are matters little (docs/guides/planning.md)."""

NETWORK_FALL = 4.0
"""Of a network: how many times as large its curvature is in the first round as in the last, by the same factor each round.
Found by trying 2 to 16 on fourteen sets (docs/guides/planning.md)."""

_EXACT = 8  # directions that are counted one by one; the others are put together, more and more of them
_BINS = 16


@dataclass(frozen=True, kw_only=True)
class LinearModel:
    """What is public of softmax regression, or of a linear layer on frozen features, for inputs of norm about 1 and a bias.

    Args:
        classes: how many outputs.
        features: how many inputs.
        centred: whether each input is about zero on average, as after standardising; those of raw pixels are not.

    Raises:
        ValueError: for fewer than two classes, or no feature.
    """

    classes: int
    features: int
    centred: bool = True

    def __post_init__(self) -> None:
        for name, least in (("classes", 2), ("features", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")


@dataclass(frozen=True)
class Landscape:
    """½·Σ_i counts_i·μ_i·e_i² with `eigenvalues` μ_i, where at the start μ_i·e_i² = `energies[i]`; updates have norm up to 1."""

    eigenvalues: Vector
    counts: Vector
    energies: Vector
    fall: float = 1.0
    """How many times as large all curvature is in the first round, from where it falls to `eigenvalues` by the last."""

    @staticmethod
    def typical() -> "Landscape":
        """That of a typical model, by power laws."""
        middle, counts = _directions(DIRECTIONS)
        return Landscape(LARGEST / middle, counts, ENERGY * middle**-ENERGY_DECAY)

    @staticmethod
    def network() -> "Landscape":
        """The typical one, steeper at first: so the noise of late rounds is damped less, and a falling rate is worth more."""
        return replace(Landscape.typical(), fall=NETWORK_FALL)

    @staticmethod
    def linear(model: LinearModel) -> "Landscape":
        """That of softmax regression at its start: the inputs' second moments over the classes, once for each class but one.

        What all inputs have in common, the bias and a mean, bends the loss most, and nothing is to be won there.
        """
        middle, counts = _directions(model.features)
        inputs, energies = middle**-_INPUT_DECAY, middle**-_LINEAR_ENERGY_DECAY
        shared, others = (0.0 if model.centred else _SHARED), model.classes - 1
        own = (1 - shared) * inputs / (inputs @ counts)
        won = _LINEAR_ENERGY * math.log(model.classes) / others * energies / (energies @ counts)
        return Landscape(
            np.concatenate([[1 + shared], own]) / model.classes,
            np.concatenate([[1.0], counts]) * others,
            np.concatenate([[0.0], won]),
        )

    @staticmethod
    def of(spectrum: Spectrum) -> "Landscape":
        """That of a model whose spectrum was measured on public data, with the clip norm as the unit of its gradients."""
        values, counts = spectrum.arrays()
        rank = np.cumsum(counts) - (counts - 1) / 2
        return Landscape(values, counts, ENERGY * rank**-ENERGY_DECAY)


def _directions(count: int) -> tuple[Vector, Vector]:
    """(i, how many) for `count` directions, of which those that are much alike are put together."""
    further = (
        np.unique(np.geomspace(_EXACT + 1, count + 1, _BINS).round()) if count > _EXACT else np.array([count + 1.0])
    )
    borders = np.unique(np.concatenate([np.arange(1.0, min(_EXACT, count) + 1), further]))
    first, counts = borders[:-1], np.diff(borders)
    return np.sqrt(first * (first + counts - 1)), counts
