"""Random allocation: in each of k epochs a user takes part in one of b = n/k rounds, drawn in secret and anew; C with one band.

Epochs are independent, and rounds of a user do not overlap. So by the theorem on worst inputs (docs: proofs.md) the run is
the pair of (1/b)·Σ_j N(e_j, σ²I), j a round of the epoch, and N(0, σ²I), composed k times, for column norm 1. The ratio of their
densities is a mean of b independent log-normal variables, whose law is found on a grid that errs upwards (`log_normal_means`),
for both directions at once. k of n rounds drawn at random ("balanced iteration subsampling") cost no more: Feldman and Shenfeld,
"Privacy amplification by random allocation", 2025, arXiv:2502.08202.
"""

from dataclasses import dataclass

from fedcgd.accounting.coverage import column_norm
from fedcgd.accounting.poisson import PoissonAccountant
from fedcgd.accounting.sampled import OneOf, Sampled

METHOD = "privacy loss distribution of one secret round in each epoch, on a grid that errs upwards"


@dataclass(frozen=True)
class OneBandAccountant(PoissonAccountant):
    """Runs in which each user takes part in one fresh, secret round of each epoch, of C with one band."""

    def laws(self, released: int) -> tuple[Sampled, ...]:
        norm = column_norm(self.mechanism, self.participation)
        return (Sampled(epochs_of(released, self.participation.spacing, norm), METHOD),)


def epochs_of(released: int, length: int, norm: float) -> tuple[tuple[OneOf, int], ...]:
    """Epochs of which a user moves one round by `norm`, and the one of which only some rounds are out."""
    whole, rest = divmod(released, length)
    found = [(OneOf(((norm, length),)), whole)] if whole else []
    if rest:
        found.append((OneOf(((norm, rest), (0.0, length - rest))), 1))
    return tuple(found)
