"""Random allocation: in each of k epochs a user takes part in one of b = n/k rounds, drawn in secret and anew.

With one band epochs are independent, and rounds of a user do not overlap. So by the theorem on worst inputs (docs: proofs.md) the
run is the pair of (1/b)·Σ_j N(e_j, σ²I), j a round of the epoch, and N(0, σ²I), composed k times, for column norm 1. The ratio of
their densities is a mean of b independent log-normal variables, whose law is found on a grid that errs upwards
(`log_normal_means`), for both directions at once. k of n rounds drawn at random ("balanced iteration subsampling") cost no more:
Feldman and Shenfeld, "Privacy amplification by random allocation", 2025, arXiv:2502.08202.

With more bands it is the same with ‖C‖₂ in place of the column norm (`bounds`).
"""

from dataclasses import dataclass

from fedcgd.accounting.amplified import SampledAccountant
from fedcgd.accounting.bounds import by_norm, largest_singular_value
from fedcgd.accounting.coverage import column_norm
from fedcgd.accounting.gaussian import GaussianAccountant
from fedcgd.accounting.guarantee import Bound
from fedcgd.accounting.random_participation.columns import columns_of
from fedcgd.accounting.sampled import OneOf, Sampled

METHOD = "privacy loss distribution of one secret round in each epoch, on a grid that errs upwards"


@dataclass(frozen=True)
class RandomAllocationAccountant(SampledAccountant):
    """Runs in which each user takes part in one fresh, secret round of each epoch, of C with one band, or C ≥ 0 with a few."""

    def check(self) -> None:
        self.laws(self.participation.rounds)

    def gaussian_mu(self, noise_multiplier: float, released: int) -> Bound:
        return GaussianAccountant(self.mechanism, self.participation).gaussian_mu(noise_multiplier, released)

    def laws(self, released: int) -> tuple[Sampled, ...]:
        rounds, length = self.participation.rounds, self.participation.spacing
        norm = column_norm(self.mechanism, self.participation)
        if self.mechanism.bandwidth(rounds) == 1:
            return (Sampled(epochs_of(released, length, norm), METHOD),)
        norm = largest_singular_value(self.mechanism, columns_of(self.mechanism, rounds, length, released))
        return (by_norm(epochs_of(released, length, norm)),)


def epochs_of(released: int, length: int, norm: float) -> tuple[tuple[OneOf, int], ...]:
    """Epochs of which a user moves one round by `norm`, and the one of which only some rounds are out."""
    whole, rest = divmod(released, length)
    found = [(OneOf(((norm, length),)), whole)] if whole else []
    if rest:
        found.append((OneOf(((norm, rest), (0.0, length - rest))), 1))
    return tuple(found)
