"""How much one user can move CX: the sensitivity of a mechanism under (k, b)-participation.

One user's updates form the rows of a matrix U, of norm at most 1 each, at rounds π that are at least b apart and at most k. The
sensitivity is the largest ‖Σ_{i∈π} C[:, i] u_iᵀ‖_F over all such π and all unit vectors u_i. Where the Gram matrix G = CᵀC has no
negative entries on π, the u_i are best all equal, and its square is Σ_{i,j∈π} G_ij; always it is at most Σ_{i,j∈π} |G_ij|.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

from fedcgd.mechanisms.lambda_cgd import LambdaCGD
from fedcgd.mechanisms.mechanism import Matrix, Mechanism, Toeplitz, Vector, bandwidth, matrix
from fedcgd.mechanisms.normalized import Normalized
from fedcgd.participation import Participation

DENSE_LIMIT = 8192  # rounds up to which a bound may use the whole Gram matrix (0.5 GiB)
_STATES = 4096  # of the dynamic program; beyond, the Gram bound is used


@dataclass(frozen=True)
class Sensitivity:
    """sens_{k,b}(C) for clip norm 1, or an upper bound on it.

    `pattern` holds rounds (from 0) at which a user reaches `value`, or would, if the bound were tight.
    """

    value: float
    exact: bool
    method: str
    pattern: tuple[int, ...]


def sensitivity(mechanism: Mechanism, participation: Participation, *, released: int | None = None) -> Sensitivity:
    """The sensitivity of C when its first `released` rows are published (all, by default): never below the truth.

    Only (n, k, b) of `participation` count: the rounds are chosen by the adversary. Raises ValueError if C is neither banded
    nor Toeplitz and too large for a bound by its Gram matrix.
    """
    n, b, k = participation.rounds, participation.min_separation, participation.participations
    rows = n if released is None else released
    if not 0 <= rows <= n:
        raise ValueError(f"released must be in 0 … {n}, got {released}")
    if rows == 0:
        return Sensitivity(0.0, True, "nothing is released", ())
    k = min(k, -(-rows // b))
    if isinstance(mechanism, Toeplitz):
        # The first rows of a Toeplitz matrix are the Toeplitz matrix of fewer rounds.
        return _toeplitz(mechanism, rows, k, b)
    if isinstance(mechanism, Normalized) and isinstance(mechanism.mechanism, LambdaCGD):
        return _normalized_lambda(mechanism, n, rows, k, b)
    if isinstance(mechanism, Normalized) and bandwidth(mechanism, n) <= b:
        method = "unit columns that do not overlap within b rounds: √k"
        return Sensitivity(float(np.sqrt(k)), rows == n, method, leftmost(k, b))
    p = bandwidth(mechanism, n)
    if _dp_states(p, b) <= _STATES and _non_negative_band(mechanism, n, p):
        value, pattern = _best_banded(_band_gram(mechanism, n, rows, p), k, b)
        return Sensitivity(value, True, "dynamic program over the band", pattern)
    return _gram_bound(mechanism, n, rows, k, b)


def leftmost(k: int, b: int) -> tuple[int, ...]:
    """Rounds 0, b, …, (k − 1)b."""
    return tuple(range(0, k * b, b))


def sum_of_leftmost(coefficients: Vector, k: int, b: int) -> Vector:
    """Σ_{j<k} C[:, jb] for the Toeplitz C of `coefficients`, shape (n,), in O(n)."""
    n = len(coefficients)
    padded = np.zeros(-(-n // b) * b)
    padded[:n] = coefficients
    epochs = padded.reshape(-1, b)
    total = np.cumsum(epochs, axis=0)
    total[k:] -= total[:-k].copy() if k < len(total) else 0
    result: Vector = total.reshape(-1)[:n]
    return result


def _toeplitz(mechanism: Toeplitz, n: int, k: int, b: int) -> Sensitivity:
    c = np.asarray(mechanism.coefficients(n), dtype=np.float64)
    if np.all(c >= 0) and np.all(np.diff(c) <= 0):
        value = float(np.linalg.norm(sum_of_leftmost(c, k, b)))
        return Sensitivity(value, True, "leftmost columns (Theorem 1 of arXiv:2601.22334)", leftmost(k, b))
    p = bandwidth(mechanism, n)
    if np.all(c >= 0) and _dp_states(p, b) <= _STATES and n * p <= 2**24:
        value, pattern = _best_banded(_band_gram(mechanism, n, n, p), k, b)
        return Sensitivity(value, True, "dynamic program over the band", pattern)
    # |c| below a non-increasing envelope: replacing c by it lengthens every sum of columns.
    envelope = np.maximum.accumulate(np.abs(c)[::-1])[::-1]
    value = float(np.linalg.norm(sum_of_leftmost(envelope, k, b)))
    bound = Sensitivity(value, False, "leftmost columns of the non-increasing envelope of |c|", leftmost(k, b))
    if n > DENSE_LIMIT:
        return bound
    return min(bound, _gram_bound(mechanism, n, n, k, b), key=lambda s: s.value)


def _normalized_lambda(mechanism: Normalized, n: int, rows: int, k: int, b: int) -> Sensitivity:
    # Rows that are not released yet only take away: for fewer rows the whole columns are a bound.
    columns = mechanism.columns(n, np.array(leftmost(k, b)))
    method = "leftmost columns (Lemma 8 of arXiv:2601.22334)" + ("" if rows == n else ", of all rounds")
    return Sensitivity(float(np.linalg.norm(columns.sum(axis=1))), rows == n, method, leftmost(k, b))


def _band_gram(mechanism: Mechanism, n: int, rows: int, p: int) -> Matrix:
    """G[i, i + l] for l < p and i < rows, shape (rows, p), over the first `rows` rows of C."""
    band = np.zeros((rows, p))  # band[j, l] = C[j + l, j]
    step = max(1, 2**22 // n)
    for start in range(0, rows, step):
        indices = np.arange(start, min(rows, start + step))
        columns = mechanism.columns(n, indices)[:rows]
        for at, j in enumerate(indices):
            part = columns[j : j + p, at]
            band[j, : len(part)] = part
    gram = np.zeros((rows, p))
    for lag in range(p):
        # C[:, i] and C[:, i + lag] share the rows i + lag … i + p − 1.
        gram[: rows - lag, lag] = np.einsum("ij,ij->i", band[: rows - lag, lag:], band[lag:, : p - lag])
    return gram


def _non_negative_band(mechanism: Mechanism, n: int, p: int) -> bool:
    step = max(1, 2**22 // n)
    return p < n and all(
        np.all(mechanism.columns(n, np.arange(start, min(n, start + step))) >= 0) for start in range(0, n, step)
    )


def _dp_states(p: int, b: int) -> int:
    """How many sets of rounds, at least b apart, fit in p − 1 consecutive rounds."""
    counts = [1] * max(p, 1)
    for length in range(1, p):
        counts[length] = counts[length - 1] + counts[max(length - b, 0)]
        if counts[length] > _STATES:
            return counts[length]
    return counts[max(p - 1, 0)]


def _best_banded(gram: Matrix, k: int, b: int) -> tuple[float, tuple[int, ...]]:
    """√max_π Σ_{i,j∈π} G_ij and its π, where G_ij = gram[i, j − i] vanishes for lags of p and more."""
    rows, p = gram.shape
    if p <= b:  # columns of different participations do not overlap
        total, pattern = _best_pattern(gram[:, 0], k, b)
        return float(np.sqrt(total)), pattern
    # (ages of the participations that still matter) → for each count, the best sum and its pattern.
    best: dict[tuple[int, ...], list[tuple[float, tuple[int, ...]] | None]] = {(): [(0.0, ()), *([None] * k)]}
    for i in range(rows):
        following: dict[tuple[int, ...], list[tuple[float, tuple[int, ...]] | None]] = {}
        for ages, totals in best.items():
            older = tuple(age + 1 for age in ages)
            options = [(older, False)]
            if not older or older[-1] >= b:
                options.append((older, True))
            gain = gram[i, 0] + 2 * sum(gram[i - age, age] for age in older if age < p)
            for ages_now, takes in options:
                kept = tuple(age for age in (*ages_now, *([0] if takes else [])) if age + 1 < p)
                slots = following.setdefault(kept, [None] * (k + 1))
                for count, found in enumerate(totals):
                    if found is None or (takes and count == k):
                        continue
                    candidate = (found[0] + gain, (*found[1], i)) if takes else found
                    place = count + takes
                    present = slots[place]
                    if present is None or candidate[0] > present[0]:
                        slots[place] = candidate
        best = following
    value, pattern = max(found for slots in best.values() for found in slots if found is not None)
    return float(np.sqrt(value)), pattern


def _gram_bound(mechanism: Mechanism, n: int, rows: int, k: int, b: int) -> Sensitivity:
    """√max_π Σ_{i∈π} W_i with W_i = max over patterns of Σ_{j} |G_ij|: at least Σ_{i,j∈π} |G_ij| for every π."""
    if n > DENSE_LIMIT:
        raise ValueError(
            f"{mechanism.name} with {n} rounds has no known sensitivity formula, and a bound by its Gram matrix is limited to "
            f"{DENSE_LIMIT} rounds; use a Toeplitz or banded mechanism"
        )
    c = matrix(mechanism, n)[:rows, :rows]
    gram = np.abs(c.T @ c)
    total, pattern = _best_pattern(_best_separated(gram, k, b), k, b)
    return Sensitivity(float(np.sqrt(total)), False, "sum of the largest |Gram| entries that patterns allow", pattern)


def _best_separated(values: Matrix, k: int, b: int) -> Vector:
    """For each row of non-negative `values`, the largest sum of at most k entries at least b apart."""
    count, n = values.shape
    fewer = np.zeros((n + 1, count))  # entry j: the best of the first j entries, with one participation fewer
    for _ in range(k):
        now = np.zeros((n + 1, count))
        for j in range(1, n + 1):
            np.maximum(now[j - 1], values[:, j - 1] + fewer[max(j - b, 0)], out=now[j])
        fewer = now
    return np.asarray(fewer[n])


def _best_pattern(values: Vector, k: int, b: int) -> tuple[float, tuple[int, ...]]:
    """The largest sum of at most k non-negative entries at least b apart, and their positions."""
    n = len(values)
    sums = np.zeros((k + 1, n + 1))
    for m, j in product(range(1, k + 1), range(1, n + 1)):
        sums[m, j] = max(sums[m, j - 1], values[j - 1] + sums[m - 1, max(j - b, 0)])
    pattern: list[int] = []
    m, j = k, n
    while m and j:
        if sums[m, j] > sums[m, j - 1]:
            pattern.append(j - 1)
            m, j = m - 1, max(j - b, 0)
        else:
            j -= 1
    return float(sums[k, n]), tuple(reversed(pattern))
