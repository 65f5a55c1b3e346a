"""What Balls-in-Bins accounting needs of C: the Gram matrix ⟨m_i, m_j⟩ of the bins' sums of columns."""

import numpy as np

from fedcgd.accounting.coverage import non_negative
from fedcgd.accounting.tolerances import TOLERANCES
from fedcgd.mechanisms import Mechanism, Toeplitz
from fedcgd.mechanisms.mechanism import Matrix
from fedcgd.mechanisms.sensitivity import sum_of_leftmost
from fedcgd.participation import Participation

_JITTER = 1e-11  # of the largest entry: rounding makes no eigenvalue negative


def bin_gram(mechanism: Mechanism, participation: Participation, released: int | None = None) -> Matrix:
    """G[i, j] = ⟨m_i, m_j⟩ with m_j = Σ_i C[:, j + ib] for the bins j < b, shape (b, b), float64.

    With `released`, of that many first rows of C: a bin whose rounds are all later has m_j = 0. O(n·b) time and O(n + b²)
    memory for Toeplitz C, O(n²) time and O(n·b) memory otherwise. Raises ValueError if an entry of C
    is negative, by more than rounding: then nobody has proven which pair of inputs is the worst.
    """
    n, b = participation.rounds, participation.min_separation
    end = n if released is None else released
    gram = (
        _toeplitz_gram(mechanism, n, b, end) if isinstance(mechanism, Toeplitz) else _dense_gram(mechanism, n, b, end)
    )
    # δ does not decrease when an entry of the Gram matrix grows (Kahane's inequality).
    gram[np.diag_indices(b)] += _JITTER * gram.max()
    return gram


def _toeplitz_gram(mechanism: Toeplitz, n: int, b: int, end: int) -> Matrix:
    c = non_negative(np.asarray(mechanism.coefficients(n), dtype=np.float64), mechanism.name, "balls-in-bins")
    total = sum_of_leftmost(c[:end], -(-end // b), b)  # m_j is m_0, moved down by j and cut at `end`
    gram = np.zeros((b, b))
    begun = min(b, end)
    for lag in range(begun):
        products = np.cumsum(total[: end - lag] * total[lag:])
        later = np.arange(lag, begun)
        gram[later - lag, later] = gram[later, later - lag] = products[end - later - 1]
    return gram


def _dense_gram(mechanism: Mechanism, n: int, b: int, end: int) -> Matrix:
    sums = np.zeros((end, b))
    step = max(1, TOLERANCES.memory.matrix // n)
    for epoch in range(0, end, b):
        for start in range(0, b, step):
            bins = np.arange(start, min(b, start + step))
            columns = non_negative(mechanism.columns(n, epoch + bins), mechanism.name, "balls-in-bins")
            sums[:, bins] += columns[:end]
    return np.asarray(sums.T @ sums)
