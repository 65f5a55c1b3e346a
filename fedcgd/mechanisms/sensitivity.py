"""How much one user can move CX: the sensitivity of a mechanism under (k, b)-participation.

One user's updates form the rows of a matrix U, of norm at most 1 each, at rounds π that are at least b apart and at most k. The
sensitivity is the largest ‖Σ_{i∈π} C[:, i]·u_iᵀ‖_F over all such π and all unit vectors u_i. Its square is at most
Σ_{i,j∈π} |G_ij| with the Gram matrix G = CᵀC, and equal to that for the best π where G has no negative entries.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedcgd.mechanisms.adjoint import TERMS_SUMMED
from fedcgd.mechanisms.lambda_cgd import LambdaCGD
from fedcgd.mechanisms.mechanism import DENSE_LIMIT, Matrix, Mechanism, Vector
from fedcgd.mechanisms.normalized import Normalized
from fedcgd.mechanisms.toeplitz import Toeplitz, convolved, divided, padded
from fedcgd.mechanisms.worst_patterns import (
    Pattern,
    best_separated,
    gram_bound,
    lag_bound,
    leftmost,
    normalized_bound,
)
from fedcgd.participation import Participation

_LAG_STEPS = 2**28  # of a bound lag by lag; about two seconds
_BLOCK = 512  # columns of a Gram matrix that are found at once
_TIGHT = 1 + 1e-9  # a bound is called exact if a pattern attains it up to rounding


@dataclass(frozen=True)
class Sensitivity:
    """sens_{k,b}(C) for clip norm 1, or an upper bound on it.

    Attributes:
        value: the sensitivity, or the bound.
        exact: whether it is the sensitivity itself.
        method: in words, how it was found.
        pattern: rounds (from 0) at which a user reaches `value`, or comes near it where it is not exact.
    """

    value: float
    exact: bool
    method: str
    pattern: tuple[int, ...]


def sensitivity(mechanism: Mechanism, participation: Participation, *, released: int | None = None) -> Sensitivity:
    """The sensitivity of C when its first `released` rows are published (all, by default): never below the truth.

    Args:
        mechanism: the matrix C.
        participation: (n, k, b), of which the adversary chooses the worst rounds; its sampling does not count.
        released: how many rows of C are published; None for all.

    Returns:
        The sensitivity for clip norm 1, whether it is exact, how it was found, and the rounds that reach it.

    Raises:
        ValueError: if C is too large for a bound by its Gram matrix, and is not banded, Toeplitz, or Toeplitz with unit columns.

    >>> from fedcgd.mechanisms import DPSGD
    >>> sensitivity(DPSGD(), Participation(rounds=100, min_separation=25)).value
    2.0
    """
    n, b = participation.rounds, participation.min_separation
    rows = participation.rounds_released(released)
    if rows == 0:
        return Sensitivity(0.0, True, "nothing is released", ())
    k = participation.scheme.most_of(participation, rows)
    if isinstance(mechanism, Toeplitz):
        return _toeplitz(mechanism, n, rows, k, b)
    if type(mechanism) is Normalized:  # what a subclass overrides is not in these formulas
        p = mechanism.bandwidth(n)
        if p <= b and (k - 1) * b + p <= rows:
            return Sensitivity(
                math.sqrt(k), True, "unit columns that do not overlap within b rounds: √k", leftmost(k, b)
            )
        if type(mechanism.mechanism) is LambdaCGD:
            value = float(np.linalg.norm(_sum_of_columns(mechanism, n, rows, leftmost(k, b))))
            return Sensitivity(value, True, "leftmost columns (Lemma 8 of arXiv:2601.22334)", leftmost(k, b))
    return _any(mechanism, n, rows, k, b)


def sum_of_leftmost(coefficients: Vector, k: int, b: int) -> Vector:
    """Σ_{j<k} C[:, jb] for the Toeplitz C of these coefficients, in O(n).

    Args:
        coefficients: the first column of C, shape (n,).
        k: how many columns.
        b: how far they are apart.

    Returns:
        Shape (n,).
    """
    n = len(coefficients)
    total = np.cumsum(padded(coefficients, -(-n // b) * b).reshape(-1, b), axis=0)
    if k < len(total):
        total[k:] -= total[:-k].copy()
    result: Vector = total.reshape(-1)[:n]
    return result


def _toeplitz(mechanism: Toeplitz, n: int, rows: int, k: int, b: int) -> Sensitivity:
    # The first rows of C are the Toeplitz matrix of its first coefficients. Those are asked for at n, on which C may depend.
    c = np.asarray(mechanism.coefficients(n), dtype=np.float64)[:rows]
    first = leftmost(k, b)
    reached = float(np.linalg.norm(sum_of_leftmost(c, k, b)))
    non_negative = bool(np.all(c >= 0))
    if non_negative and np.all(np.diff(c) <= 0):
        return Sensitivity(reached, True, "leftmost columns (Theorem 1 of arXiv:2601.22334)", first)
    if int(np.flatnonzero(c)[-1]) < b:
        return _orthogonal(np.cumsum(c**2)[::-1], k, b)
    if non_negative and k == rows:
        return Sensitivity(reached, True, "all columns, which are not negative", first)
    # |c| below a non-increasing envelope: with it in place of c, no entry of a sum of columns gets smaller.
    envelope = np.maximum.accumulate(np.abs(c)[::-1])[::-1]
    bounds = [(float(np.linalg.norm(sum_of_leftmost(envelope, k, b))), "the non-increasing envelope of |c|", first)]
    if min(bounds)[0] > reached * _TIGHT and k * k * rows <= _LAG_STEPS:
        bounds.append((math.sqrt(lag_bound(c, k, b)), "the largest entries that each lag allows", first))
    # The Gram matrix knows signs and cut columns.
    if min(bounds)[0] > reached * _TIGHT and n <= DENSE_LIMIT:
        bounds.append(_by_gram(mechanism, n, rows, k, b))
    return _best(bounds, mechanism, n, rows)


def _any(mechanism: Mechanism, n: int, rows: int, k: int, b: int) -> Sensitivity:
    if mechanism.bandwidth(n) <= b:
        step = max(1, 2**22 // n)
        blocks = (mechanism.columns(n, np.arange(at, min(rows, at + step)))[:rows] for at in range(0, rows, step))
        return _orthogonal(np.concatenate([(block**2).sum(axis=0) for block in blocks]), k, b)
    bounds = []
    if type(mechanism) is Normalized and rows * k <= _LAG_STEPS:
        total = normalized_bound(mechanism.mechanism.coefficients(n), mechanism.column_norms(n), rows, k, b)
        bounds.append((math.sqrt(total), "the largest entries that each lag allows, with unit columns", leftmost(k, b)))
        found = _best(bounds, mechanism, n, rows)
        if found.exact or n > DENSE_LIMIT:
            return found
    if n > DENSE_LIMIT:
        raise ValueError(
            f"{mechanism.name} with {n} rounds has no known sensitivity formula, and a bound by its Gram matrix is limited to "
            f"{DENSE_LIMIT} rounds; use a Toeplitz mechanism, or one with at most b = {b} bands"
        )
    return _best([*bounds, _by_gram(mechanism, n, rows, k, b)], mechanism, n, rows)


def _orthogonal(squares: Vector, k: int, b: int) -> Sensitivity:
    """For columns with these squared norms that do not overlap if they are b apart, whatever their signs."""
    total, pattern = best_separated(squares, k, b)
    return Sensitivity(math.sqrt(total), True, "longest columns, which do not overlap within b rounds", pattern)


def _by_gram(mechanism: Mechanism, n: int, rows: int, k: int, b: int) -> tuple[float, str, Pattern]:
    c = mechanism.columns(n, np.arange(rows))[:rows]
    gram = _gram(c)
    del c
    if b == 1 and k == rows:
        total, pattern = float(np.abs(gram).sum()), leftmost(k, 1)
    else:
        total, pattern = gram_bound(np.abs(gram, out=gram), k, b)
    return math.sqrt(total), "the largest |Gram| entries that patterns allow", pattern


def _gram(c: Matrix) -> Matrix:
    """CᵀC of a lower-triangular C, a sixth of the work of the product."""
    n = len(c)
    gram = np.empty((n, n))
    for start in range(0, n, _BLOCK):
        stop = min(n, start + _BLOCK)
        part = c[start:, :stop].T @ c[start:, start:stop]
        gram[:stop, start:stop], gram[start:stop, :stop] = part, part.T
    return gram


def _best(bounds: list[tuple[float, str, Pattern]], mechanism: Mechanism, n: int, rows: int) -> Sensitivity:
    """The least of some bounds (value, method, pattern); exact if the sum of the columns of its pattern attains it."""
    value, method, pattern = min(bounds)
    exact = value <= float(np.linalg.norm(_sum_of_columns(mechanism, n, rows, pattern))) * _TIGHT
    return Sensitivity(value, exact, f"bound by {method}{', attained' if exact else ''}", pattern)


def _sum_of_columns(mechanism: Mechanism, n: int, rows: int, pattern: Pattern) -> Vector:
    """Σ_{i∈π} C[:, i], cut to the first `rows` rows."""
    at = np.array(pattern, dtype=np.intp)
    weights, total = np.zeros(rows), np.zeros(rows)
    if isinstance(mechanism, Toeplitz):
        weights[at] = 1.0
        return _times(mechanism, n, weights)
    if type(mechanism) is Normalized:
        weights[at] = 1 / mechanism.column_norms(n)[at]
        return _times(mechanism.mechanism, n, weights)
    step = max(1, 2**22 // n)
    for start in range(0, len(pattern), step):
        total += mechanism.columns(n, at[start : start + step])[:rows].sum(axis=1)
    return total


def _times(mechanism: Toeplitz, n: int, weights: Vector) -> Vector:
    """The first rows of C for n rounds, times `weights` of as many: O(n) for few bands of C⁻¹, else O(n log n) at most."""
    rows = len(weights)
    inverse, c = mechanism.inverse_coefficients(n), mechanism.coefficients(n)[:rows]
    if len(inverse) <= TERMS_SUMMED:
        return divided(inverse, weights)
    used = np.flatnonzero(weights)
    if len(used) * rows > _LAG_STEPS:
        return convolved(c, weights)
    total = np.zeros(rows)
    for j in used:
        total[j:] += weights[j] * c[: rows - j]
    return total
