"""The accountant of random b-min-separation."""

from dataclasses import dataclass
from functools import lru_cache

from fedcgd.accounting.b_min_sep.law import BMinSepLaw
from fedcgd.accounting.profile import without_sampling
from fedcgd.accounting.secret_rounds import SecretRoundsAccountant
from fedcgd.accounting.secret_rounds.columns import columns_of
from fedcgd.accounting.secret_rounds.search import Question
from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.participation import Participation


@dataclass(frozen=True)
class BMinSepAccountant(SecretRoundsAccountant):
    """Runs in which each user tosses a secret coin in each round in which it may take part, for C without negative entries."""

    def _question(self, released: int) -> Question:
        return _question(self.mechanism, self.participation, released)


@lru_cache(maxsize=4)
def _question(mechanism: Mechanism, participation: Participation, released: int) -> Question:
    rate = participation.sampling_rate
    assert rate is not None
    columns = columns_of(mechanism, participation.rounds, participation.min_separation, released)
    law = BMinSepLaw(released, participation.min_separation, rate, participation.warm_start)
    reach = sensitivity(mechanism, without_sampling(participation), released=released).value
    return Question(columns, law, reach)
