"""The accountant of random b-min-separation."""

from dataclasses import dataclass
from functools import lru_cache

from fedcgd.accounting.b_min_sep.law import BMinSepLaw
from fedcgd.accounting.bounds import by_blocks, by_coins, largest_singular_value
from fedcgd.accounting.random_participation import SecretRoundsAccountant
from fedcgd.accounting.random_participation.columns import columns_of
from fedcgd.accounting.random_participation.search import Problem
from fedcgd.accounting.sampled import Sampled
from fedcgd.mechanisms import Mechanism
from fedcgd.participation import Participation


@dataclass(frozen=True)
class BMinSepAccountant(SecretRoundsAccountant):
    """Runs in which each user tosses a secret coin in each round in which it may take part, for C without negative entries."""

    def laws(self, released: int) -> tuple[Sampled, ...]:
        return _laws(self.mechanism, self.participation, released)

    def _problem(self, released: int) -> Problem:
        return _problem(self.mechanism, self.participation, released)


@lru_cache(maxsize=4)
def _problem(mechanism: Mechanism, participation: Participation, released: int) -> Problem:
    rate = participation.sampling_rate
    assert rate is not None
    columns = columns_of(mechanism, participation.rounds, participation.min_separation, released)
    law = BMinSepLaw(released, participation.min_separation, rate, participation.warm_start)
    return Problem(columns, law)


@lru_cache(maxsize=8)
def _laws(mechanism: Mechanism, participation: Participation, released: int) -> tuple[Sampled, ...]:
    rate = participation.sampling_rate
    assert rate is not None
    columns = columns_of(mechanism, participation.rounds, participation.min_separation, released)
    found = [by_coins(columns, largest_singular_value(mechanism, columns), rate)]
    if not columns.amplitude and columns.width > 1:
        found.append(by_blocks(columns, [columns.products(lag) for lag in range(1, columns.width)], rate))
    return tuple(found)
