"""The accountant of random allocation for C with several bands, of which rounds of neighbouring epochs may overlap."""

import math
from dataclasses import dataclass
from functools import lru_cache

from fedcgd.accounting.accountant import Bound
from fedcgd.accounting.bounds import by_norm, largest_singular_value
from fedcgd.accounting.coverage import too_wide
from fedcgd.accounting.guarantee import WITHOUT_AMPLIFICATION
from fedcgd.accounting.random_allocation.epochs import Epochs, Overlaps
from fedcgd.accounting.random_allocation.law import RandomAllocationLaw
from fedcgd.accounting.random_allocation.one_band import epochs_of
from fedcgd.accounting.sampled import Sampled
from fedcgd.accounting.secret_rounds import SecretRoundsAccountant
from fedcgd.accounting.secret_rounds.columns import columns_of
from fedcgd.accounting.secret_rounds.search import Question
from fedcgd.mechanisms import Mechanism, bandwidth
from fedcgd.participation import Participation


@dataclass(frozen=True)
class BandsAccountant(SecretRoundsAccountant):
    """Runs in which each user takes part in one fresh, secret round of each epoch, of C ≥ 0 with at most as many bands as an
    epoch has rounds.
    """

    def gaussian_mu(self, noise_multiplier: float, released: int) -> Bound:
        question = self._question(released)
        law = Epochs(released, self.participation.spacing)
        reach = math.sqrt(Overlaps.of(question.columns, law).most())
        return Bound(reach / noise_multiplier, WITHOUT_AMPLIFICATION, sensitivity=reach)

    def laws(self, released: int) -> tuple[Sampled, ...]:
        norm = largest_singular_value(self.mechanism, self._question(released).columns)
        return (by_norm(epochs_of(released, self.participation.spacing, norm)),)

    def _question(self, released: int) -> Question:
        return _question(self.mechanism, self.participation, released)


@lru_cache(maxsize=4)
def _question(mechanism: Mechanism, participation: Participation, released: int) -> Question:
    length = participation.spacing
    bands = bandwidth(mechanism, participation.rounds)
    if bands > length:
        raise too_wide(mechanism, participation, bands)
    columns = columns_of(mechanism, participation.rounds, length, released)
    law = RandomAllocationLaw(released, length)
    return Question(columns, law)
