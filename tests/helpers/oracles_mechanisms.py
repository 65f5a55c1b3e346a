"""Slow and obvious: C by its definition, every participation pattern, and dense matrices. Shares no code with the library."""

import itertools
import math

import numpy as np


def square_root_series(n):
    """Coefficients of (1 − x)^(−1/2), from binomials."""
    return np.array([math.comb(2 * i, i) / 4**i for i in range(n)])


def toeplitz(coefficients, n):
    """Lower-triangular matrix with C[i, j] = coefficients[i − j]."""
    matrix = np.zeros((n, n))
    for i in range(n):
        for j in range(i + 1):
            if i - j < len(coefficients):
                matrix[i, j] = coefficients[i - j]
    return matrix


def normalized(matrix):
    """The matrix with columns of norm 1."""
    return matrix / np.sqrt((matrix**2).sum(axis=0))


def tree(n):
    """One row for each full dyadic block of rounds in [0, n): what tree aggregation releases."""
    rows = []
    size = 1
    while size <= n:
        starts = range(0, n - size + 1, size)
        rows += [[1.0 if start <= i < start + size else 0.0 for i in range(n)] for start in starts]
        size *= 2
    return np.array(rows)


def patterns(n, k, b):
    """Every set of at most k of the rounds 0 … n − 1, any two at least b apart."""
    for size in range(1, k + 1):
        for rounds in itertools.combinations(range(n), size):
            if all(later - earlier >= b for earlier, later in itertools.pairwise(rounds)):
                yield rounds


def sensitivity(c, k, b, released=None):
    """max over patterns and signs of ‖Σ ± C[:, i]‖: exact for one coordinate, and for C without negative Gram entries."""
    c = c[:released]
    best = 0.0
    for pattern in patterns(c.shape[1], k, b):
        chosen = c[:, pattern]
        for signs in itertools.product((1, -1), repeat=len(pattern) - 1):
            best = max(best, float(np.linalg.norm(chosen @ np.array([1, *signs]))))
    return best


def workload(n, momentum=0.0, rates=None):
    """A with row t = where SGD stands after round t, by running SGD on each unit vector."""
    matrix = np.zeros((n, n))
    for j in range(n):
        velocity = position = 0.0
        for t in range(n):
            velocity = momentum * velocity + (1.0 if t == j else 0.0)
            position += (1.0 if rates is None else rates[t]) * velocity
            matrix[t, j] = position
    return matrix
