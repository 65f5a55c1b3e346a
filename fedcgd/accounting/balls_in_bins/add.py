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

The draws integrate ℓ by the trapezoid rule with a random start, and draw only the rest.
"""

import math
from typing import Any

import numpy as np
from scipy.optimize import bisect
from scipy.special import log_ndtr

from fedcgd.accounting.balls_in_bins.draws import Bins, Sample, Seed, run_in_blocks
from fedcgd.mechanisms.mechanism import Matrix, Vector

_REACH, _STEP = 10.0, 0.75
_LEFT_OUT = 2e-23  # at least P(|t| > 10), t standard normal
_ROUNDING = 1e-4  # relative: single precision in y changes S by less
_EXPONENTS = np.geomspace(1e-2, 1e7, 1000)  # h
_LARGEST_EXPONENT = 300.0
_KINDS = 8
_SHIFTS = np.concatenate([[0.0], np.geomspace(0.01, 1e4, 100)])


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


def _largest_draw(gram: Matrix, epsilon: float) -> float:
    """At least what the trapezoid rule can give: by Jensen's inequality, for the density φ(t) times (1 − exp(ε − Ḡ/2 + |ū|t))₊.

    That has one maximum, because its logarithm is concave. So the rule gives at most the integral and one step at the maximum.
    """
    room, length = float(np.diag(gram).mean()) / 2 - epsilon, math.sqrt(float(gram.mean()))
    end = room / length  # where it becomes 0

    def falls(t: float) -> float:
        """The derivative of the logarithm, times −1; increasing."""
        return t + length / math.expm1(min(max(room - length * t, 1e-300), 700.0))

    low = min(end, 0.0) - 1.0
    while falls(low) > 0:
        low -= 1.0 + abs(low)
    at = float(bisect(falls, low, end, xtol=1e-12, rtol=1e-12))
    highest = math.exp(-(at**2) / 2) / math.sqrt(2 * math.pi) * -math.expm1(length * at - room)
    return _jensen(gram, epsilon) + 1.0001 * _STEP * highest


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


def _square_bound(gram: Matrix, epsilon: float) -> float:
    """An upper bound on the mean square of a draw.

    By Cauchy's inequality, for any c ≥ 0 it is at most E_Q[e^(cℓ + c²|ū|²/2)·(1 − aS)₊²] = e^(c²|ū|²)·E_Q[(1 − aS')₊²], where S'
    has V_j·e^(c⟨u_j, ū⟩) in place of V_j: at least S·e^(cr), r = min_j ⟨u_j, ū⟩; and (1 − aS)₊² ≤ (2a/(he))²·e^(h/a − hS).
    """
    log_psi, least, square = _log_laplace(gram), float(gram.mean(axis=0).min()), float(gram.mean())
    log_a = epsilon + _SHIFTS[:, None] * least
    tails = 2 * (math.log(2) - 1 + log_a - np.log(_EXPONENTS)) + _EXPONENTS * np.exp(-log_a) + log_psi
    return math.exp(float(np.min(_SHIFTS**2 * square + np.minimum(tails.min(axis=1), 0.0))))


def sample_add(bins: Bins, sigma: float, epsilon: float, count: int, seed: Seed) -> Sample:
    """`count` draws with mean δ_add."""
    gram = bins.gram / sigma**2
    b, length = len(gram), math.sqrt(float(gram.mean()))
    slope = gram.mean(axis=0) / length  # how y moves with t = ℓ/|ū|
    # What falls out of single precision makes S smaller, and the draw larger; nothing must overflow.
    precision: type[Any] = np.float32 if 2 * _REACH * float(slope.max()) < 40 else np.float64
    slope, half = slope.astype(precision), (np.diag(gram) / 2).astype(precision)
    growth = np.exp(precision(_STEP) * slope)

    def draw(generator: np.random.Generator, size: int) -> Vector:
        y: Any = bins.noise(generator, size).astype(precision, copy=False)
        y /= precision(sigma)
        start = -_REACH + _STEP * generator.random(size)
        y += (start - y.mean(axis=1, dtype=float) / length).astype(precision)[:, None] * slope
        y -= half
        highest = y.max(axis=1)
        v = np.exp(y - highest[:, None], out=y)
        values = np.zeros(size)
        for step in range(round(2 * _REACH / _STEP)):
            log_ratio = np.log(v.mean(axis=1)).astype(float) + highest + epsilon  # log a·S
            if float(log_ratio.min()) > _ROUNDING:
                break  # S grows with t, as no entry of G is negative
            density = np.exp(-((start + step * _STEP) ** 2) / 2)
            values += density * -np.expm1(np.minimum(log_ratio - _ROUNDING, 0.0))
            v *= growth
        return np.asarray(values * (_STEP / math.sqrt(2 * math.pi)))

    rounding = 1 + _ROUNDING
    most = _largest_draw(gram, epsilon - 2 * _ROUNDING) * rounding + _LEFT_OUT
    values = np.concatenate(run_in_blocks(draw, count, b, seed)) * rounding + _LEFT_OUT
    square = _square_bound(gram, epsilon - 2 * _ROUNDING) * rounding**2 + 3 * _LEFT_OUT
    return Sample(np.minimum(values, most), most, square)
