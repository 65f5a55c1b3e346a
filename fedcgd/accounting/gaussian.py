"""The Gaussian mechanism, exactly: δ, ε and σ of one release of a value that one user moves by 1 in L2 norm.

All releases of a run together are a function of CX + ζσZ, so that without a sampling they are one Gaussian mechanism whose
sensitivity is that of C, also when updates depend on earlier releases (Denisov, McMahan, Rush, Smith and Thakurta, "Improved
Differential Privacy for SGD via Optimal Private Linear Operators on Adaptive Streams", 2022, arXiv:2202.08312).

With μ = 1/σ and a = μ/2 − ε/μ, δ = Φ(a) − e^ε·Φ(a − μ) (Theorem 8 of Balle and Wang, "Improving the Gaussian Mechanism for
Differential Privacy: Analytical Calibration and Optimal Denoising", 2018, arXiv:1805.06530). Since φ(a) = e^ε·φ(a − μ), this is
φ(a)·(R(−a) − R(μ − a)) with Mills' ratio R(x) = Φ(−x)/φ(x), which neither overflows nor cancels; and in terms of (a, μ) the
search for ε or σ is well conditioned for every σ. Answers err on the safe side of rounding.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr

from fedcgd.accounting.accountant import Accountant, Progress
from fedcgd.accounting.guarantee import Bound, Proof, check_delta, check_epsilon
from fedcgd.accounting.sampled import Sampled
from fedcgd.mechanisms.sensitivity import Sensitivity, sensitivity
from fedcgd.support.numbers import as_float

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)
_SLACK = 1e-12  # relative; rounding in what follows is below it
_WIDEST = 40.0  # Φ(−40) is below every δ that is accounted for, and Φ(40) is 1 in double precision


@dataclass(frozen=True)
class GaussianAccountant(Accountant):
    """Runs without a sampling: the adversary may know, and choose, the rounds of each user. Exact where the sensitivity is."""

    def check(self) -> None:
        """Every mechanism is covered."""

    def gaussian_mu(self, noise_multiplier: float, released: int) -> Bound:
        reach = sensitivity(self.mechanism, self.participation, released=released)
        return _bound(reach.value / noise_multiplier, reach)

    def releases(self, noise_multiplier: float, released: int, delta: float) -> tuple[Sampled, float]:
        reach = self.gaussian_mu(noise_multiplier, released)
        return Sampled.certain(reach.value, reach.proof.method), 0.0

    def _sigma_for(self, epsilon: float, delta: float, progress: Progress) -> Bound:
        reach = sensitivity(self.mechanism, self.participation)
        return _bound(sigma(epsilon=epsilon, delta=delta) * reach.value, reach)

    def _epsilon_at(self, sigma: float, delta: float, released: int, progress: Progress) -> Bound:
        reach = sensitivity(self.mechanism, self.participation, released=released)
        return _bound(epsilon(sigma=sigma / reach.value, delta=delta), reach)

    def _delta_at(self, sigma: float, epsilon: float, released: int, progress: Progress) -> Bound:
        reach = sensitivity(self.mechanism, self.participation, released=released)
        return _bound(delta(epsilon=epsilon, sigma=sigma / reach.value), reach)


def _bound(value: float, reach: Sensitivity) -> Bound:
    method = "exact Gaussian mechanism" + ("" if reach.exact else " on an upper bound of the sensitivity")
    return Bound(value, Proof(method, sensitivity=reach.value, exact=reach.exact))


def delta(*, epsilon: float, sigma: float) -> float:
    """The smallest δ for which noise N(0, σ²) on a sensitivity of 1 is (ε, δ)-private; 0.0 if that is below all doubles."""
    epsilon = as_float("epsilon", epsilon)
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon must be at least 0 and finite, got {epsilon}")
    mu = _inverse(sigma)
    return min(1.0, math.exp(_log_delta(mu / 2 - epsilon / mu, mu)) * (1 + _SLACK))


def epsilon(*, sigma: float, delta: float) -> float:
    """The smallest ε for which noise N(0, σ²) on a sensitivity of 1 is (ε, δ)-private."""
    delta = check_delta(delta)
    return _epsilon(_inverse(sigma), delta)


def _epsilon(mu: float, delta: float) -> float:
    goal = math.log(delta)
    if _log_delta(mu / 2, mu) <= goal:
        return 0.0
    a = brentq(lambda a: _log_delta(a, mu) - goal, -_WIDEST, min(mu / 2, _WIDEST), xtol=1e-15, rtol=1e-15)
    return float(max(0.0, mu * (mu / 2 - a + _SLACK * max(1.0, abs(a))) * (1 + _SLACK)))


def sigma(*, epsilon: float, delta: float) -> float:
    """The smallest σ for which noise N(0, σ²) on a sensitivity of 1 is (ε, δ)-private.

    Raises ValueError for an impossible target, and one that no double can express.
    """
    epsilon, delta = check_epsilon(epsilon), check_delta(delta)
    goal = math.log(delta)

    def mu(a: float) -> float:
        # The positive root of ε = μ²/2 − aμ, without cancellation. It grows with a, and so does δ.
        root = math.hypot(a, math.sqrt(2 * epsilon))
        return a + root if a > 0 else 2 * epsilon / (root - a)

    def excess(a: float) -> float:
        return _log_delta(a, mu(a)) - goal

    result = (1 + _SLACK) / mu(brentq(excess, -_WIDEST, _WIDEST, xtol=1e-305, rtol=1e-15, maxiter=5000))
    step = _SLACK
    while _epsilon(1 / result, delta) > epsilon:
        result, step = result * (1 + step), 2 * step
    return result


def _inverse(sigma: float) -> float:
    sigma = as_float("sigma", sigma)
    if not 1e-150 <= sigma <= 1e300:
        raise ValueError(
            f"the noise over the sensitivity must be in [1e-150, 1e300], got {sigma}; take another noise_multiplier"
        )
    return 1 / sigma


def _log_delta(a: float, mu: float) -> float:
    """log δ where a = μ/2 − ε/μ ≤ μ/2."""
    if a < -1e10:  # δ ≤ Φ(a) ≤ φ(a), which no double can express; squares would overflow below
        return -math.inf
    if a > 1:  # then μ ≥ 2, and the second term is far below the first
        second = _log_density(a) + math.log(_mills(mu - a))
        first = float(log_ndtr(a))
        return first + math.log1p(-math.exp(second - first))
    if mu > 1:
        return _log_density(a) + math.log(_mills(-a) - _mills(mu - a))
    # The difference would cancel: integrate R'(t) = t·R(t) − 1 instead.
    t = -a + mu * (1 + _NODES) / 2
    return _log_density(a) + math.log(mu * float(np.dot(_WEIGHTS, _mills_slope(t))) / 2)


def _log_density(a: float) -> float:
    return -a * a / 2 - _LOG_SQRT_2PI


def _mills(x: float) -> float:
    return math.sqrt(math.pi / 2) * float(erfcx(x / math.sqrt(2)))


def _mills_slope(t: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 − t·R(t), by its asymptotic series 1/t² − 3/t⁴ + 15/t⁶ − … where the difference would cancel."""
    near = 1 - t * math.sqrt(math.pi / 2) * erfcx(t / math.sqrt(2))
    u = 1 / np.maximum(t, 20.0) ** 2
    series = np.zeros_like(t)
    for i in range(10, 0, -1):
        series = u * (2 * i - 1) * (1 - series)
    return np.where(t < 20, near, series)
