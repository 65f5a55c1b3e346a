"""Poisson sampling: DP-SGD, and banded C with users in groups that take turns.

A user takes part in an eligible round with probability q. Where C has at most b bands and eligible rounds are b apart, the parts
of CX that two participations touch do not overlap: so the run is a composition of ⌈n/b⌉ Poisson-subsampled Gaussian mechanisms,
each of sensitivity at most the largest column norm of C (Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta and Xu,
"(Amplified) Banded Matrix Factorization: A Unified Approach to Private Training", 2023, arXiv:2306.08153; McKenna, "Scaling up
the Banded Matrix Factorization Mechanism for Differentially Private ML", 2024, arXiv:2405.15913), and the
privacy loss distribution of one round, rounded up to a grid and composed with itself (`tilted`), bounds it.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting.pld.pld_pmf import PLDPmf, create_pmf_pessimistic_connect_dots_fixed_gap
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from fedcgd.accounting import gaussian
from fedcgd.accounting.accountant import Accountant, Bound, Progress
from fedcgd.accounting.coverage import most_bands, too_wide
from fedcgd.accounting.guarantee import LEAST_DELTA
from fedcgd.accounting.profile import budget_of
from fedcgd.accounting.tilted import Composition, GridLoss
from fedcgd.mechanisms import Mechanism, bandwidth
from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.participation import Participation

METHOD = "privacy loss distribution of the Poisson-subsampled Gaussian mechanism, rounded up"
WITHOUT_AMPLIFICATION = "exact Gaussian mechanism of somebody who takes part in every round, without amplification"

_SMALLEST_MULTIPLIER, _LARGEST_MULTIPLIER = 1e-3, 1e6
_LARGEST_EPSILON = 1e7  # no privacy at all; a little beyond, a single step of the discretised loss overflows
_FINE = 2e-4  # step of the discretised privacy loss, as a part of ε: costs about half of that in ε, on the safe side
_STEPS = (1e-5, 1e-3)  # the least step, and the largest for an ε of tens
_PER_SPREAD, _LEAST_STEP = 8, 5e-6  # steps in a standard deviation of one round's loss, as far as they are not too many
_COARSE = 2e-5  # the step for a huge ε, as a part of it
_CELLS = 2e6  # of the discretised privacy loss at most: what memory holds
_ACCURACY = 1e-5  # relative, of a calibrated σ: on the safe side
_TRUNCATED = -90.0  # log of the probability from which on a loss of one round counts as infinite
_NEWTON_STEPS = 4  # before the search begins again, without a slope


@dataclass(frozen=True)
class PoissonAccountant(Accountant):
    """Runs with Poisson or cyclic Poisson sampling, of C with at most b bands."""

    def check(self) -> None:
        column_norm(self.mechanism, self.participation)

    def gaussian_mu(self, noise_multiplier: float, released: int) -> Bound:
        norm = column_norm(self.mechanism, self.participation)
        mu = math.sqrt(_eligible(self.participation, released)) * norm / noise_multiplier
        return Bound(mu, WITHOUT_AMPLIFICATION, sensitivity=norm)

    def loss_distribution(
        self, noise_multiplier: float, released: int, step: float, least_delta: float
    ) -> tuple[PrivacyLossDistribution, float]:
        norm = column_norm(self.mechanism, self.participation)
        return _composed(noise_multiplier / norm, self.participation, released, step), 0.0

    def _sigma_for(self, epsilon: float, delta: float, progress: Progress) -> Bound:
        norm = column_norm(self.mechanism, self.participation)
        found = poisson_noise_multiplier(epsilon, delta, self.participation)
        return _bound(found * norm, norm, _certain(epsilon, delta, self.participation) * norm)

    def _epsilon_at(self, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        norm = column_norm(self.mechanism, self.participation)
        found = poisson_epsilon(delta, sigma / norm, self.participation, released=released)
        alone = sigma / norm / math.sqrt(_eligible(self.participation, released))
        bound = _bound(found, norm, gaussian.epsilon(sigma=alone, delta=delta))
        return budget_of(self, bound, sigma, delta, released, progress)

    def _delta_at(self, sigma: float, epsilon: float, released: int, progress: Progress) -> Bound:
        norm = column_norm(self.mechanism, self.participation)
        found = poisson_delta(epsilon, sigma / norm, self.participation, released=released)
        alone = sigma / norm / math.sqrt(_eligible(self.participation, released))
        return _bound(found, norm, gaussian.delta(epsilon=epsilon, sigma=alone))


def _bound(value: float, norm: float, certain: float) -> Bound:
    """`certain` is what it is for somebody who takes part in every round; where that is the answer, the method says so."""
    return Bound(value, METHOD if value < certain else WITHOUT_AMPLIFICATION, sensitivity=norm)


def column_norm(mechanism: Mechanism, participation: Participation) -> float:
    """The largest column norm of C, or a bound on it. Raises ValueError if C is too wide for the sampling."""
    n, most = participation.rounds, most_bands(participation)
    p = bandwidth(mechanism, n)
    if most is not None and p > most:
        raise too_wide(mechanism, participation, p)
    return sensitivity(mechanism, Participation(rounds=n, min_separation=n)).value


def poisson_delta(
    epsilon: float, noise_multiplier: float, participation: Participation, *, released: int | None = None
) -> float:
    """An upper bound on δ at `epsilon`, for column norm 1; the larger of the two directions."""
    certain = noise_multiplier / math.sqrt(_eligible(participation, released))  # σ, if every round were taken part in
    highest = gaussian.delta(epsilon=epsilon, sigma=certain)
    span = _range(noise_multiplier, participation, released)
    if span > _LARGEST_EPSILON or noise_multiplier > _LARGEST_MULTIPLIER:
        return highest
    epsilon = min(epsilon, _LARGEST_EPSILON)
    step = max(_step(epsilon), span / _CELLS)
    return min(highest, _delta(noise_multiplier, participation, released, step, epsilon))


def poisson_epsilon(
    delta: float, noise_multiplier: float, participation: Participation, *, released: int | None = None
) -> float:
    """An upper bound on ε at `delta`, for column norm 1; the larger of the two directions."""
    certain = noise_multiplier / math.sqrt(_eligible(participation, released))
    found = gaussian.epsilon(sigma=certain, delta=delta)
    if found > _LARGEST_EPSILON or noise_multiplier > _LARGEST_MULTIPLIER:
        return found
    least, step = _range(noise_multiplier, participation, released) / _CELLS, math.inf
    while (finer := max(_step(found), least)) < step / 2:  # finer steps only lower ε
        step = finer
        rounds = _compositions(noise_multiplier, participation, released, step)
        found = min(found, max(composed.epsilon(delta) for composed in rounds))
    return found


def _delta(
    noise_multiplier: float, participation: Participation, released: int | None, step: float, epsilon: float
) -> float:
    return max(composed.delta(epsilon) for composed in _compositions(noise_multiplier, participation, released, step))


def poisson_noise_multiplier(epsilon: float, delta: float, participation: Participation) -> float:
    """The least σ found at which `poisson_delta` is at most `delta`, for column norm 1; 1e-5 above the least at most."""
    if epsilon > _LARGEST_EPSILON:
        raise ValueError(
            f"epsilon must be at most {_LARGEST_EPSILON:g} for {participation.sampling} sampling, got {epsilon:g}; "
            "so large an ε promises nothing. 0.1 to 10 is usual"
        )
    fine = _step(epsilon)
    coarse = max(fine, min(10 * fine, _STEPS[1]))
    rough = _search(epsilon, delta, participation, (0.3, 1.0), 10 * _ACCURACY, coarse)
    # Larger steps only raise δ, so that the answer lies below, and near: Newton's method, with the slope at larger steps.
    width, sigma = 0.01, rough
    slope = (
        _excess(rough * math.exp(-width), epsilon, delta, participation, coarse)
        - _excess(rough, epsilon, delta, participation, coarse)
    ) / width
    for _ in range(_NEWTON_STEPS if rough < _certain(epsilon, delta, participation) and slope > 0 else 0):
        above = _excess(sigma, epsilon, delta, participation, fine)
        if -_ACCURACY * slope < above <= 0:
            return sigma
        sigma *= math.exp(above / slope) * (1 + _ACCURACY / 4)
    return _search(epsilon, delta, participation, (rough * 0.995, rough), _ACCURACY / 4, fine)


def _excess(sigma: float, epsilon: float, delta: float, participation: Participation, step: float) -> float:
    """How far log δ at this σ and step is above that of `delta`; falls with σ."""
    found = _delta(sigma, participation, None, max(step, _range(sigma, participation, None) / _CELLS), epsilon)
    return math.log(max(found, LEAST_DELTA) / delta)


def _certain(epsilon: float, delta: float, participation: Participation) -> float:
    """σ of somebody who takes part in every round: enough for everybody."""
    return gaussian.sigma(epsilon=epsilon, delta=delta) * math.sqrt(_eligible(participation, None))


def _search(
    epsilon: float,
    delta: float,
    participation: Participation,
    bracket: tuple[float, float],
    accuracy: float,
    step: float,
) -> float:
    """A σ with δ(σ) ≤ `delta` at this step, by Brent's method on log σ from a bracket that is widened as needed; at most that
    of somebody who takes part in every round.
    """

    def excess(sigma: float) -> float:
        return _excess(sigma, epsilon, delta, participation, step)

    certain = _certain(epsilon, delta, participation)
    most = min(certain, _LARGEST_MULTIPLIER)
    low, high = bracket
    ratio = high / low
    while high < most and excess(high) > 0:
        low, high = high, min(high * ratio, most)
        ratio *= ratio
    if high >= most:  # enough if it is `certain`, whatever the grid makes of it
        if most < certain or low >= most:
            return certain
        high = most
    ratio = high / low
    while excess(low) <= 0:
        low, high = low / ratio, low
        ratio *= ratio
        if low < _SMALLEST_MULTIPLIER:
            raise ValueError(
                f"ε = {epsilon} at δ = {delta} needs almost no noise, which is not accounted for; take a smaller ε or δ"
            )

    def at(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        # exp(log(most)) may be a last bit below `most`.
        return min(excess(sigma), -1.0) if sigma >= most * (1 - 1e-12) else excess(sigma)

    root = math.exp(brentq(at, math.log(low), math.log(high), xtol=accuracy))
    while root < most and excess(root) > 0:
        root *= 1 + accuracy
    return min(root, certain)


def _step(epsilon: float) -> float:
    return min(max(_FINE * epsilon, _STEPS[0]), max(_STEPS[1], _COARSE * epsilon))


def _range(noise_multiplier: float, participation: Participation, released: int | None) -> float:
    """About how large a privacy loss is not negligible."""
    q = participation.sampling_rate
    assert q is not None
    eligible = _eligible(participation, released)
    drawn = min(eligible, q * eligible + 10 * math.sqrt(q * eligible) + 10)
    return drawn / 2 / noise_multiplier / noise_multiplier + 10 * math.sqrt(drawn) / noise_multiplier


def _eligible(participation: Participation, released: int | None) -> int:
    """Rounds in which one user may take part."""
    rounds = participation.rounds_released(released)
    return max(1, math.ceil(rounds / participation.min_separation))


@lru_cache(maxsize=16)
def _composed(
    noise_multiplier: float, participation: Participation, released: int | None, step: float
) -> PrivacyLossDistribution:
    q = participation.sampling_rate
    assert q is not None
    return _once(noise_multiplier, q, step).self_compose(_eligible(participation, released))


@lru_cache(maxsize=4)
def _once(noise_multiplier: float, q: float, step: float) -> PrivacyLossDistribution:
    """One round. As dp-accounting's `from_gaussian_mechanism`, which takes each point of the grid alone."""
    removing = _on_grid(noise_multiplier, q, step, AdjacencyType.REMOVE)
    if q == 1.0:
        return PrivacyLossDistribution(removing)
    return PrivacyLossDistribution(removing, _on_grid(noise_multiplier, q, step, AdjacencyType.ADD))


def _on_grid(noise_multiplier: float, q: float, step: float, direction: AdjacencyType) -> PLDPmf:
    low, deltas = _profile(noise_multiplier, q, step, direction)
    return create_pmf_pessimistic_connect_dots_fixed_gap(step, low, low + len(deltas) - 1, deltas)


def _profile(noise_multiplier: float, q: float, step: float, direction: AdjacencyType) -> tuple[int, Vector]:
    """(i, δ of one round at ε = i·step, (i + 1)·step, …), as far as losses are more likely than `_TRUNCATED`."""
    ends = GaussianPrivacyLoss(
        noise_multiplier, sampling_prob=q, adjacency_type=direction, log_mass_truncation_bound=_TRUNCATED
    ).connect_dots_bounds()
    low, high = math.floor(ends.epsilon_lower / step), math.ceil(ends.epsilon_upper / step)
    return low, once_delta(np.arange(low, high + 1) * step, noise_multiplier, q, direction == AdjacencyType.ADD)


@lru_cache(maxsize=16)
def _compositions(
    noise_multiplier: float, participation: Participation, released: int | None, step: float
) -> tuple[Composition, ...]:
    """All rounds together, in each direction, with steps of at most `step`."""
    q = participation.sampling_rate
    assert q is not None
    # The loss of one round must be told from none: many rounds of a loss far below the step would count as several times that.
    spread = q * math.sqrt(math.expm1(min(noise_multiplier**-2, 50.0)))
    step = min(step, max(spread / _PER_SPREAD, _LEAST_STEP))
    directions = (AdjacencyType.REMOVE,) if q == 1.0 else (AdjacencyType.REMOVE, AdjacencyType.ADD)
    found = []
    for direction in directions:
        low, deltas = _profile(noise_multiplier, q, step, direction)
        found.append(Composition(GridLoss.of_deltas(deltas, low, step), _eligible(participation, released)))
    return tuple(found)


def once_delta(epsilons: Vector, noise_multiplier: float, q: float, adding: bool) -> Vector:
    """δ of one round at each ε, which may be negative: H(γ) = sup P(S) − γ·Q(S) at γ = e^ε, for sensitivity 1.

    With δ of the Gaussian mechanism at ε' = log(1 + (e^ε − 1)/q) it is q·δ(ε') for removing, and 1 − γ where γ ≤ 1 − q; for
    adding, at ε' = −log(1 + (e^(−ε) − 1)/q), it is (1 − γ·(1 − q))·δ(ε'), and 0 where γ ≥ 1/(1 − q).
    """
    signed = -epsilons if adding else epsilons
    least = math.log1p(-q) if q < 1 else -math.inf
    inside = signed > least
    e = signed[inside]
    with np.errstate(over="ignore", divide="ignore"):  # at q = 1 a loss far below 0 is log(1 + (e^ε − 1)) = −∞
        near, far = np.log1p(np.expm1(np.minimum(e, 1.0)) / q), e - math.log(q) + np.log1p(-(1 - q) * np.exp(-e))
    shifted = np.where(e > 1.0, far, near) * (-1 if adding else 1)
    mu = 1 / noise_multiplier
    gauss = ndtr(mu / 2 - shifted / mu) - np.exp(shifted + log_ndtr(-mu / 2 - shifted / mu))
    deltas = np.zeros_like(epsilons) if adding else -np.expm1(np.minimum(epsilons, 0.0))
    deltas[inside] = gauss * (-np.expm1(epsilons[inside] + least) if adding else q)
    return np.asarray(np.clip(deltas, 0.0, 1.0))
