"""δ of adding a user under Balls-in-Bins: E_Q[(1 − a·S)₊], with S as in `balls_in_bins_remove`.

Without drawing anything, two upper bounds:
- Jensen's inequality: log S ≥ ℓ − Ḡ/2 with ℓ = mean y_j ~ N(0, |ū|²) and Ḡ = mean G_jj, so that δ is at most a Gaussian
  integral.
- ψ(h) = E e^(−hS) has −ψ'(h) = mean_j E[V_j·e^(−hS)] = mean_j E[e^(−h(S + D_j))] with D_j = mean_i (e^(G_ij) − 1)·V_i, by
  shifting x by u_j. As G ≥ 0, y is associated, so that this is at least ψ(h)·mean_j E[e^(−hD_j)] ≥ ψ(h)·mean_j e^(−h·d_j),
  d_j = E D_j; hence log ψ(h) ≤ −mean_j (1 − e^(−h·d_j))/d_j (Janson's inequality for log-normal sums), and (1 − aS)₊ ≤
  a/(he)·e^(h/a − hS).

The draws integrate ℓ by the trapezoid rule with a random start, and draw only the rest.
"""

import math

import numpy as np
from scipy.optimize import bisect
from scipy.special import log_ndtr

from fedcgd.accounting.balls_in_bins.draws import Bins, Sample, Seed, run_in_blocks
from fedcgd.mechanisms.mechanism import Matrix, Vector

_REACH, _STEP = 10.0, 0.75
_LEFT_OUT = 2e-23  # at least P(|t| > 10), t standard normal
_ROUNDING = 1e-4  # relative: single precision in y changes S by less
_EXPONENTS = np.geomspace(1e-2, 1e7, 1000)  # h
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
    d = np.expm1(np.minimum(gram, 300.0)).mean(axis=0)
    levels, counts = np.unique(np.exp(np.floor(np.log(d) * 1000) / 1000 + 1e-3), return_counts=True)  # rounded up
    result: Vector = np.expm1(-np.outer(_EXPONENTS, levels)) @ (counts / levels) / len(gram)
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
    b, half = len(gram), np.diag(gram) / 2
    length = math.sqrt(float(gram.mean()))
    slope = gram.mean(axis=0) / length  # how y moves with t = ℓ/|ū|
    growth = np.exp(_STEP * slope)

    def draw(generator: np.random.Generator, size: int) -> Vector:
        y = bins.noise(generator, size).astype(np.float64) / sigma
        start = -_REACH + _STEP * generator.random(size)
        y += (start - y.mean(axis=1) / length)[:, None] * slope
        y -= half
        highest = y.max(axis=1)
        v = np.exp(y - highest[:, None], out=y)
        values = np.zeros(size)
        for step in range(round(2 * _REACH / _STEP)):
            log_ratio = np.log(v.mean(axis=1)) + highest + epsilon  # log a·S
            density = np.exp(-((start + step * _STEP) ** 2) / 2)
            values += density * -np.expm1(np.minimum(log_ratio - _ROUNDING, 0.0))
            v *= growth
        return np.asarray(values * (_STEP / math.sqrt(2 * math.pi)))

    rounding = 1 + _ROUNDING
    most = _largest_draw(gram, epsilon - 2 * _ROUNDING) * rounding + _LEFT_OUT
    values = run_in_blocks(draw, count, b, seed) * rounding + _LEFT_OUT
    square = _square_bound(gram, epsilon - 2 * _ROUNDING) * rounding**2 + 3 * _LEFT_OUT
    return Sample(np.minimum(values, most), most, square)
