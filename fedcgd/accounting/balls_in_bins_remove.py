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

from fedcgd.accounting.balls_in_bins_sampling import Bins, Sample, run_in_blocks
from fedcgd.mechanisms.mechanism import Matrix, Vector

_REACH, _STEP = 6.0, 0.75
_LEFT_OUT = 2e-9  # at least P(|t| > 6), t standard normal
_ROUNDING = 1e-5  # relative: single precision in y changes S by less
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


def sample_remove(bins: Bins, sigma: float, epsilon: float, count: int, seed: int) -> Sample:
    """`count` draws with mean δ_remove. Raises ValueError if G = (⟨u_i, u_j⟩) is too large for floating point."""
    gram = bins.gram / sigma**2
    order, log_most = order_and_bound(gram, epsilon)
    if log_most == math.inf:
        raise ValueError(f"noise multiplier {sigma:g} is too small beside the columns of C")
    b, half = len(gram), np.diag(gram) / 2
    powers = np.exp(gram)

    def draw(generator: np.random.Generator, size: int) -> Vector:
        rows = np.arange(size)
        y = bins.noise(generator, size).astype(np.float64) / sigma
        shift, weights, log_w = np.zeros((size, b)), np.ones((size, b)), np.zeros(size)
        along, square = np.zeros(size), np.zeros(size)  # ⟨Σ u_J, x⟩ without its mean, and |Σ u_J|²
        for c in range(order):
            cumulative = np.cumsum(weights, axis=1)
            total = cumulative[:, -1]
            log_w += np.log(total / b)
            threshold = generator.random(size) * total
            j = np.minimum((cumulative < threshold[:, None]).sum(axis=1), b - 1)
            square += 2 * shift[rows, j] + gram[j, j]
            along += y[rows, j]
            shift += gram[j]
            if c + 1 < order:
                weights *= powers[j]
        length = np.sqrt(square)
        slope = shift / length[:, None]  # how y moves with t
        start = -_REACH + _STEP * generator.random(size)
        log_v = y + shift - half + slope * (start - along / length)[:, None]
        highest = log_v.max(axis=1)
        v = np.exp(log_v - highest[:, None], out=log_v)
        growth = np.exp(_STEP * slope, out=slope)
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
