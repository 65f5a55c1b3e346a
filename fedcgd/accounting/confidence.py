"""Upper confidence bounds on the mean of draws, valid for every distribution and every sample size.

Betting: if draws X_i in [0, r] have mean at least m, then Π(1 + η(m − X_i)) has expectation at most 1 for every η in [0, 1/r]
that was fixed beforehand; by Markov's inequality it exceeds 1/β with probability at most β. So each m where it does is
refuted (Section 4 of Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", 2020,
arXiv:2010.09686). The error adapts to the variance, and the range costs only r·log(1/β)/n.
"""

import math

import numpy as np
from scipy.optimize import brentq

from fedcgd.mechanisms.mechanism import Vector


def stake(variance: float, largest: float, count: int, failure: float) -> float:
    """The η for `count` draws of about this variance, in [0, `largest`], that makes `radius` smallest."""
    best = math.sqrt(2 * math.log(1 / failure) / (count * variance)) if variance > 0 else math.inf
    return min(best, 0.99 / largest)


def radius(variance: float, largest: float, count: int, failure: float) -> float:
    """About how far above the mean `upper_bound` will be."""
    bet = stake(variance, largest, count, failure)
    return math.log(1 / failure) / (count * bet) + bet * variance / 2


def upper_bound(draws: Vector, largest: float, bet: float, failure: float) -> float:
    """A number that is below the mean of the draws' distribution with probability at most `failure`.

    `draws` are independent, in [0, `largest`]; `bet` does not depend on them and is at most 1/`largest`.
    """
    if not 0 < bet * largest <= 1:
        raise ValueError(f"bet must be in (0, 1/{largest}], got {bet}")
    goal = math.log(1 / failure)

    def excess(mean: float) -> float:
        return float(np.log1p(bet * (mean - draws)).sum()) - goal

    return largest if excess(largest) <= 0 else float(brentq(excess, 0.0, largest, xtol=1e-12 * largest, rtol=1e-12))
