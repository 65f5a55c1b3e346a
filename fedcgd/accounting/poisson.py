"""Poisson sampling: DP-SGD, and banded C with users in groups that take turns.

A user takes part in an eligible round with probability q. Where C has at most b bands and eligible rounds are b apart, the parts
of CX that two participations touch do not overlap: so the run is a composition of ⌈n/b⌉ Poisson-subsampled Gaussian mechanisms,
each of sensitivity at most the largest column norm of C (Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta and Xu,
"(Amplified) Banded Matrix Factorization: A Unified Approach to Private Training", 2023, arXiv:2306.08153; McKenna, "Scaling up
the Banded Matrix Factorization Mechanism for Differentially Private ML", 2024, arXiv:2405.15913), and the
privacy loss distribution of one round, rounded up to a grid and composed with itself (`sampled`), bounds it.
"""

import math
from dataclasses import dataclass

from fedcgd.accounting.amplified import SampledAccountant
from fedcgd.accounting.coverage import column_norm
from fedcgd.accounting.guarantee import WITHOUT_AMPLIFICATION, Bound, Proof
from fedcgd.accounting.sampled import Coin, Sampled

METHOD = "privacy loss distribution of the Poisson-subsampled Gaussian mechanism, rounded up"


@dataclass(frozen=True)
class PoissonAccountant(SampledAccountant):
    """Runs of which no two rounds of a user overlap: Poisson or cyclic Poisson sampling, of C with at most b bands."""

    def check(self) -> None:
        column_norm(self.mechanism, self.participation)

    def gaussian_mu(self, noise_multiplier: float, released: int) -> Bound:
        norm = column_norm(self.mechanism, self.participation)
        mu = math.sqrt(self._eligible(released)) * norm / noise_multiplier
        return Bound(mu, Proof(WITHOUT_AMPLIFICATION))

    def laws(self, released: int) -> tuple[Sampled, ...]:
        rate = self.participation.sampling_rate
        assert rate is not None  # noqa: S101
        coin = Coin(rate, column_norm(self.mechanism, self.participation))
        return (Sampled(((coin, self._eligible(released)),), METHOD),)

    def _eligible(self, released: int) -> int:
        """Rounds in which one user may take part."""
        return max(1, math.ceil(released / self.participation.spacing))
