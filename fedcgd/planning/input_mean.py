"""What private inputs have in common, found within the budget: one noised sum, and the ε that is left for training."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcgd.accounting import gaussian
from fedcgd.mechanisms import DPSGD
from fedcgd.noise.keys import NoiseKey
from fedcgd.participation import Participation
from fedcgd.plan import Plan
from fedcgd.release import array_noise, lattice_of

_STREAM = "mean of the inputs"
_BELOW = 1e-9  # so far below norm 1 rows are scaled, and ε is left: more than rounding is


@dataclass(frozen=True, eq=False)
class PrivateMean:
    """A mean with noise, and what it cost.

    Attributes:
        mean: of the inputs, each scaled to norm 1, shape (features,). Subtract it from inputs of norm 1, and scale them again.
        share: the part that the mean has of the inputs' square norm, for `LinearModel(mean_share=…)`: between 0 and 1.
        plan: what was released. Adjacency: zero out one user.
        epsilon_left: what training without a secret sampling may spend at the same δ: both together cost the ε that was given.
    """

    mean: NDArray[np.float64]
    share: float
    plan: Plan
    epsilon_left: float


def mean_plan(*, epsilon: float, delta: float, part: float) -> tuple[Plan, float]:
    """What `private_mean` releases, and the ε that training has left at the same δ. Nothing of it depends on the inputs.

    Args:
        epsilon: of the mean and training together.
        delta: of the mean and training together.
        part: of the budget that the mean has, between 0 and 1.

    Raises:
        ValueError: for numbers out of range.
    """
    if not 0 < part < 1:
        raise ValueError(f"part must be between 0 and 1, got {part}")
    whole = gaussian.sigma(epsilon=epsilon, delta=delta)
    plan = Plan(
        mechanism=DPSGD(), participation=Participation(rounds=1), clip_norm=1.0,
        noise_multiplier=whole / math.sqrt(part), delta=delta,
    )  # fmt: skip
    return plan, gaussian.epsilon(sigma=whole / math.sqrt(1 - part), delta=delta) * (1 - _BELOW)


def private_mean(
    inputs: NDArray[np.floating], *, epsilon: float, delta: float, key: NoiseKey, part: float = 0.05
) -> PrivateMean:
    """The mean of private inputs with noise, for a part of a run's budget.

    Both the sum and training are Gaussian mechanisms, and 1/σ² adds up over them exactly: `part` of it goes to the sum. (Dong,
    Roth and Su, "Gaussian Differential Privacy", 2022, arXiv:1905.02383, Corollary 2.) Under a secret sampling training's ε adds
    up otherwise, and `epsilon_left` is not for it.

    Args:
        inputs: one row for each user, shape (users, features); the number of users is public, as in a plan. A row that is not
            finite counts as zeros.
        epsilon: of the mean and training together.
        delta: of the mean and training together.
        key: of this run. The noise is bound to the sum, so that no two sums share it.
        part: of the budget, between 0 and 1.

    Raises:
        ValueError: for another shape, and numbers out of range.
    """
    if np.ndim(inputs) != 2 or not len(inputs):
        raise ValueError(f"inputs must have a row for each user, got shape {np.shape(inputs)}")
    plan, left = mean_plan(epsilon=epsilon, delta=delta, part=part)
    users, features = inputs.shape
    lattice = lattice_of(plan, features)
    total = np.zeros(features, np.int64)
    for row in inputs:
        values = np.asarray(row, np.float64)
        largest = np.abs(values).max(initial=0.0)
        if 0 < largest < math.inf:  # NaN is neither
            values = values / largest
            total += lattice.to_steps(values * ((1 - _BELOW) / np.linalg.norm(values)))
    array_noise(plan, key, _STREAM, lattice).add(total, earlier=(), attempt=0)
    mean = lattice.from_steps(total) / users
    noise = features * (plan.stddev / users) ** 2
    return PrivateMean(mean, float(np.clip(mean @ mean - noise, 0, 1)), plan, left)
