"""δ of removing a user under Balls-in-Bins: E_Q[(S − a)₊], bounded without drawing anything, and estimated by draws.

Q = N(0, I), u_j = m_j/σ, y_j = ⟨u_j, x⟩ with covariance G, V_j = exp(y_j − G_jj/2), S = dP/dQ = mean_j V_j, a = e^ε. The
draws have a density ∝ q(x)·S^r, which is where (S − a)₊ weighs most. For an integer r, S^r = b^(−r)·Σ over (J_1 … J_r) of Π_a
V_{J_a}, and so this is a mixture of N(Σ_a u_{J_a}, I) with weights ∝ exp(Σ_{a<c} G[J_a, J_c]). The J_a are drawn one after
the other, J_c with probability ∝ exp(Σ_{a<c} G[J_a, ·]); what that differs from the weights is W = Π_c s_c, s_c = mean_j
exp(Σ_{a<c} G[J_a, j]), and

    δ_remove = E[W·g(S)],   g(S) = S^(1−r)·(1 − a/S)₊ ≤ a^(1−r)·(r − 1)^(r−1)/r^r.

By Hölder's inequality s_c is at most max_i mean_j exp((c − 1)·G_ij). So every draw is bounded: rare events cannot hide. What
a draw does along Σ_a u_{J_a} is integrated by the trapezoid rule with a random start, whose mean is right; |t| > 6 is added
as a bound.
"""

import math

import numpy as np
from numpy.typing import NDArray

from fedcgd.accounting.balls_in_bins.draws import Bins, Sample, Seed, run_in_blocks
from fedcgd.mechanisms.mechanism import Matrix, Vector

_REACH, _STEP = 6.0, 0.75
_LEFT_OUT = 2e-9  # at least P(|t| > 6), t standard normal
_ROUNDING = 2e-5  # relative: single precision changes S by less
_LOWEST = -80.0  # log of what still counts in single precision
_LARGEST_EXPONENT = 300.0
_LARGEST_ORDER = 128
_NEARLY = 0.5  # log of what a larger order may cost in range: its draws vary less


def order_and_bound(gram: Matrix, epsilon: float) -> tuple[int, float]:
    """(r, log of the largest value of a draw) for the largest r whose bound is nearly the least; `gram` is G.

    The bound is also one on δ_remove itself, without drawing anything. (2, inf) if G is too large for floating point.
    """
    powers = np.exp(np.minimum(gram, _LARGEST_EXPONENT))
    top = float(np.diag(gram).max())
    product = np.ones_like(gram)
    log_weight, bounds = 0.0, {}
    for r in range(2, _LARGEST_ORDER + 1):
        if r * top > _LARGEST_EXPONENT:
            break
        product *= powers  # exp((r − 1)·G)
        log_weight += math.log(float(product.mean(axis=0).max()))
        bounds[r] = log_weight - (r - 1) * epsilon + (r - 1) * math.log(r - 1) - r * math.log(r)
        if bounds[r] > min(bounds.values()) + 5:
            break
    if not bounds:
        return 2, math.inf
    order = max(r for r, bound in bounds.items() if bound <= min(bounds.values()) + _NEARLY)
    return order, bounds[order]


def sample_remove(bins: Bins, sigma: float, epsilon: float, count: int, seed: Seed) -> Sample:
    """`count` draws with mean δ_remove. Raises ValueError if G = (⟨u_i, u_j⟩) is too large for floating point."""
    gram = bins.gram / sigma**2
    order, log_most = order_and_bound(gram, epsilon)
    if log_most == math.inf:
        raise ValueError(f"noise multiplier {sigma:g} is too small beside the columns of C")
    b, half = len(gram), np.diag(gram) / 2
    width = math.isqrt(b)  # of a block of bins
    powers = np.zeros((b, -(-b // width) * width))
    powers[:, :b] = np.exp(gram)
    # From −6 to 6, one V_j grows by at most e^(12·√top) beside another, so that those below e^(−80) of the largest never matter.
    single = 2 * _REACH * math.sqrt(float(np.diag(gram).max())) < -_LOWEST / 2
    precision = np.float32 if single else np.float64

    def draw(generator: np.random.Generator, size: int) -> Vector:
        rows = np.arange(size)
        y = bins.noise(generator, size).astype(np.float64)
        y /= sigma
        weights = np.ones((size, powers.shape[1]))  # exp(⟨u_j, Σ u_J⟩)
        weights[:, b:] = 0.0
        log_w, along, square = (
            np.zeros(size),
            np.zeros(size),
            np.zeros(size),
        )  # along: ⟨Σ u_J, x⟩ less its mean; |Σ u_J|²
        for _ in range(order):
            total, j = _one_of(weights, width, generator.random(size))
            log_w += np.log(total / b)
            square += 2 * np.log(weights[rows, j]) + gram[j, j]
            along += y[rows, j]
            weights *= powers[j]
        shift = np.log(weights[:, :b])
        length = np.sqrt(square)
        slope = shift / length[:, None]  # how y moves with t
        start = -_REACH + _STEP * generator.random(size)
        y += shift
        y -= half
        y += slope * (start - along / length)[:, None]
        highest = y.max(axis=1)
        y -= highest[:, None]
        v = np.exp(np.maximum(y, _LOWEST if single else -math.inf, out=y).astype(precision))
        growth = np.exp((_STEP * slope).astype(precision))
        values = np.zeros(size)
        for step in range(round(2 * _REACH / _STEP)):
            excess = np.maximum(np.log(v.mean(axis=1)) + highest - epsilon + _ROUNDING, 0.0)  # log S/a
            density = np.exp(-((start + step * _STEP) ** 2) / 2)
            values += density * -np.expm1(-excess) * np.exp((1 - order) * excess)
            v *= growth
        values *= _STEP / math.sqrt(2 * math.pi)
        return np.asarray(values * np.exp(log_w - (order - 1) * epsilon - log_most))

    rounding = 1 + 2 * _ROUNDING * order
    scale = math.exp(min(log_most, 700.0))
    most = (rounding + _LEFT_OUT) * (1 + 1e-9)  # the trapezoid rule gives at most 1 + 1e-14 for the normal density
    values = run_in_blocks(draw, count, b, seed) * rounding + _LEFT_OUT
    return Sample(np.minimum(values, most) * scale, most * scale, math.inf)


def _one_of(weights: Matrix, width: int, uniform: Vector) -> tuple[Vector, NDArray[np.intp]]:
    """The sum of each row and a column drawn in proportion to its entries, by blocks of `width`: fewer sums in sequence."""
    rows = np.arange(len(weights))
    blocks = (weights.reshape(-1, width) @ np.ones(width)).reshape(len(weights), -1)
    cumulative = np.cumsum(blocks, axis=1)
    total = cumulative[:, -1]
    threshold = uniform * total
    block = np.minimum((cumulative < threshold[:, None]).sum(axis=1), blocks.shape[1] - 1)
    threshold -= cumulative[rows, block] - blocks[rows, block]
    inside = np.cumsum(weights.reshape(len(weights), -1, width)[rows, block], axis=1)
    last = np.count_nonzero(inside[:, :-1] < np.minimum(threshold, inside[:, -1])[:, None], axis=1)
    return total, block * width + last
