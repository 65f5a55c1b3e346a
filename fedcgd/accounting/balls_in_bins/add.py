"""δ of adding a user under Balls-in-Bins: E_Q[(1 − a·S)₊], with S as in `remove`.

Without drawing anything, two upper bounds:
- Jensen's inequality: log S ≥ ℓ − Ḡ/2 with ℓ = mean y_j ~ N(0, |ū|²) and Ḡ = mean G_jj, so that δ is at most a Gaussian
  integral.
- ψ(h) = E e^(−hS) has −ψ'(h) = mean_j E[V_j·e^(−hS)] = mean_j E[Π_i exp(−z·e^(G_ij)·V_i)], z = h/b, by shifting x by u_j.
  As G ≥ 0, y is associated: means of products of decreasing functions are at least the products of their means. So the
  factors Π_{i≠j} exp(−z·(e^(G_ij) − 1)·V_i) are taken out, whose mean is at least exp(−z·d_j) with d_j = Σ_{i≠j} (e^(G_ij) − 1),
  by Jensen's inequality. Given V_j, the mean of what the other bins leave decreases with V_j; so Chebyshev's inequality, for
  the measure with density ∝ exp(−z·V_j), gives −ψ'(h) ≥ ψ(h)·mean_j exp(−z·d_j)·L_j(z·e^(G_jj))/L_j(z), L_j(z) = E exp(−z·V_j).
  That is an equality for independent bins. Last, (1 − aS)₊ ≤ a/(he)·e^(h/a − hS).
"""

import math

import numpy as np
from scipy.special import log_ndtr

from fedcgd.mechanisms.mechanism import Matrix, Vector

_EXPONENTS = np.geomspace(1e-2, 1e7, 1000)  # h
_LARGEST_EXPONENT = 300.0
_KINDS = 8  # bins that are nearly alike are counted together, as so many kinds


def add_bound(gram: Matrix, epsilon: float) -> float:
    """An upper bound on δ_add without drawing anything; `gram` is G."""
    log_psi = _log_laplace(gram)
    janson = float(np.min(epsilon - 1 - np.log(_EXPONENTS) + _EXPONENTS * math.exp(-epsilon) + log_psi))
    return min(_jensen(gram, epsilon), math.exp(min(janson, 0.0))) * (1 + 1e-9) + 1e-300


def _jensen(gram: Matrix, epsilon: float) -> float:
    """E[(1 − exp(ε − Ḡ/2 + ℓ))₊]."""
    room, length = float(np.diag(gram).mean()) / 2 - epsilon, math.sqrt(float(gram.mean()))
    first = float(log_ndtr(room / length))
    second = -room + length**2 / 2 + float(log_ndtr(room / length - length))
    return math.exp(first) * -math.expm1(min(second - first, 0.0))


def _log_laplace(gram: Matrix) -> Vector:
    """An upper bound on log E e^(−hS) for each h of `_EXPONENTS`."""
    own, powers = np.diag(gram), np.expm1(np.minimum(gram, _LARGEST_EXPONENT))
    others = powers.sum(axis=0) - np.diag(powers)
    # Bins that are nearly alike are counted together: the variance of each is in [low, high], and its d_j at most `most`.
    high, most = (_rounded_up(part) for part in (own, others))
    low = np.maximum(high - (float(own.max()) - float(own.min())) / _KINDS, 0.0)
    rates = np.zeros_like(_EXPONENTS)  # −ψ'/ψ is at least this
    z = _EXPONENTS / len(gram)
    kinds, counts = np.unique([low, high, most], axis=1, return_counts=True)
    for (least, largest, rest), count in zip(kinds.T, counts, strict=True):
        moved = _laplace(least, z * math.exp(min(largest, _LARGEST_EXPONENT)))
        rates += count * np.maximum(moved - 1e-12, 0.0) / (_laplace(largest, z) + 1e-12) * np.exp(-z * rest)
    # It falls with h, because log ψ is convex.
    return -np.cumsum(np.diff(_EXPONENTS, prepend=0.0) * rates) / len(gram)


def _rounded_up(values: Vector) -> Vector:
    """`values`, rounded up to one of some that are evenly spaced."""
    least, gap = float(values.min()), float(values.max() - values.min()) / _KINDS
    result: Vector = least + gap * np.ceil((values - least) / gap * (1 - 1e-12)) if gap else values
    return result


def _laplace(variance: float, z: Vector) -> Vector:
    """E e^(−zV) for V = exp(N(−variance/2, variance)), to 1e-13 or so."""
    step = 0.1 / max(1.0, math.sqrt(variance))
    t = np.arange(-9.0, 9.0 + step, step)
    weights = np.exp(-(t**2) / 2) * (step / math.sqrt(2 * math.pi))
    result: Vector = np.exp(-np.outer(z, np.exp(math.sqrt(variance) * t - variance / 2))) @ weights
    return result
