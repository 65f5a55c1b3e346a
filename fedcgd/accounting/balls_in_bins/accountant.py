"""The accountant of Balls-in-Bins, for the whole run or its first rounds."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedcgd.accounting.balls_in_bins.gram import bin_gram
from fedcgd.accounting.balls_in_bins.law import BinLaw, Bins
from fedcgd.accounting.bounds import by_norm, largest_singular_value
from fedcgd.accounting.random_participation.accountant import SecretRoundsAccountant
from fedcgd.accounting.random_participation.columns import columns_of
from fedcgd.accounting.random_participation.monte_carlo import Problem
from fedcgd.accounting.sampled import OneOf, Sampled
from fedcgd.mechanisms import Mechanism
from fedcgd.participation import Participation


@dataclass(frozen=True)
class BallsInBinsAccountant(SecretRoundsAccountant):
    """Runs in which each user is in one secret bin of b, for C without negative entries.

    Where bins are independent, as for C = I, the bound without draws is of the law itself.
    """

    def laws(self, released: int) -> tuple[Sampled, ...]:
        return _laws(self.mechanism, self.participation, released)

    def problem(self, sigma: float, released: int) -> Problem | None:
        """None also where no bin overlaps another, as for C = I."""
        gram = _bins(self.mechanism, self.participation, released).gram
        return None if np.count_nonzero(gram) == len(gram) else super().problem(sigma, released)

    def drawn(self, released: int) -> Problem:
        bins = _bins(self.mechanism, self.participation, released)
        return Problem(bins, BinLaw(bins.rounds))


@lru_cache(maxsize=2)
def _bins(mechanism: Mechanism, participation: Participation, released: int) -> Bins:
    """The Gram matrix of the bins, of the first `released` rounds."""
    return Bins(bin_gram(mechanism, participation, released))


@lru_cache(maxsize=8)
def _laws(mechanism: Mechanism, participation: Participation, released: int) -> tuple[Sampled, ...]:
    bins = participation.min_separation
    norm = largest_singular_value(mechanism, columns_of(mechanism, participation.rounds, bins, released))
    whole, rest = divmod(released, bins)
    kinds = ((math.sqrt(whole + 1) * norm, rest), (math.sqrt(whole) * norm, bins - rest))
    return (by_norm(((OneOf(tuple(kind for kind in kinds if kind[1])), 1),)),)
