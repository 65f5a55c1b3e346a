"""The loss that recipes are compared on: a quadratic, by a spectrum of public data or by the power law of a typical model."""

from dataclasses import dataclass

import numpy as np

from fedcgd.curvature.spectrum import Spectrum
from fedcgd.mechanisms.mechanism import Vector

DIRECTIONS = 600
LARGEST = 0.22
ENERGY = 0.26
ENERGY_DECAY = 0.92
"""The typical landscape: DIRECTIONS of curvature LARGEST/i, in which a loss of ENERGY·i^−ENERGY_DECAY is to be won, for updates
clipped to norm 1. Found by trying them on eleven sets and two networks (docs/guides/planning.md); the order of recipes depends on
them little, the learning rate by a factor of two or three."""

_EXACT = 8  # directions that are counted one by one; the others are put together, more and more of them
_BINS = 16


@dataclass(frozen=True)
class Landscape:
    """½·Σ_i counts_i·μ_i·e_i² with `eigenvalues` μ_i, where at the start μ_i·e_i² = `energies[i]`; updates have norm up to 1."""

    eigenvalues: Vector
    counts: Vector
    energies: Vector

    @staticmethod
    def typical() -> "Landscape":
        """That of a typical model, by power laws; directions that are much alike are put together."""
        further = np.unique(np.geomspace(_EXACT + 1, DIRECTIONS + 1, _BINS).round())
        borders = np.concatenate([np.arange(1.0, _EXACT + 1), further])
        first, counts = borders[:-1], np.diff(borders)
        middle = np.sqrt(first * (first + counts - 1))
        return Landscape(LARGEST / middle, counts, ENERGY * middle**-ENERGY_DECAY)

    @staticmethod
    def of(spectrum: Spectrum) -> "Landscape":
        """That of a model whose spectrum was measured on public data, with the clip norm as the unit of its gradients."""
        values, counts = spectrum.arrays()
        rank = np.cumsum(counts) - (counts - 1) / 2
        return Landscape(values, counts, ENERGY * rank**-ENERGY_DECAY)
