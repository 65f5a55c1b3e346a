"""A user's update, clipped and on the grid."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcgd.clipping import ROUNDING, clip, clip_factor
from fedcgd.native.vector_kernels import CHUNK, aligned, kernels, squared_distance
from fedcgd.noise.quantisation import Integers, Lattice
from fedcgd.support.numbers import as_positive
from fedcgd_flower.layout import Flat

Steps = NDArray[np.signedinteger[Any]]
"""32-bit or 64-bit integers."""


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """How a round's updates become integers: divided by `update_scale`, clipped to `clip_norm`, rounded towards zero to `grid`.

    With an `indicator`, each has one entry more, which says whether the update was within the norm: `indicator` steps if it was,
    −`indicator` if it was scaled. Raises ValueError for numbers that bound nothing: divided by −1, every norm is below the bound.
    """

    clip_norm: float
    grid: Lattice
    update_scale: float = 1.0
    indicator: int = 0

    def __post_init__(self) -> None:
        as_positive("the clip norm", self.clip_norm)
        as_positive("the scale of updates", self.update_scale)
        if self.indicator < 0:
            raise ValueError(f"the indicator must be at least 0, got {self.indicator!r}")

    @property
    def norm(self) -> float:
        """The most that one user adds to the sum, all coordinates together."""
        return math.hypot(self.clip_norm, self.indicator * self.grid.step)

    def size(self, parameters: int) -> int:
        """Coordinates of the sum, for a model of so many parameters."""
        return parameters + bool(self.indicator)

    def within(self, total: Steps, parameters: int, users: int) -> bool:
        """Whether `total`, as computed in float64, is no longer than sums of so many users' vectors are."""
        steps = total[:parameters].astype(np.float64)
        return self.is_short(float(steps @ steps), total[parameters:], users)

    def is_short(self, squares: float, counted: Steps, users: int) -> bool:
        """`within`, of an update whose computed squared norm is `squares` and whose further entries are `counted`.

        In float64, with u = 2⁻⁵³: a number that became a float is off by a factor 1 ± u, its square by (1 ± u)³, and a sum of
        n ≤ 2¹⁶ squares, whatever the order, by (1 ± u)ⁿ⁻¹ more, as are the sums of at most 2²⁴ of these by (1 ± u)^(2²⁴). All
        terms are positive, so up to 2⁴⁰ numbers the result is at least (1 − 2⁻²⁷) times the true square of the norm: if it is at
        most (1 − 2⁻²³)·bound², as computed (another 2⁻⁴⁹), the true one is below bound². Nothing overflows: the sum stays below
        2⁴⁰·2¹²⁶. An honest sum, clipped to (1 − `ROUNDING`)·bound with `ROUNDING` = 2⁻²², passes.
        """
        bound, most = users * self.clip_norm / self.grid.step, users * self.indicator
        return squares <= (1 - ROUNDING / 2) * bound**2 and bool(((counted <= most) & (counted >= -most)).all())

    def bounded(self, total: Steps, parameters: int, users: int) -> Integers:
        """`total`, made no longer than sums of so many users' vectors are: the update, and what is counted, each by itself."""
        update, counted = total[:parameters], total[parameters:].astype(np.int64)
        most = users * self.indicator
        bounded = self.grid.to_steps(clip(self.grid.from_steps(update), users * self.clip_norm))
        return np.append(bounded, np.clip(counted, -most, most)) if self.indicator else bounded


def clipped_update(trained: Flat, model: Flat, clipping: Clipping) -> Steps | None:
    """clip((`trained` − `model`) / scale, norm) in steps of the grid, rounded towards zero; shape (d,), 64-bit.

    None if the update is not finite. Guarantee: step times the result has norm at most the clip norm (without the indicator's
    entry), for every input: the norm is off by at most 2⁻²⁹ of itself, the factor aims 2⁻²² below the bound, and rounding towards
    zero makes no entry larger.
    """
    trained, model = aligned(trained), aligned(model)
    squares = squared_distance(trained, model)
    if not math.isfinite(squares):
        return None
    steps: Steps = np.empty(clipping.size(len(model)), np.int64)
    scale, work = clipping.update_scale, kernels()
    factor = clip_factor(math.sqrt(squares) / scale, clipping.clip_norm)
    for start in range(0, len(model), CHUNK):
        part = slice(start, min(start + CHUNK, len(model)))
        work.steps(trained[part], model[part], factor / scale, 1 / clipping.grid.step, steps[part])
    if clipping.indicator:
        steps[-1] = clipping.indicator if factor == 1 else -clipping.indicator
    return steps
