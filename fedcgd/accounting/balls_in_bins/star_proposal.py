"""Bins (J_1 … J_r), drawn with weights exp(Σ_{a<c} G[J_a, J_c]): r points that attract each other.

With R_a = Σ_{c≠a} G[J_a, J_c], the weight is the geometric mean over a of exp(r/2·R_a), and so at most their arithmetic mean.
Each of these is a star: given its centre J_a the other J_c are independent, with weights exp(r/2·G[J_a, ·]). So stars are drawn,
and accepted with the probability geometric mean over arithmetic mean. What is accepted has exactly the weights asked for, and
the mean weight over all bins, E[S^r] of `remove`, is `total` times the mean of these probabilities.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedcgd.accounting.random_participation.law import Turns
from fedcgd.mechanisms.mechanism import Matrix, Vector


@dataclass(frozen=True, eq=False)
class StarProposal:
    """Stars of `order` bins for G = `gram`."""

    gram: Matrix
    order: int
    log_total: float
    """log of the mean weight of stars over all (J_1 … J_r): at least that of E[S^r]."""
    _centres: Vector
    _leaves: Vector
    """Row after row: the cumulative weights of the leaves, row i from i to i + 1."""

    @staticmethod
    def from_gram(gram: Matrix, order: int) -> "StarProposal":
        """With an infinite total if order/2·G overflows."""
        bins = len(gram)
        leaves = order / 2 * gram
        np.exp(np.minimum(leaves, 700.0, out=leaves), out=leaves)
        weights = (order - 1) * np.log(leaves.mean(axis=1))
        top = float(weights.max())
        centres = np.cumsum(np.exp(weights - top))
        np.cumsum(leaves, axis=1, out=leaves)
        leaves /= leaves[:, -1:]
        leaves += np.arange(bins)[:, None]
        total = top + math.log(centres[-1] / bins) if order / 2 * gram.max() < 700 else math.inf
        return StarProposal(gram, order, total, centres / centres[-1], leaves.ravel())

    @property
    def cost(self) -> float:
        """About the time of a star, in units of that of a draw."""
        return self.order * (1 + self.order / 14) * 2 / len(self.gram)

    def draw(self, generator: np.random.Generator, count: int) -> tuple[Turns, Vector]:
        """`count` stars, shape (1, order, count), in the order of their centres, and the probability of each to be accepted.

        Tables have 53 bits: the probability of any event is off by at most 1e-13·order·bins.
        """
        bins, r = len(self.gram), self.order
        points = np.empty((r, count), dtype=np.intp)
        points[0] = np.minimum(np.searchsorted(self._centres, np.sort(generator.random(count))), bins - 1)
        first = points[0] * bins
        for a in range(1, r):
            leaf = np.searchsorted(self._leaves, generator.random(count) + points[0]) - first
            np.clip(leaf, 0, bins - 1, out=points[a])
        flat, pulls = self.gram.ravel(), np.zeros((r, count))
        for a in range(r):
            row = points[a] * bins
            for c in range(a + 1, r):
                pull = flat[row + points[c]]
                pulls[a] += pull
                pulls[c] += pull
        pulls *= r / 2
        pulls -= pulls.max(axis=0)
        return points[None].astype(np.int32), np.minimum(np.exp(pulls.mean(axis=0)) / np.exp(pulls).mean(axis=0), 1.0)
