"""Balls-in-Bins without drawing anything: upper bounds on δ of removing and of adding a user, by a Markov chain worse than C.

With y ~ N(0, G), V_j = exp(y_j − G_jj/2), S = mean_j V_j and a = e^ε, δ_remove = E(S − a)₊ and δ_add = E(1 − aS)₊: both convex
in (V_1 … V_b), so that neither decreases when an entry of G grows (Kahane's inequality). G may be replaced by √(G_ii·G_jj)·R_ij
for a correlation matrix R whose entries are at least those of G; here

    y_j/√G_jj = α_j·x_j + β_j·w,   x_{j+1} = ρ·x_j + √(1 − ρ²)·(new),   x_0, w and the new ones ~ N(0, 1),
    β_j² = κ + (1 − κ)·ρ^(2d_j + 1),   α_j² = 1 − β_j² = (1 − κ)·(1 − ρ^(2d_j + 1)),

d_j the distance of bin j from the nearer end. For bins i, j whose distance on the ring (bin b − 1 is followed by bin 0) is d,
R_ij ≥ κ + (1 − κ)·ρ^d. For κ = 0: where d = |i − j|, α_i·α_j is at least the smaller of α_i², α_j², which leaves at most
ρ^(d_i + d_j + 1) = β_i·β_j to be made up; where d runs across the ends, it is d_i + d_j + 1, and β_i·β_j alone is enough. For
κ > 0, β_i·β_j ≥ κ + (1 − κ)·(that of κ = 0) by Cauchy's inequality. ρ is the least number for which this is enough: with κ = 0
it is λ for DP-λCGD, where hardly anything is lost, and 0 for DP-SGD.

Given w, δ follows backwards through the bins, on a grid for (x, s = the sum so far), by linear interpolation: in s; in x for
removing, where δ is increasing and convex in x; in e^(cx) for adding, c the largest exponent: there the sum is concave in it,
and δ decreasing and convex. So interpolation gives an upper bound. Beyond the grid: δ is monotone, at most 1, and a step in S
changes it by no more than that (times a, for adding). The same holds for w.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from fedcgd.accounting.effort import BINS, Fineness
from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.native.threads import one_thread

LARGEST_EXPONENT = 20.0  # sensitivity over σ
_LARGEST_EPSILON = 200.0
_LARGEST_PRICE = 600.0  # log of what neither overflows nor underflows


@dataclass(frozen=True, eq=False)
class Chain:
    """ρ, and √G_jj, α_j and β_j of each bin, for σ = 1."""

    decay: float
    deviation: Vector
    alpha: Vector
    beta: Vector

    @property
    def is_independent(self) -> bool:
        """Whether no bin tells anything of another, but for the common factor."""
        return self.decay == 0.0


def chains_of(gram: Matrix) -> list[Chain]:
    """Chains that are worse than G: for κ = 0, for some larger κ, and one without a ring; those with ρ near 1 are left out.

    Without a ring, β = 0 and ρ^|i − j| alone is at least the correlation of bins i and j: better for a few bins.
    """
    b = len(gram)
    deviation = np.sqrt(np.diag(gram))
    correlation = gram / np.outer(deviation, deviation)
    bins = np.arange(b)
    around = [float(correlation[bins, (bins + d) % b].max()) for d in range(1, b // 2 + 1)]
    along = [float(np.diag(correlation, d).max()) for d in range(1, b)]
    chains = [Chain(_decay(along, 0.0), deviation, np.ones(b), np.zeros(b))]
    ends = np.minimum(bins, bins[::-1])
    for common in sorted({0.0, *(around[b // k - 1] for k in (2, 4, 8, 16, 32) if b >= k)}):
        if common < 0.999:
            decay = _decay(around, common)
            outer = decay ** (2.0 * ends + 1)
            beta = np.sqrt(common + (1 - common) * outer) * (1 + 1e-12)
            if all(abs(decay - chain.decay) > 1e-3 for chain in chains[1:]):
                chains.append(Chain(decay, deviation, np.sqrt((1 - common) * (1 - outer)), beta))
    return [chain for chain in chains if chain.decay < BINS.decay]


def _decay(largest: list[float], common: float) -> float:
    """The least ρ for which κ + (1 − κ)·ρ^d is at least the d-th of `largest`, for every d from 1 on."""
    rest = [max(0.0, r - common) / (1 - common) for r in largest]
    return min(1.0, max((r ** (1 / d) for d, r in enumerate(rest, 1)), default=0.0) * (1 + 1e-12))


def chain_bound(
    chain: Chain, *, sigma: float, epsilon: float, ignore: float, fineness: Fineness, adding: bool
) -> float:
    """An upper bound on δ of removing a user, or of adding one; the ends of the grids cost about `ignore`."""
    if epsilon > _LARGEST_EPSILON or float(chain.deviation.max()) / sigma > LARGEST_EXPONENT:
        return 1.0
    b, a = len(chain.alpha), math.exp(epsilon)
    own, shared = chain.deviation * chain.alpha / sigma, chain.deviation * chain.beta / sigma
    half = (chain.deviation / sigma) ** 2 / 2
    steepest = max(float(own.max()), 1e-3)
    innovation = math.sqrt(1 - chain.decay**2)
    far = math.sqrt(2 * math.log(max(b / ignore, 10.0)))
    if adding and steepest * far > _LARGEST_PRICE:
        return 1.0
    x = (
        _grid(-far, 3.0, fineness.step * innovation)
        if adding
        else _grid(-3.0, steepest + far, fineness.step * innovation)
    )
    exponent = steepest if adding else 0.0
    before = np.zeros(1) if chain.is_independent else chain.decay * x  # the mean of x_{j+1} for each x_j that matters
    move, start = _hat_weights(before, innovation, x, exponent), _hat_weights(np.zeros(1), 1.0, x, exponent)
    # For adding, what falls below the grid counts as 1; for removing, what exceeds it by how much it adds to the sum.
    beyond = [
        _below(m, v, x[0]) if adding else _above(m, v, x[-1], steepest)
        for m, v in ((before, innovation), (np.zeros(1), 1.0))
    ]
    sums = _sums(own, shared, a, fineness.nodes, adding)
    blocks = [slice(i, i + 16) for i in range(0, len(x), 16)]
    reach = chain.decay ** np.maximum(np.arange(b) - np.arange(b)[:, None], 0)  # [j, i]: ρ^(i − j)

    def given(w: float) -> float:
        values: Matrix = np.maximum(1 - a * (sums + 1), 0.0) if adding else np.maximum(sums + 1 - a, 0.0)
        values = np.repeat(values[None, :], len(before), axis=0)
        lift = shared * w - half
        worth = np.ones(b)
        if not adding:  # the mean of what is still to come, if x_j is at the upper end
            terms = own * reach * x[-1] + lift + own**2 * (1 - reach**2) / 2
            worth = np.triu(np.exp(terms)).sum(axis=1) / b
        for j in range(b - 1, -1, -1):
            by = np.expm1(own[j] * x + lift[j]) / b
            values = np.concatenate(
                [
                    _shifted(values if len(values) == 1 else values[rows], by[rows], sums, a if adding else 1.0, adding)
                    for rows in blocks
                ]
            )
            kernel, edge = (move, beyond[0]) if j else (start, beyond[1])
            values = kernel @ values + (worth[j] * edge)[:, None]
        return float(np.interp(0.0, sums, values[0]))

    with one_thread():
        total = _over_factor(given, shared, half, own, ignore, fineness.factor_step, adding)
    return min(1.0, total * (1 + 1e-9))


def _over_factor(
    given: Callable[[float], float], shared: Vector, half: Vector, own: Vector, ignore: float, step: float, adding: bool
) -> float:
    """An upper bound on the mean of given(w), w ~ N(0, 1)."""
    if not shared.any():
        return given(0.0)
    far, steepest = math.sqrt(2 * math.log(max(1 / ignore, 10.0))), max(float(shared.max()), 1e-3)
    w = _grid(-far, 2.0, step) if adding else _grid(-2.0, steepest + far, step)
    weights = _hat_weights(np.zeros(1), 1.0, w, steepest if adding else 0.0)[0]
    if adding:
        total, most = float(ndtr(w[0])), np.ones(len(w))
    else:
        total = float(ndtr(shared - w[-1]).mean())
        most = np.exp(np.outer(w, shared) + own**2 / 2 - half).mean(axis=1)  # E S given w
    for weight, largest, point in zip(weights, most, w, strict=True):
        total += weight * (largest if weight * largest < ignore / 100 else min(largest, given(float(point))))
    return total


def _grid(low: float, high: float, step: float) -> Vector:
    return np.linspace(low, high, max(2, math.ceil((high - low) / step) + 1))


def _sums(own: Vector, shared: Vector, a: float, nodes: int, adding: bool) -> Vector:
    """The grid for the sum so far, less its mean."""
    spread = math.sqrt(float(np.mean(np.expm1(np.minimum(own**2 + shared**2, 50.0)))))
    if adding:
        return np.linspace(max(-1.0, 1 / a - 1 - 2 * spread), min(2 * spread, 2.0), nodes)
    return np.linspace(max(-1.0, -2 * spread), a - 1 + min(2 * spread, a), nodes)


def _shifted(values: Matrix, by: Vector, sums: Vector, slope: float, adding: bool) -> Matrix:
    """At least the value at s + by[k] in row k (or the only row), for s in `sums`: linear between nodes; beyond them constant,
    or of the steepest slope there is.
    """
    gap, last = float(sums[1] - sums[0]), len(sums) - 1
    whole = np.clip(np.floor(by / gap), -last - 2, last + 2)
    part = np.clip(by / gap - whole, 0.0, 1.0)[:, None]
    at = np.arange(last + 1) + whole.astype(np.intp)[:, None]
    rows = (np.arange(len(by)) % len(values))[:, None] * (last + 1)
    flat = values.ravel()
    low = flat[rows + np.clip(at, 0, last)]
    result: Matrix = flat[rows + np.clip(at + 1, 0, last)]
    result -= low
    result *= part
    result += low
    if adding:
        out = np.flatnonzero(by < 0)
        result[out] += slope * np.maximum(sums[0] - sums - by[out, None], 0.0)
    else:
        out = np.flatnonzero(by > 0)
        result[out] += slope * np.maximum(sums - sums[-1] + by[out, None], 0.0)
    return result


def _hat_weights(means: Vector, deviation: float, grid: Vector, exponent: float) -> Matrix:
    """[i, k]: how much of N(means[i], deviation²) goes to grid[k] when each point X is split between its two neighbours so that
    the mean of X stays, or that of e^(exponent·X) if `exponent` > 0. What is outside the grid goes to its ends.
    """
    t = (grid - means[:, None]) / deviation
    # Second differences of the prices E(X − K)₊ and E(K − X)₊ (of e^(exponent·X), if so): the one is accurate far above the mean,
    # the other below.
    if exponent:
        mean = np.exp(exponent * means + (exponent * deviation) ** 2 / 2)[:, None]
        points = np.exp(exponent * grid)
        calls = mean * ndtr(exponent * deviation - t) - points * ndtr(-t)
        puts = points * ndtr(t) - mean * ndtr(t - exponent * deviation)
    else:
        points = grid
        density = np.exp(-(t**2) / 2) / math.sqrt(2 * math.pi)
        calls, puts = deviation * (density - t * ndtr(-t)), deviation * (density + t * ndtr(t))
    gaps = np.diff(points)
    from_calls = np.diff(np.diff(calls, axis=1) / gaps, axis=1, prepend=-1.0, append=0.0)
    from_puts = np.diff(np.diff(puts, axis=1) / gaps, axis=1, prepend=0.0, append=1.0)
    weights: Matrix = np.maximum(np.where(t < exponent * deviation, from_puts, from_calls), 0.0)
    return weights


def _below(means: Vector, deviation: float, lowest: float) -> Vector:
    """P(X < lowest)."""
    result: Vector = ndtr((lowest - means) / deviation)
    return result


def _above(means: Vector, deviation: float, highest: float, exponent: float) -> Vector:
    """E(e^(exponent·(X − highest)) − 1)₊."""
    t = (highest - means) / deviation
    rise = np.exp((exponent * deviation) ** 2 / 2 - exponent * deviation * t) * ndtr(exponent * deviation - t)
    result: Vector = np.maximum(rise - ndtr(-t), 0.0)
    return result
