"""The trade-off curve of a run: how well any test can tell whether one user took part.

That is f-DP (Dong, Roth and Su, "Gaussian Differential Privacy", 2019, arXiv:1905.02383).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from fedcgd.accounting import compute_delta, compute_epsilon
from fedcgd.accounting.accountant import Progress, silent
from fedcgd.accounting.effort import EFFORT
from fedcgd.mechanisms.mechanism import Mechanism, Vector
from fedcgd.participation import Participation

_PAIRS = EFFORT.answers.profile_points


@dataclass(frozen=True)
class TradeOff:
    """β = f(α): no test that cries "took part" wrongly with probability α misses with probability below β.

    Attributes:
        alphas: α, ascending from 0 to 1.
        betas: β at each of them.
        exact: whether some test reaches β; otherwise f is a lower bound on it, which makes it a valid promise.
        method: in words, how it was found.
        failure_probability: the chance that it is wrong, where the method draws random numbers.
    """

    alphas: tuple[float, ...]
    betas: tuple[float, ...]
    exact: bool
    method: str
    failure_probability: float = 0.0


def trade_off(
    mechanism: Mechanism, participation: Participation, *, noise_multiplier: float, progress: Progress = silent
) -> TradeOff:
    """The trade-off curve of a whole run at 201 values of α; adjacency: zero out one user.

    Without sampling it is that of the Gaussian mechanism; with one, the best curve that follows from δ at 16 values of
    ε, up to the ε of δ = 10⁻⁶.

    Args:
        mechanism: the matrix C.
        participation: who takes part when, over how many rounds.
        noise_multiplier: σ, positive: noise per unit of clip norm.
        progress: is called with a line of text for each point under a sampling.

    Raises:
        ValueError: for what is not accounted for.
    """
    alphas = np.linspace(0.0, 1.0, 201)
    widest = compute_epsilon(mechanism, participation, noise_multiplier=noise_multiplier, delta=1e-6)
    if not participation.is_secret:
        assert widest.sensitivity is not None
        betas = gaussian_trade_off(widest.sensitivity / noise_multiplier, alphas)
        return TradeOff(tuple(alphas.tolist()), tuple(betas.tolist()), widest.exact, widest.method)
    points = []
    for number, e in enumerate(np.linspace(0.0, widest.epsilon, _PAIRS), 1):
        progress(f"the trade-off curve, {number} of {_PAIRS}")
        points.append(compute_delta(mechanism, participation, noise_multiplier=noise_multiplier, epsilon=float(e)))
    betas = profile_trade_off([(point.epsilon, point.delta) for point in points], alphas)
    risk = sum(point.failure_probability for point in points)
    return TradeOff(tuple(alphas.tolist()), tuple(betas.tolist()), False, widest.method, risk)


def gaussian_trade_off(mu: float, alphas: ArrayLike) -> Vector:
    """β = Φ(Φ⁻¹(1 − α) − μ), exact for N(0, 1) against N(μ, 1) (eq. 6 of arXiv:1905.02383).

    Args:
        mu: μ ≥ 0, sensitivity / σ.
        alphas: α in [0, 1].

    Returns:
        β, of the shape of `alphas`.

    Raises:
        ValueError: for numbers out of range.
    """
    if not mu >= 0:
        raise ValueError(f"mu must be at least 0, got {mu}; it is sensitivity / σ")
    betas: Vector = ndtr(-ndtri(_checked(alphas)) - mu)
    return betas


def profile_trade_off(profile: Iterable[tuple[float, float]], alphas: ArrayLike) -> Vector:
    """β ≥ max over (ε, δ) of 0, 1 − δ − e^ε·α and e^(−ε)·(1 − δ − α), for a run that is (ε, δ)-DP for each pair of `profile`.

    Convex, at most 1 − α, and a lower bound on every test's β, whichever pairs are given; more pairs make it tighter
    (Proposition 2.5 of arXiv:1905.02383).

    Args:
        profile: pairs (ε, δ) that hold for the run.
        alphas: α in [0, 1].

    Returns:
        β, of the shape of `alphas`.

    Raises:
        ValueError: for an α outside [0, 1], ε < 0 or δ outside [0, 1].
    """
    level = _checked(alphas)
    betas = np.zeros_like(level)
    for epsilon, delta in profile:
        if not epsilon >= 0 or not 0 <= delta <= 1:
            raise ValueError(f"a profile has ε ≥ 0 and δ in [0, 1], got ({epsilon}, {delta})")
        with np.errstate(over="ignore", invalid="ignore"):
            steep = np.where(level > 0, 1 - delta - np.exp(epsilon) * level, 1 - delta)
        betas = np.maximum(betas, np.maximum(steep, np.exp(-epsilon) * (1 - delta - level)))
    return betas


def _checked(alphas: ArrayLike) -> Vector:
    level = np.asarray(alphas, dtype=np.float64)
    if not np.all((level >= 0) & (level <= 1)):
        raise ValueError(f"each alpha must be in [0, 1], got {level[~((level >= 0) & (level <= 1))].flat[0]}")
    return level
