"""Binary-tree aggregation as a lower-triangular mechanism."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcgd.mechanisms.mechanism import Matrix, Mechanism, Vector, check_dense, triangular_inverse


@dataclass(frozen=True)
class BinaryTree(Mechanism):
    """Binary-tree aggregation with the best linear estimate of every prefix from all nodes.

    Honaker, "Efficient Use of Differentially Private Binary Trees", 2015 (no arXiv number).

    The tree releases the noisy sum of every full dyadic block of rounds that ends within n rounds, by a matrix T of zeros and
    ones. C is the lower-triangular matrix with CᵀC = TᵀT. Only the Gram matrix counts for the sensitivity, and for the error of
    the least-squares estimate: ‖A·C⁻¹‖ = ‖A·T⁺‖. So C has the privacy and the error of the tree with the completed estimate, and
    is run round by round with one buffer for each binary digit of the round.
    """

    name = "tree"

    def columns(self, rounds: int, indices: NDArray[np.intp]) -> Matrix:
        # C[t, j] depends on the height of the smallest block that holds both t and j: for each height the rows t are neighbours.
        shared = _shared(rounds)
        entries = np.ascontiguousarray((shared / np.sqrt(shared[:, :1])).T)
        transposed = np.zeros((len(indices), rounds))
        for column, j in zip(transposed, np.asarray(indices).tolist(), strict=True):
            column[j] = entries[0, j]
            for height in range(1, (rounds - 1).bit_length() + 1):
                first = (j >> height << height) + 2 ** (height - 1)
                if first > j:  # j is in the left half of its block of this height, and they are the right half
                    rows = slice(first, first + 2 ** (height - 1))
                    column[rows] = entries[height, rows]
        return transposed.T

    def inverse_row(self, round: int, rounds: int) -> Vector:
        return _inverse(rounds)[round, round::-1]

    def num_buffers(self, rounds: int) -> int:
        """One for each binary digit of the last round."""
        return (rounds - 1).bit_length()

    def inverse_bandwidth(self, rounds: int) -> int:
        return rounds

    def multiply_next(self, round: int, rounds: int, z: Any, buffers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        shared = _shared(rounds)[round]
        digits = [digit for digit in range(round.bit_length()) if round >> digit & 1]
        # Buffer i is the sum of C⁻¹Z over the last full block of 2^digits[i] rounds, which digit i of the round counts.
        y = z * float(shared[0]) ** -0.5
        for digit, block in zip(digits, buffers, strict=True):
            y = y - block * float(shared[digit + 1] / shared[0])
        full = y
        blocks = list(zip(digits, buffers, strict=True))
        digit = 0
        while blocks and blocks[0][0] == digit:
            full = full + blocks.pop(0)[1]
            digit += 1
        return y, (full, *(block for _, block in blocks))


@lru_cache(maxsize=2)
def _shared(rounds: int) -> Matrix:
    """S with C[t, j] = S[t, h]/√S[t, 0] for j ≤ t, where h binary digits of t and j differ (all from digit h up are equal).

    Row t of the reversed Cholesky factor is a Schur complement over √S[t, 0]: with "later" for t + 1 and after,
    G[t, :t + 1] − G[t, later]·G[later, later]⁻¹·G[later, :t + 1]. The factors on both sides are sums of indicators 1_a of blocks
    a that hold t and reach beyond it. So only K[a, a'] = 1_aᵀ·G[later, later]⁻¹·1_a' is needed, log₂(n)² numbers (`within`);
    it changes by one rank from t + 1 to t.
    """
    height = np.arange(rounds.bit_length())
    shared = np.zeros((rounds, len(height) + 1))
    within = np.zeros((len(height), len(height)))
    for t in range(rounds - 1, -1, -1):
        released = ((t >> height) + 1) << height <= rounds
        reaching = (t >> height) == (t + 1) >> height
        within *= reaching[:, None] & reaching[None, :]
        rest = np.where(released, 1 - within.sum(axis=0), 0.0)
        shared[t, :-1] = np.cumsum(rest[::-1])[::-1]
        within += np.outer(rest, rest) / shared[t, 0]
    shared.setflags(write=False)
    return shared


@lru_cache(maxsize=2)
def _inverse(rounds: int) -> Matrix:
    check_dense("tree", rounds)
    return triangular_inverse(BinaryTree().columns(rounds, np.arange(rounds)))
