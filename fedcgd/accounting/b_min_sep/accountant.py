"""The accountant of random b-min-separation."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedcgd.accounting.b_min_sep.law import BMinSepLaw
from fedcgd.accounting.bounds import by_blocks, by_coins, largest_singular_value
from fedcgd.accounting.random_participation.accountant import SecretRoundsAccountant
from fedcgd.accounting.random_participation.columns import Columns, columns_of
from fedcgd.accounting.random_participation.monte_carlo import Problem
from fedcgd.accounting.sampled import Sampled
from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.participation import Participation


@dataclass(frozen=True)
class BMinSepAccountant(SecretRoundsAccountant):
    """Runs in which each user tosses a secret coin in each round in which it may take part, for C without negative entries."""

    def laws(self, released: int) -> tuple[Sampled, ...]:
        return _laws(self.mechanism, self.participation, released)

    def drawn(self, released: int) -> Problem:
        return Problem(*_run(self.mechanism, self.participation, released))

    def log_ratio(self, sigma: float, seen: Matrix) -> Vector:
        """log S, which tells best whether a user of the worst kind took part, up to a thousandth; shape (draws,).

        Args:
            sigma: the noise multiplier.
            seen: C·x̂/ζ along the user's direction, shape (n, draws): C·1_P plus noise, or noise alone.
        """
        columns, law = _run(self.mechanism, self.participation, self.participation.rounds)
        likelihood = law.likelihood(columns, sigma)
        return np.asarray(np.log(likelihood.bounds(likelihood.weights(columns.adjoint(seen) / sigma**2))[1]))


@lru_cache(maxsize=4)
def _run(mechanism: Mechanism, participation: Participation, released: int) -> tuple[Columns, BMinSepLaw]:
    rate = participation.sampling_rate
    assert rate is not None  # noqa: S101
    columns = columns_of(mechanism, participation.rounds, participation.min_separation, released)
    return columns, BMinSepLaw(released, participation.min_separation, rate, participation.warm_start)


@lru_cache(maxsize=8)
def _laws(mechanism: Mechanism, participation: Participation, released: int) -> tuple[Sampled, ...]:
    columns, law = _run(mechanism, participation, released)
    found = [by_coins(columns, largest_singular_value(mechanism, columns), law.rate)]
    if not columns.amplitude and columns.width > 1:
        found.append(by_blocks(columns, [columns.products(lag) for lag in range(1, columns.width)], law.rate))
    return tuple(found)
