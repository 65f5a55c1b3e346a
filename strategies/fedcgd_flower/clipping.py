"""A user's update, clipped and on the grid, to a norm that is fixed or follows a quantile of the users' norms.

The norm adapts after Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive Clipping", 2021,
arXiv:1905.03871, for noise that is correlated across rounds. In round t, whose norm ζ_t is a function of earlier releases, user i
contributes the vector

    v_i = (α · clip(u_i, ζ_t) / ζ_t,  ±β/2),   + if ‖u_i‖ ≤ ζ_t and − if not,   α² + β²/4 = 1.

Its norm is at most 1 whatever ζ_t is. The mechanism runs on these vectors with clip norm 1, so its privacy is that of the plan.
What follows is arithmetic on what it released: the first d coordinates times ζ_t / α are the sum of the updates, the last one
tells the share b_t of users within the norm, and ζ_{t+1} = ζ_t · exp(−η(b_t − γ)).
"""

import math
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping:
    """The clip norm goes towards the `quantile` γ of the users' norms, from the plan's `clip_norm` on.

    Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive Clipping", 2021, arXiv:1905.03871.

    Args:
        quantile: γ, between 0 and 1: the share of users whose updates shall be within the norm.
        learning_rate: η, in (0, 2]; a round changes the norm by a factor of at most e^η.
        count_noise: the standard deviation that σZ gives the measured share of users within the norm. The smaller it is, the
            more of the budget goes there: β = σ / (`count_noise` · cohort), and the updates' noise is 1/√(1 − β²/4) times as
            large.

    Raises:
        ValueError: for values out of range.
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise ValueError(f"quantile must be between 0 and 1, got {self.quantile}")
        if not 0 < self.learning_rate <= 2:
            raise ValueError(
                f"learning_rate must be above 0 and at most 2, got {self.learning_rate}; a round changes the norm by up to e to "
                "that power"
            )
        as_positive("count_noise", self.count_noise)

    def to_description(self) -> dict[str, Any]:
        """All settings, as JSON-able values."""
        return asdict(self)

    def indicator_norm(self, noise_multiplier: float, cohort_size: int) -> float:
        """β/2: what the share takes of a user's norm, which is 1 altogether.

        Args:
            noise_multiplier: σ of the plan.
            cohort_size: the users of a round.

        Raises:
            ValueError: if that is more than half of the squared sensitivity, for then the cohort is too small for the noise; and
                without noise, which it is in proportion to.
        """
        if not noise_multiplier:
            raise ValueError(
                "adaptive clipping measures the share of users within the norm as finely as the noise allows, and σ = 0 allows "
                "anything: to debug it take a noise_multiplier of 1e-3"
            )
        half = noise_multiplier / (self.count_noise * cohort_size) / 2
        if half**2 > 0.5:  # of the squared sensitivity: the noise on updates is then √2 times as large
            least = noise_multiplier / math.sqrt(2)
            raise ValueError(
                f"adaptive clipping: with σ = {noise_multiplier:.4g} and {cohort_size} users a round, a share measured to within "
                f"{self.count_noise:g} would take more than half of the squared sensitivity. Take a cohort of at least "
                f"{math.ceil(least / self.count_noise)}, a count_noise of at least {1.01 * least / cohort_size:.3g}, or "
                "a fixed norm"
            )
        return half


def adaptive_round(clip_norm: float, indicator_norm: float, grid: Lattice) -> Clipping:
    """The clipping of a round with norm ζ_t = `clip_norm`, up to rounding to float32, in which nodes divide.

    Updates are divided by ζ_t / α and clipped to α, so that with ±β/2 for the share they make vectors of norm at most 1.
    """
    indicator = int(indicator_norm / grid.step)
    part = math.sqrt(1 - (indicator * grid.step) ** 2)
    return Clipping(clip_norm=part, grid=grid, update_scale=float(np.float32(clip_norm / part)), indicator=indicator)


def share_within(counted: int, clipping: Clipping, cohort_size: int) -> float:
    """The noised share of users within the norm, from the last coordinate of the noised sum, in steps.

    Users who did not answer count as one half each. It may be below 0 or above 1.
    """
    return counted / (2 * clipping.indicator * cohort_size) + 0.5


def next_norm(clip_norm: float, share: float, settings: AdaptiveClipping) -> float:
    """ζ_{t+1} = ζ_t · exp(−η(b_t − γ)); |b_t − γ| counts as at most 1, which is more than any share without noise gives."""
    step = min(max(share - settings.quantile, -1.0), 1.0)
    moved = clip_norm * math.exp(-settings.learning_rate * step)
    return min(max(moved, 1e-20), 1e20)  # what a plan may have
