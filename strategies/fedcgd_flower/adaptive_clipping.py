"""A clip norm that follows a quantile of the users' norms, within the privacy that the plan promises.

After Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive Clipping", 2021,
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

from fedcgd.noise.quantisation import Lattice
from fedcgd.support.numbers import as_positive
from fedcgd_flower.update import Clipping


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
                f"{math.ceil(least / self.count_noise)}, a count_noise of at least {_rounded_up(least / cohort_size)}, or "
                "a fixed norm"
            )
        return half


def _rounded_up(value: float) -> float:
    unit: float = 10.0 ** (math.floor(math.log10(value)) - 1)
    return round(math.ceil(value / unit) * unit, 12)


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
