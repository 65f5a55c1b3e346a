"""δ of removing a user under Balls-in-Bins: E_Q[(S − a)₊], bounded without drawing anything, and estimated by draws.

Q = N(0, I), u_j = m_j/σ, y_j = ⟨u_j, x⟩ with covariance G, V_j = exp(y_j − G_jj/2), S = dP/dQ = mean_j V_j, a = e^ε.
What all bins have in common is not drawn but integrated (`draws`): S = L·S′, and E[(S − a)₊ | S′] = a·B(log(S′/a)) with B(x) =
E (L·e^x − 1)₊. The draws of S′ have a density ∝ q·S′^r, which is where B weighs most. For an integer r, S′^r = b^(−r)·Σ over
(J_1 … J_r) of Π_a V′_{J_a}, and so this is a mixture of normal distributions of y′, with means Σ_a G′[J_a, ·] and covariance G′,
and with weights ∝ exp(Σ_{a<c} G′[J_a, J_c]), whose mean over all (J_1 … J_r) is E[S′^r]. They are drawn exactly, by rejection
(`star_proposal`): what is proposed is accepted with a mean probability of E[S′^r]/N, and N is known. So

    δ_remove = a^(1−r)·N·E[probability to be accepted]·E[g(log(S′/a)) | accepted],   g(x) = e^(−rx)·B(x).

log g is concave and has a largest value. Both means are of bounded draws: rare events cannot hide. With an upper bound on each
that fails with probability at most β/2, their product is one that fails with probability at most β. What a draw does along the
mean of its normal distribution is integrated by the trapezoid rule with a random start, whose mean is right; |t| > 6 is added as
a bound. r is chosen for speed, by few draws of its own: it decides how close the bound is, never whether it holds.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr

from fedcgd.accounting.balls_in_bins.draws import Bins, Sample, Seed, log_excess, run_in_blocks
from fedcgd.accounting.balls_in_bins.star_proposal import StarProposal
from fedcgd.mechanisms.mechanism import Matrix, Vector

_REACH, _STEP = 6.0, 0.75
_LEFT_OUT = 5e-9  # at least P(|t| > 6), t standard normal, and what tables of 53 bits may miss
_ROUNDING = 2e-5  # single precision changes log S′ by less
_LOWEST = -80.0  # log of what still counts in single precision
_LARGEST_EXPONENT = 300.0
_LARGEST_ORDER = 128
_MOST_TRIPLES = 1000  # bins, of which all triples are added up: a tenth of a second
SHARES = 2**22  # probabilities that are kept: their mean is soon known well enough
_TRIED = 1024  # stars for the choice of r
_LEAST_ACCEPTED = 0.02


def remove_bound(gram: Matrix, epsilon: float) -> float:
    """log of an upper bound on δ_remove, without drawing anything; `gram` is G. Infinite if G is too large for floating point.

    E[S^r] is the mean of exp(Σ_{a<c} G[J_a, J_c]) over all (J_1 … J_r): for r = 2, and r = 3 where bins are not too many, it is
    found. From there on E[S^r] ≤ E[S^(r−1)]·max_i mean_j exp((r − 1)·G_ij), by Hölder's inequality.
    """
    powers = np.exp(np.minimum(gram, _LARGEST_EXPONENT))
    top = float(np.diag(gram).max())
    product = np.ones_like(gram)
    log_moment, least = 0.0, math.inf
    for r in range(2, _LARGEST_ORDER + 1):
        if r * top > _LARGEST_EXPONENT:
            break
        product *= powers  # exp((r − 1)·G)
        if r == 2:
            log_moment = math.log(float(powers.mean()))
        elif r == 3 and len(gram) <= _MOST_TRIPLES:
            log_moment = math.log(float(np.mean(powers * (powers @ powers))) / len(gram))
        else:
            log_moment += math.log(float(product.mean(axis=0).max()))
        bound = log_moment + _log_largest(r, epsilon)
        least = min(least, bound)
        if bound > least + 5:
            break
    return least


def _log_largest(order: int, epsilon: float) -> float:
    """log of the maximum of (S − a)₊/S^r."""
    return (order - 1) * (math.log(order - 1) - epsilon) - order * math.log(order)


def _log_top(order: int, c: float) -> float:
    """log of the maximum of g."""
    goal = 1 / order  # where log B has the slope r, B(x) is this part of e^x·Φ(x/c + c/2)

    def surplus(x: float) -> float:
        return float(log_excess(np.array(x), c) - x - log_ndtr(x / c + c / 2)) - math.log(goal)

    high = -math.log1p(-goal)
    low = high - c
    while surplus(low) > 0:
        low -= 2 * (high - low)
    at = float(brentq(surplus, low, high, xtol=1e-12)) if surplus(high) > 0 else high
    return float(log_excess(np.array(at), c)) - order * at + 1e-9


@lru_cache(maxsize=2)
def _proposal(bins: Bins, sigma: float, epsilon: float) -> tuple[StarProposal, float]:
    """The stars of the r that is about the quickest, and how often they are accepted, about.

    Raises ValueError if G′ is too large for floating point.
    """
    gram, c = bins.apart / sigma**2, math.sqrt(bins.common) / sigma
    top, b = float(np.diag(gram).max()), len(gram)
    best: tuple[float, StarProposal, float] | None = None
    order = 2
    while order <= _LARGEST_ORDER and order * top <= _LARGEST_EXPONENT:
        stars = StarProposal.of(gram, order)
        _, shares = stars.draw(np.random.default_rng(0), max(128, min(_TRIED, 16 * _TRIED // order)))
        accepted = float(shares.mean())
        # Draws needed, in proportion, times the time of one.
        draws = stars.log_total + math.log(accepted) + (1 - order) * epsilon + _log_top(order, c)
        cost = draws + math.log(_seconds(order, accepted, b))
        if accepted >= _LEAST_ACCEPTED and (best is None or cost < best[0]):
            best = cost, stars, accepted
        elif best is not None and cost > best[0] + 1:
            break
        order += max(1, order // 8)
    if best is None:
        raise ValueError(f"noise multiplier {sigma:g} is too small beside the columns of C; take a larger one")
    return best[1], best[2]


def _seconds(order: int, accepted: float, b: int) -> float:
    return b * 2.5e-8 + b**2 * 5e-11 + (order * 1e-7 + order**2 * 7e-9) / accepted


def seconds_of_draw(bins: Bins, sigma: float, epsilon: float) -> float:
    """About the processor seconds of a draw, as measured once: the same number on every machine."""
    stars, accepted = _proposal(bins, sigma, epsilon)
    return _seconds(stars.order, accepted, len(bins.gram))


def sample_remove(bins: Bins, sigma: float, epsilon: float, count: int, seed: Seed) -> Sample:
    """About `count` draws, and shares, the product of whose means is δ_remove.

    Raises ValueError if G′ is too large for floating point.
    """
    stars, accepted = _proposal(bins, sigma, epsilon)
    gram, order, c = stars.gram, stars.order, math.sqrt(bins.common) / sigma
    b, top = len(gram), float(np.diag(gram).max())
    # From −6 to 6, one V′_j grows by at most e^(12·√top) beside another, so that those below e^(−80) of the largest never matter;
    # and no y that matters is beyond 40.
    single = 2 * _REACH * math.sqrt(top) + order * top < -_LOWEST / 2
    precision: type[Any] = np.float32 if single else np.float64
    rows_of_gram, half = gram.astype(precision), (np.diag(gram) / 2).astype(precision)
    log_top = _log_top(order, c)

    def draw(generator: np.random.Generator, size: int) -> tuple[Vector, Vector]:
        points, shares = stars.draw(generator, math.ceil(size / accepted))
        points = points[:, generator.random(len(shares)) < shares]
        rows = np.arange(points.shape[1])
        y: Any = bins.noise_apart(generator, len(rows)).astype(precision, copy=False)
        y /= precision(sigma)
        shift = np.zeros_like(y)  # the mean of y′
        for j in points:
            shift += rows_of_gram[j]
        # What y′_J sum to, less its mean, and the standard deviation of that
        along, length = sum(y[rows, j] for j in points), np.sqrt(sum(shift[rows, j] for j in points))
        slope = shift / length[:, None]  # how y moves with t
        start = -_REACH + _STEP * generator.random(len(rows))
        y += shift
        y -= half
        y += slope * (start - along / length).astype(precision)[:, None]
        highest = y.max(axis=1)
        y -= highest[:, None]
        v = np.exp(np.maximum(y, _LOWEST if single else -math.inf, out=y), out=y)
        slope *= precision(_STEP)
        growth = np.exp(slope, out=slope)
        values = np.zeros(len(rows))
        for step in range(round(2 * _REACH / _STEP)):
            log_ratio = np.log(v.mean(axis=1)).astype(float) + highest - epsilon + _ROUNDING  # log S′/a
            log_density = -((start + step * _STEP) ** 2) / 2
            values += np.exp(log_density + log_excess(log_ratio, c) - order * log_ratio - log_top)
            v *= growth
        return values * (_STEP / math.sqrt(2 * math.pi)), shares

    blocks = run_in_blocks(draw, count, b, seed)
    rounding = 1 + 2 * _ROUNDING * order
    scale = math.exp(min(stars.log_total + (1 - order) * epsilon + log_top, 700.0))
    most = (rounding + _LEFT_OUT) * (1 + 1e-9)  # the trapezoid rule gives at most 1 + 1e-14 for the normal density
    values = np.concatenate([np.ones(0), *(values for values, _ in blocks)]) * rounding + _LEFT_OUT
    if not len(values):
        values = np.full(1, most)  # nothing was accepted: the worst there is
    kept = max(1, SHARES // len(blocks[0][1]))  # whole blocks, as each is in order
    shares = np.minimum(np.concatenate([shares for _, shares in blocks[:kept]]) + _LEFT_OUT, 1.0)
    return Sample(np.minimum(values, most) * scale, most * scale, math.inf, shares)
