"""Random allocation: in each of k epochs a user takes part in one of b = n/k rounds, drawn in secret and anew; C with one band.

Epochs are independent, and rounds of a user do not overlap. So by the theorem on worst inputs (docs/accounting.md) the run is
the pair of (1/b)·Σ_j N(e_j, σ²I), j a round of the epoch, and N(0, σ²I), composed k times, for column norm 1. The ratio of their
densities is a mean of b independent log-normal variables, whose law is found on a grid that errs upwards (`log_normal_means`),
for both directions at once. k of n rounds drawn at random ("balanced iteration subsampling") cost no more: Feldman and Shenfeld,
"Privacy amplification by random allocation", 2025, arXiv:2502.08202.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import (
    PrivacyLossDistribution,
    from_gaussian_mechanism,
)

from fedcgd.accounting import gaussian
from fedcgd.accounting.accountant import Accountant, Bound, Progress
from fedcgd.accounting.guarantee import LEAST_DELTA
from fedcgd.accounting.log_normal_means import Ratio, log_normal_mean
from fedcgd.accounting.poisson import WITHOUT_AMPLIFICATION, column_norm, poisson_noise_multiplier
from fedcgd.accounting.tilted import Composition, GridLoss
from fedcgd.participation import Participation

METHOD = "privacy loss distribution of one secret round in each epoch, on a grid that errs upwards"

_LEAST_SIGMA, _LARGEST_SIGMA = 0.2, 1e4  # for column norm 1; outside, amplification is left out
_STEP, _STEPS = 2e-4, (1e-6, 1e-3)  # of the privacy loss, as a part of ε; the least and the largest
_PER_SPREAD = 8  # steps in a standard deviation of one epoch's loss
_LOST = 1e-20  # the probability of losses beyond the grid, unless δ is about as small
_ACCURACY = 5e-5  # relative, of a calibrated σ: on the safe side
_TRIES, _SHOWN = 40, 5  # at most, and about


@dataclass(frozen=True)
class OneBandAccountant(Accountant):
    """Runs in which each user takes part in one fresh, secret round of each epoch, of C with one band."""

    def check(self) -> None:
        column_norm(self.mechanism, self.participation)

    def gaussian_mu(self, noise_multiplier: float, released: int) -> Bound:
        norm = column_norm(self.mechanism, self.participation)
        mu = math.sqrt(self._epochs(released)) * norm / noise_multiplier
        return Bound(mu, WITHOUT_AMPLIFICATION, sensitivity=norm)

    def loss_distribution(
        self, noise_multiplier: float, released: int, step: float, least_delta: float
    ) -> tuple[PrivacyLossDistribution, float]:
        sigma = noise_multiplier / column_norm(self.mechanism, self.participation)
        if not _LEAST_SIGMA <= sigma <= _LARGEST_SIGMA:
            mu = self.gaussian_mu(noise_multiplier, released).value
            return from_gaussian_mechanism(1 / mu, value_discretization_interval=step), 0.0
        losses = _ratio(sigma, self._bins, least_delta * 1e-6).losses(step)
        removing, adding = (DensePLDPmf(step, loss.first, loss.masses, loss.infinite, True) for loss in losses)
        return PrivacyLossDistribution(removing, adding).self_compose(self._epochs(released)), 0.0

    def _sigma_for(self, epsilon: float, delta: float, progress: Progress) -> Bound:
        norm, k, b = (
            column_norm(self.mechanism, self.participation),
            self._epochs(self.participation.rounds),
            self._bins,
        )
        certain = gaussian.sigma(epsilon=epsilon, delta=delta) * math.sqrt(k)
        like = Participation(rounds=k * b, sampling="poisson", sampling_rate=1 / b)
        sigma, least, best, slope = poisson_noise_multiplier(epsilon, delta, like), 0.0, certain, 12.0
        last: tuple[float, float] | None = None
        for number in range(1, _TRIES + 1):
            if not least < sigma < best:
                sigma = math.sqrt(max(least, best / 2) * best)
            progress(f"{sigma * norm:.6g}, {number} of about {max(_SHOWN, number + 1)}")
            excess = math.log(max(_delta(sigma, b, k, epsilon), LEAST_DELTA) / delta)
            best, least = (min(best, sigma), least) if excess <= 0 else (best, max(least, sigma))
            if -_ACCURACY * slope < excess <= 0 or best - least <= _ACCURACY * best:
                break
            if last is not None and abs(math.log(sigma / last[0])) > 1e-7:
                slope = min(max((last[1] - excess) / math.log(sigma / last[0]), 2.0), 60.0)
            last = sigma, excess
            sigma *= math.exp((excess / slope) + _ACCURACY / 2)
        return self._bound(best * norm, norm, certain * norm)

    def _epsilon_at(self, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        norm, k = column_norm(self.mechanism, self.participation), self._epochs(released)
        certain = gaussian.epsilon(sigma=sigma / norm / math.sqrt(k), delta=delta)
        return self._bound(min(certain, _epsilon(sigma / norm, self._bins, k, delta, certain)), norm, certain)

    def _delta_at(self, sigma: float, epsilon: float, released: int, progress: Progress) -> Bound:
        norm, k = column_norm(self.mechanism, self.participation), self._epochs(released)
        certain = gaussian.delta(epsilon=epsilon, sigma=sigma / norm / math.sqrt(k))
        return self._bound(min(certain, _delta(sigma / norm, self._bins, k, epsilon)), norm, certain)

    @property
    def _bins(self) -> int:
        return self.participation.rounds // self.participation.participations

    def _epochs(self, released: int) -> int:
        """Those that have begun: of the last one, all rounds are counted."""
        return max(1, math.ceil(released / self._bins))

    @staticmethod
    def _bound(value: float, norm: float, certain: float) -> Bound:
        return Bound(value, METHOD if value < certain else WITHOUT_AMPLIFICATION, sensitivity=norm)


def _delta(sigma: float, bins: int, epochs: int, epsilon: float) -> float:
    """The larger δ of the two directions, for column norm 1; 1 where amplification is left out."""
    if not _LEAST_SIGMA <= sigma <= _LARGEST_SIGMA:
        return 1.0
    lost = _LOST
    while True:
        losses = _losses(sigma, bins, lost, epsilon)
        found = max(Composition(loss, epochs).delta(epsilon) for loss in losses)
        if epochs * lost < 1e-3 * found or lost <= LEAST_DELTA:
            return found
        lost = max(lost**2, LEAST_DELTA)


def _epsilon(sigma: float, bins: int, epochs: int, delta: float, largest: float) -> float:
    """The larger ε of the two directions, for column norm 1; infinite where amplification is left out."""
    if not _LEAST_SIGMA <= sigma <= _LARGEST_SIGMA:
        return math.inf
    found = largest
    for _ in range(2):  # a finer step only lowers ε
        losses = _losses(sigma, bins, delta * 1e-6 / epochs, found)
        found = min(found, max(Composition(loss, epochs).epsilon(delta) for loss in losses))
    return found


def _losses(sigma: float, bins: int, lost: float, epsilon: float) -> tuple[GridLoss, GridLoss]:
    """Of one epoch, removing and adding."""
    spread = math.sqrt(math.expm1(sigma**-2) / bins)
    step = min(max(_STEP * epsilon, _STEPS[0]), _STEPS[1], max(spread / _PER_SPREAD, _STEPS[0]))
    return _ratio(sigma, bins, lost).losses(step)


@lru_cache(maxsize=16)
def _ratio(sigma: float, bins: int, lost: float) -> Ratio:
    return log_normal_mean([(1 / sigma, bins)], lost)
