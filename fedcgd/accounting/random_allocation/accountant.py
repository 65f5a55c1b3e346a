"""The accountant of random allocation for C with several bands, of which rounds of neighbouring epochs may overlap."""

import math
from dataclasses import dataclass

from fedcgd.accounting.accountant import Bound
from fedcgd.accounting.bounds import by_norm, largest_singular_value
from fedcgd.accounting.coverage import too_wide
from fedcgd.accounting.guarantee import WITHOUT_AMPLIFICATION
from fedcgd.accounting.random_allocation.epochs import Epochs, Overlaps
from fedcgd.accounting.random_allocation.law import RandomAllocationLaw
from fedcgd.accounting.random_allocation.one_band import epochs_of
from fedcgd.accounting.random_participation import SecretRoundsAccountant
from fedcgd.accounting.random_participation.columns import Columns, columns_of
from fedcgd.accounting.random_participation.search import Problem
from fedcgd.accounting.sampled import Sampled


@dataclass(frozen=True)
class BandsAccountant(SecretRoundsAccountant):
    """Runs in which each user takes part in one fresh, secret round of each epoch, of C ≥ 0 with at most as many bands as an
    epoch has rounds.
    """

    def gaussian_mu(self, noise_multiplier: float, released: int) -> Bound:
        law = Epochs(released, self.participation.spacing)
        reach = math.sqrt(Overlaps.from_columns(self._columns(released), law).most())
        return Bound(reach / noise_multiplier, WITHOUT_AMPLIFICATION, sensitivity=reach)

    def laws(self, released: int) -> tuple[Sampled, ...]:
        norm = largest_singular_value(self.mechanism, self._columns(released))
        return (by_norm(epochs_of(released, self.participation.spacing, norm)),)

    def _problem(self, released: int) -> Problem:
        return Problem(self._columns(released), RandomAllocationLaw(released, self.participation.spacing))

    def _columns(self, released: int) -> Columns:
        length, rounds = self.participation.spacing, self.participation.rounds
        bands = self.mechanism.bandwidth(rounds)
        if bands > length:
            raise too_wide(self.mechanism, self.participation, bands)
        return columns_of(self.mechanism, rounds, length, released)
