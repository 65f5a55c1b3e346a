"""Samples whose means are δ under Balls-in-Bins, in [0, a known range]: importance sampling that cannot hide a rare event.

P = (1/b)Σ_j N(u_j, I) against Q = N(0, I), with u_j = m_j/σ. Under any proposal only y_j = ⟨u_j, x⟩ is needed, which is Gaussian
with covariance G = (⟨u_i, u_j⟩). With V_j = exp(y_j − G_jj/2), dP/dQ = S = mean_j V_j, and for a = e^ε

    δ_remove = E_P[(1 − a/S)₊] = E_Q[(S − a)₊],     δ_add = E_Q[(1 − a·S)₊].

Remove, in one of two ways:
- `sample_jump`, where some V_j exceeds a cut K: pick (J, j) and y_j so that x has density p(x)·Σ_j V_j^γ·1{V_j > K}/Z, where Z is
  a sum of normal tails; then (1 − a/S)₊·Z/Σ_j V_j^γ·1{V_j > K} is in [0, Z/K^γ]. `remainder` bounds what is left.
- `sample_shifted`: x from the mixture of N(c·u_J, I) and N(s·ū, I), ū = mean_j u_j. By the power mean inequality
  mean_j V_j^c ≥ S^c, so that the weight is bounded where S > a.

Add: log S ≥ ℓ − Ḡ/2 by Jensen's inequality, Ḡ = mean G_jj, so that under N(−sū, I) the weight of what counts is bounded.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, logsumexp, ndtr, ndtri_exp

from fedcgd.mechanisms.mechanism import Matrix, Vector

Single = NDArray[np.float32]

_CHUNK = 2**20  # numbers in one block of samples
_ROUNDING = 1e-4  # relative, added to every sample: single precision in y changes it by less
_CELLS = 300
_LEVEL = 1e-3
_SINGLE = 0.7


@dataclass(frozen=True)
class Sample:
    """Independent draws in [0, `range`] with the mean that is asked for."""

    values: Vector
    range: float


@dataclass(frozen=True, eq=False)
class Bins:
    """G for σ = 1, and what does not depend on σ.

    The diagonal is rounded up to few levels, 0.1 % apart: δ does not decrease when an entry of G grows (Kahane's inequality).
    """

    given: InitVar[Matrix]
    gram: Matrix = field(init=False)
    root: Single = field(init=False)  # G = rootᵀ·root
    overlap: float = field(init=False)  # the largest eigenvalue of the correlation matrix
    levels: Vector = field(init=False)  # the different values on the diagonal
    counts: Vector = field(init=False)  # and how often each

    def __post_init__(self, given: Matrix) -> None:
        gram = given.copy()
        top = float(np.diag(gram).max())
        steps = np.floor(np.log(top / np.diag(gram)) / _LEVEL)
        np.fill_diagonal(gram, top * np.exp(-_LEVEL * steps))
        scale = np.sqrt(np.diag(gram))
        largest = float(np.linalg.eigvalsh(gram / np.outer(scale, scale))[-1])
        levels, counts = np.unique(np.diag(gram), return_counts=True)
        values = {
            "gram": gram,
            "root": np.linalg.cholesky(gram).T.astype(np.float32),
            "overlap": min(len(gram), largest * (1 + 1e-9)),
            "levels": levels,
            "counts": counts,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def noise(self, generator: np.random.Generator, count: int) -> Single:
        """`count` draws of N(0, G)."""
        normal = generator.standard_normal((count, len(self.gram)), dtype=np.float32)
        return np.asarray(normal @ self.root)


def sample_jump(bins: Bins, sigma: float, epsilon: float, tilt: float, log_cut: float, count: int, seed: int) -> Sample:
    """Draws for E_P[(1 − a/S)₊; some V_j > K], with γ = `tilt` ≥ 0 and log K = `log_cut`."""
    gram = bins.gram / sigma**2
    diagonal = np.diag(gram)
    b = len(gram)
    deviation = np.sqrt(diagonal)
    # [j, J]: the mass of V_j^γ·1{V_j > K} under N(u_J, I), where y_j ~ N(G_jJ, G_jj).
    floors = (log_cut + diagonal[:, None] / 2 - gram - tilt * diagonal[:, None]) / deviation[:, None]
    masses = tilt * (gram - diagonal[:, None] / 2) + tilt**2 * diagonal[:, None] / 2 + log_ndtr(-floors)
    log_z = float(logsumexp(masses)) - math.log(b)
    cumulative = np.cumsum(np.exp(masses - masses.max()).ravel())
    half = (diagonal / 2).astype(np.float32)
    columns = gram.astype(np.float32)
    slopes = (gram / diagonal[:, None]).astype(np.float32)  # [j]: how y follows y_j

    def draw(generator: np.random.Generator, size: int) -> Vector:
        chosen = np.searchsorted(cumulative, generator.random(size) * cumulative[-1], side="right")
        j, ball = np.divmod(np.minimum(chosen, b * b - 1), b)
        # y_j = mean + deviation·t, where t is standard normal above the floor; Φ(−t) is uniform below Φ(−floor).
        t = -ndtri_exp(log_ndtr(-floors[j, ball]) + np.log1p(-generator.random(size)))
        y_j = gram[j, ball] + tilt * diagonal[j] + deviation[j] * t
        y = bins.noise(generator, size) / np.float32(sigma) + columns[ball]
        moved = y_j.astype(np.float32) - y[np.arange(size), j]
        y += moved[:, None] * slopes[j]
        y -= half  # log V
        above = y > np.float32(log_cut)
        above[np.arange(size), j] = True  # whatever rounding made of it
        rows, where = np.nonzero(above)
        weights = np.zeros(size)
        np.add.at(weights, rows, np.exp(tilt * (y[rows, where].astype(np.float64) - log_cut)))
        with np.errstate(over="ignore", divide="ignore"):
            ratio = np.exp(y - np.float32(epsilon)).mean(axis=1, dtype=np.float64) * (1 + _ROUNDING)
            loss = np.maximum(0.0, 1 - 1 / ratio)
        values: Vector = loss * math.exp(min(log_z - tilt * log_cut, 700.0)) / weights
        return values

    most = math.exp(min(log_z - tilt * log_cut, 700.0)) * (1 + _ROUNDING)
    values = _parallel(draw, count, b, seed) * (1 + _ROUNDING)
    return Sample(np.minimum(values, most), most)


def sample_shifted(
    bins: Bins, sigma: float, epsilon: float, factor: float, shift: float, count: int, seed: int
) -> Sample:
    """Draws for δ_remove from `_SINGLE` parts N(c·u_J, I), J uniform and c = `factor` > 1, the rest N(s·ū, I), s = `shift`."""
    gram = bins.gram / sigma**2
    diagonal, rows = np.diag(gram), gram.mean(axis=1)  # ⟨u_j, ū⟩
    square, mean_half = float(rows.mean()), float(diagonal.mean()) / 2
    half = (diagonal / 2).astype(np.float32)
    single, spread = (factor * gram).astype(np.float32), (shift * rows).astype(np.float32)
    # V_j^c·e^(−(c² − c)·G_jj/2) is the density of N(c·u_j, I) over that of Q; a/S-scaled, in single precision.
    falls = np.exp(-(factor**2 - factor) * (diagonal - diagonal.max()) / 2).astype(np.float32) / len(gram)
    log_scale = -(factor**2 - factor) * float(diagonal.max()) / 2 + math.log(_SINGLE)

    def draw(generator: np.random.Generator, size: int) -> Vector:
        y = bins.noise(generator, size) / np.float32(sigma) - half  # log V
        of_one = generator.random(size) < _SINGLE
        ball = generator.integers(len(gram), size=size)
        y[of_one] += single[ball[of_one]]
        y[~of_one] += spread
        along = y.mean(axis=1, dtype=np.float64) + mean_half
        y -= np.float32(epsilon)  # log V/a
        with np.errstate(over="ignore"):
            ratio = np.exp(y).mean(axis=1, dtype=np.float64) * (1 + _ROUNDING)
            high = y.max(axis=1)
            powers = (np.exp(np.float32(factor) * (y - high[:, None])) @ falls).astype(np.float64)
            log_single = np.log(powers) + factor * (high + epsilon) + log_scale
        log_bulk = math.log(1 - _SINGLE) + shift * along - shift**2 * square / 2
        with np.errstate(divide="ignore"):
            return np.asarray(np.exp(np.log(np.maximum(0.0, ratio - 1)) + epsilon - np.logaddexp(log_single, log_bulk)))

    # (S − a)/S^c is largest at S = ac/(c − 1).
    log_most = -factor * math.log(factor) + (factor - 1) * (math.log(factor - 1) - epsilon) - log_scale
    most = math.exp(min(log_most, 700.0)) * (1 + 10 * _ROUNDING)
    values = _parallel(draw, count, len(gram), seed) * (1 + _ROUNDING)
    return Sample(np.minimum(values, most), most)


def remainder(bins: Bins, sigma: float, epsilon: float, log_cut: float) -> float:
    """An upper bound on E_Q[(S − a)₊; all V_j ≤ K], for log K = `log_cut`.

    For all h > 0 it is at most E e^(hb(S − a))/(hbe); and with the largest eigenvalue p of the correlation matrix of y,
    E Π f_j(y_j) ≤ Π (E f_j(y_j)^p)^(1/p) for all f_j ≥ 0 (the Gaussian Hölder inequality, Theorem 1 of arXiv:1306.2410).
    """
    if log_cut <= epsilon:
        return 0.0  # S ≤ K ≤ a
    a, b, p = math.exp(epsilon), len(bins.gram), bins.overlap
    deviation = np.sqrt(bins.levels)[:, None] / sigma
    top = np.minimum(log_cut / deviation + deviation / 2, 40.0)
    edges = np.minimum(np.linspace(-10.0, 40.0, _CELLS), top)
    # V at the upper edge of each cell is not below V anywhere in it; above K it does not matter, and K itself is counted.
    high = np.concatenate([np.exp(deviation * edges - deviation**2 / 2), np.full_like(top, math.exp(log_cut))], axis=1)
    with np.errstate(divide="ignore"):
        log_masses = np.log(np.concatenate([np.diff(ndtr(edges), prepend=0.0), ndtr(-top)], axis=1))
    best = 0.0
    for h in np.geomspace(0.05, 60, 32) / (p * math.exp(log_cut)):
        moment = float(np.dot(bins.counts, logsumexp(h * p * high + log_masses, axis=1))) / p
        best = min(best, moment - h * b * a - math.log(h * b) - 1)
    return math.exp(best)


def sample_add(bins: Bins, sigma: float, epsilon: float, shift: float, count: int, seed: int) -> Sample:
    """Draws for δ_add under N(−s·ū, I) with s = `shift` ≥ 0."""
    gram = bins.gram / sigma**2
    b = len(gram)
    rows = gram.mean(axis=1)  # ⟨u_j, ū⟩
    square, half = float(rows.mean()), np.diag(gram) / 2
    offset = (shift * rows + half).astype(np.float32)
    room = epsilon - float(half.mean())  # ⟨ū, x⟩ ≤ −room wherever a·S < 1

    def draw(generator: np.random.Generator, size: int) -> Vector:
        y = bins.noise(generator, size) / np.float32(sigma) - offset  # log V
        along = y.mean(axis=1, dtype=np.float64) + float(half.mean())
        with np.errstate(over="ignore"):
            ratio = np.exp(y + np.float32(epsilon)).mean(axis=1, dtype=np.float64) * (1 - _ROUNDING)
        log_weight = np.minimum(shift * along + shift**2 * square / 2, 700.0)
        return np.asarray(np.maximum(0.0, 1 - ratio) * np.exp(log_weight))

    # (1 − e^(−τ))·e^(−sτ) is largest at e^(−τ) = s/(1 + s).
    peak = math.exp(shift * math.log(shift / (1 + shift))) / (1 + shift) if shift else 1.0
    most = peak * math.exp(min(shift**2 * square / 2 - shift * room, 700.0)) * (1 + 2 * _ROUNDING)
    values = _parallel(draw, count, b, seed) * (1 + _ROUNDING)
    return Sample(np.minimum(values, most), most)


def _parallel(draw: Callable[[np.random.Generator, int], Vector], count: int, width: int, seed: int) -> Vector:
    """`count` draws in blocks, each with its own generator: the same for any number of threads."""
    size = max(1, min(count, _CHUNK // width))
    sizes = [min(size, count - start) for start in range(0, count, size)]
    seeds = np.random.SeedSequence(seed).spawn(len(sizes))
    with ThreadPoolExecutor(min(len(sizes), len(os.sched_getaffinity(0)))) as pool:
        blocks = pool.map(
            lambda pair: draw(np.random.Generator(np.random.SFC64(pair[0])), pair[1]), zip(seeds, sizes, strict=True)
        )
        return np.concatenate(list(blocks))
