"""δ of removing a user under Balls-in-Bins, E_Q[(S − a)₊], bounded without drawing anything, by moments of S.

Q = N(0, I), u_j = m_j/σ, y_j = ⟨u_j, x⟩ with covariance G, V_j = exp(y_j − G_jj/2), S = dP/dQ = mean_j V_j, a = e^ε.
"""

import math

import numpy as np

from fedcgd.accounting.effort import BINS
from fedcgd.accounting.random_participation.tuples import largest_of_power
from fedcgd.mechanisms.mechanism import Matrix

_LARGEST_EXPONENT = 300.0
_LARGEST_ORDER = 128


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
        elif r == 3 and len(gram) <= BINS.triples:
            log_moment = math.log(float(np.mean(powers * (powers @ powers))) / len(gram))
        else:
            log_moment += math.log(float(product.mean(axis=0).max()))
        bound = log_moment + largest_of_power(r) - (r - 1) * epsilon
        least = min(least, bound)
        if bound > least + 5:
            break
    return least
