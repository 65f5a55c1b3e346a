"""Slow, obvious reference values for the accounting, sharing nothing with the library."""

import itertools
import math

import mpmath
import numpy as np
from scipy import optimize, stats


def gaussian_log_delta(epsilon: float, sigma: float) -> float:
    """log δ of the Gaussian mechanism by its textbook formula, with 2000 bits."""
    with mpmath.workprec(2000):
        e, s = mpmath.mpf(epsilon), mpmath.mpf(sigma)
        phi = lambda x: mpmath.erfc(-x / mpmath.sqrt(2)) / 2  # noqa: E731
        return float(mpmath.log(phi(1 / (2 * s) - e * s) - mpmath.exp(e) * phi(-1 / (2 * s) - e * s)))


def gaussian_epsilon(mu: float, delta: float = 1e-5) -> float:
    """The ε of N(μ, 1) against N(0, 1): Theorem 8 of Balle and Wang, "Improving the Gaussian Mechanism", 2018."""

    def excess(epsilon: float) -> float:
        low, high = stats.norm.cdf(mu / 2 - epsilon / mu), stats.norm.logcdf(-mu / 2 - epsilon / mu)
        return float(low - math.exp(epsilon + high) - delta)

    return float(optimize.brentq(excess, 0, 100))


def worst_squared_mu(sigma: np.ndarray, participation, generator: np.random.Generator) -> float:
    """The largest tr ΔᵀΣ⁻¹Δ found: every pattern of the participation, every choice of signs, and random vectors."""
    n, b, k = participation.rounds, participation.min_separation, participation.participations
    inverse = np.linalg.inv(sigma)
    worst = 0.0
    for length in range(1, k + 1):
        for pattern in itertools.combinations(range(n), length):
            if any(after - before < b for before, after in itertools.pairwise(pattern)):
                continue
            part = inverse[np.ix_(pattern, pattern)]
            signs = np.array(list(itertools.product([1, -1], repeat=length - 1))).reshape(2 ** (length - 1), length - 1)
            signs = np.hstack([np.ones((len(signs), 1)), signs])
            worst = max(worst, float(np.einsum("ij,jk,ik->i", signs, part, signs).max()))
            vectors = generator.normal(size=(length, 3))
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            worst = max(worst, float(np.trace(vectors.T @ part @ vectors)))
    return worst
