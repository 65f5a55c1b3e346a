"""The tail of a spectrum: a curve through the largest eigenvalues, that stands for those that are too many to compute."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class PowerLaw:
    """log μ_i = C·log(p/i)^α + log μ_p for i = 1 … p: eq. 4 of Gu et al., 2026, arXiv:2510.05416.

    `scale` is C, `exponent` α, `count` p, and `smallest` μ_p, the smallest eigenvalue that is cared for.
    """

    scale: float
    exponent: float
    count: int
    smallest: float

    def __call__(self, positions: NDArray[np.integer] | Vector) -> Vector:
        """μ_i at `positions` i, counted from 1; 0 behind the last."""
        i = np.asarray(positions, np.float64)
        falls = np.log(np.maximum(self.count / i, 1.0))
        return np.where(i <= self.count, self.smallest * np.exp(self.scale * falls**self.exponent), 0.0)


def blocks(first: int, last: int, most: int = 400) -> tuple[Vector, Vector]:
    """(first position, number of positions) of at most `most` blocks that the positions `first` … `last` fall into.

    They grow with the position, so that a curve on a log-log scale loses little if a block is given one value.
    """
    edges = np.unique(np.geomspace(first, last + 1, min(most, last + 1 - first) + 1).round())
    return edges[:-1], np.diff(edges)


def fit_power_law(largest: Vector, *, count: int, smallest: float) -> PowerLaw:
    """The curve through the `largest` eigenvalues (falling, positions 1 … k) that ends at `smallest` in position `count`.

    C and α by least squares on log μ. Raises ValueError for less than two eigenvalues, or some that are not above `smallest`.
    """
    values = np.asarray(largest, np.float64)
    if len(values) < 2 or not smallest > 0 or not np.all(values > smallest):
        raise ValueError(f"a curve goes through at least two eigenvalues, all above {smallest}, got {values}")
    if count <= len(values):
        raise ValueError(f"a tail has more than the {len(values)} positions that are known, got {count}")
    falls = np.log(np.log(count / np.arange(1, len(values) + 1)))
    heights = np.log(values / smallest)
    # log of the height is a straight line in α and log C: its least squares is where to start.
    slope, offset = np.polyfit(falls, np.log(heights), 1)

    def residuals(parameters: Vector) -> Vector:
        return np.asarray(np.exp(parameters[1] + parameters[0] * falls) - heights)

    bounds = ([1e-3, -np.inf], [np.inf, np.inf])  # a curve that falls
    found = least_squares(residuals, [max(slope, 1e-2), offset], bounds=bounds).x
    return PowerLaw(float(np.exp(found[1])), float(found[0]), count, smallest)
