"""Which rounds would an adversary pick? Maxima over all participation patterns: at most k rounds, any two at least b apart.

Everything here works on the Gram matrix G = CᵀC of the columns that a pattern selects.
"""

import numpy as np
import scipy

from fedcgd.mechanisms.mechanism import Matrix, Vector

Pattern = tuple[int, ...]

_BLOCK = 256  # columns of G that are worked on at once


def leftmost(k: int, b: int) -> Pattern:
    """Rounds 0, b, …, (k − 1)b."""
    return tuple(range(0, k * b, b))


def best_separated(values: Vector, k: int, b: int) -> tuple[float, Pattern]:
    """The largest sum of at most k of the non-negative `values`, any two at least b apart, and where. O(n·k)."""
    n = len(values)
    k = min(k, -(-n // b))
    if np.all(np.diff(values) <= 0):
        return float(values[: k * b : b].sum()), leftmost(k, b)
    sums = [np.zeros(n + 1)]  # sums[m][j]: at most m among the first j
    for _ in range(k):
        sums.append(np.concatenate([[0.0], np.maximum.accumulate(values + _earlier(sums[-1], b))]))
    pattern: list[int] = []
    m, j = k, n
    while m and j:
        if sums[m][j] > sums[m][j - 1]:
            pattern.append(j - 1)
            m, j = m - 1, max(j - b, 0)
        else:
            j -= 1
    return float(sums[k][n]), tuple(reversed(pattern))


def _earlier(sums: Vector, b: int) -> Vector:
    """sums[max(j − b, 0)] for j = 1 … n, where `sums` has n + 1 rows."""
    n = len(sums) - 1
    kept = sums[1 : n - b + 1] if b < n else sums[:0]
    return np.concatenate([np.zeros((n - len(kept), *sums.shape[1:])), kept])


def lag_bound(coefficients: Vector, k: int, b: int) -> float:
    """At least Σ_{i,j∈π} |G_ij| for every pattern π of the Toeplitz C of `coefficients`. O(k·n log n + k²·n).

    With |c| for c, G_ij is at most T(j − i) = Σ_{l < n − j} c_l·c_{l + j − i}, and round m of a pattern is not before m·b. So
    round m adds at most T(0) plus twice the best m separated values of T at lags of b and more, with n − m·b terms in each T.
    """
    c = np.abs(coefficients)
    n, total = len(c), 0.0
    length = scipy.fft.next_fast_len(2 * n, real=True)
    spectrum = np.fft.rfft(c, length)
    for m in range(k):
        head = c[: n - m * b]
        square = float(head @ head)
        total += square
        if m:
            products = np.fft.irfft(spectrum * np.fft.rfft(head, length).conj(), length)[b:n]
            # The transform rounds by a few units in the last place of ‖c‖‖head‖ in each of its log₂(length) stages.
            products = np.maximum(products, 0) + 2e-16 * np.log2(length) * np.sqrt(square) * np.linalg.norm(c)
            total += 2 * best_separated(products, m, b)[0]
    return total


def normalized_bound(coefficients: Vector, norms: Vector, rows: int, k: int, b: int) -> float:
    """At least Σ_{i,j∈π} |G_ij| for every π, where column j of C is `coefficients` from row j on, cut to `rows`, over norms[j].

    O(k·n), for non-increasing norms. With e ≥ |c| non-increasing, |G_ij| is at most H(j, j − i) for i ≤ j, where
    H(j, l) = Σ_{t < rows − j} e_t·e_{t + l} / (norms[j − l]·norms[j]) does not grow with l: numerator smaller, norms larger.
    Participations m and m + r are at least r·b apart and the later is in round (m + r)·b or after, so that their entry is at most
    max_{j ≥ (m + r)b} H(j, r·b). Where norms are those of c, and c is positive, non-increasing and log-convex (λ-CGD, the square
    root, …), H grows with n − j, also if only the first rows count: so the leftmost columns attain the bound.
    """
    e = np.maximum.accumulate(np.abs(coefficients[:rows])[::-1])[::-1]
    total = 0.0
    for r in range(k):
        lag = r * b
        shared = np.cumsum(e[: rows - lag] * e[lag:])[::-1]
        entries = shared / (norms[: rows - lag] * norms[lag:rows])  # entry j − lag for round j
        largest = np.maximum.accumulate(entries[::-1])[::-1]
        total += (2 if r else 1) * float(largest[: (k - r - 1) * b + 1 : b].sum())
    return total


def gram_bound(gram: Matrix, k: int, b: int) -> tuple[float, Pattern]:
    """At least Σ_{i,j∈π} gram_ij for every pattern π, where gram ≥ 0, and the π that would attain it. O(k·n²).

    If j is round m of a pattern, it adds gram_jj and twice at most the best m separated entries of column j before j − b.
    """
    n = len(gram)
    added = np.zeros((k, n))  # added[m, j]: the most that j adds as round m
    added[:] = np.diag(gram)
    for start in range(0, n, _BLOCK):
        stop = min(n, start + _BLOCK)
        rows = stop - b
        if rows <= 0:
            continue
        # Row j of the block is column start + j, of which entries i ≤ start + j − b are kept.
        block = np.tril(gram[:rows, start:stop].T, start - b)
        sums = np.zeros((stop - start, rows + 1))
        for m in range(1, k):
            if (m - 1) * b < rows:  # no more separated entries than that fit
                following = block.copy()
                if rows > b:
                    following[:, b:] += sums[:, 1 : rows - b + 1]
                np.maximum.accumulate(following, axis=1, out=sums[:, 1:])
            added[m, start:stop] += 2 * sums[:, -1]
    # The best choice of one round for each m, b apart: `reached[m][j]` uses rounds 0 … m, the last of them at most j.
    reached: list[Vector] = []
    for m in range(k):
        before = np.zeros(n)
        if m:
            before[:] = -np.inf
            before[b:] = reached[-1][: n - b]
        reached.append(np.maximum.accumulate(added[m] + before))
    last = max(range(k), key=lambda m: float(reached[m][-1]))
    pattern: list[int] = []
    j = n - 1
    for m in range(last, -1, -1):
        j = int(np.searchsorted(reached[m][: j + 1], reached[m][j]))
        pattern.append(j)
        j -= b
    return float(reached[last][-1]), tuple(reversed(pattern))
