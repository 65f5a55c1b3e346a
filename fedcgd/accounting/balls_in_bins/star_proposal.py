"""Bins (J_1 … J_r), drawn with weights exp(Σ_{a<c} G[J_a, J_c]): r points that attract each other.

With R_a = Σ_{c≠a} G[J_a, J_c], the weight is the geometric mean over a of exp(r/2·R_a), and so at most their arithmetic mean.
Each of these is a star: given its centre J_a the other J_c are independent, with weights exp(r/2·G[J_a, ·]). So stars are drawn,
and accepted with the probability geometric mean over arithmetic mean. What is accepted has exactly the weights asked for, and
the mean weight over all bins, E[S^r] of `remove`, is `total` times the mean of these probabilities.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedcgd.accounting.random_participation.law import Turns
from fedcgd.accounting.tolerances import TOLERANCES
from fedcgd.mechanisms.mechanism import Matrix, Vector


@dataclass(frozen=True, eq=False)
class StarProposal:
    """Stars of `order` bins for G = `gram`/σ². Rows of leaves are made where they are needed: a table of all takes b² numbers."""

    gram: Matrix
    sigma: float
    order: int
    log_total: float
    """log of the mean weight of stars over all (J_1 … J_r): at least that of E[S^r]."""
    _centres: Vector

    @staticmethod
    def from_gram(gram: Matrix, sigma: float, order: int) -> "StarProposal":
        """With an infinite total if order/2·G overflows."""
        bins, pull = len(gram), order / 2 / sigma**2
        means = [_leaves(gram[rows], pull).mean(axis=1) for rows in _parts(bins)]
        weights = (order - 1) * np.log(np.concatenate(means))
        top = float(weights.max())
        centres = np.cumsum(np.exp(weights - top))
        total = top + math.log(centres[-1] / bins) if pull * gram.max() < 700 else math.inf
        return StarProposal(gram, sigma, order, total, centres / centres[-1])

    @property
    def cost(self) -> float:
        """About the time of a star, in units of that of a draw."""
        return self.order * (1 + self.order / 14) * 2 / len(self.gram)

    def draw(self, generator: np.random.Generator, count: int) -> tuple[Turns, Vector]:
        """`count` stars, shape (1, order, count), in the order of their centres, and the probability of each to be accepted.

        Tables have 53 bits: the probability of any event is off by at most 1e-13·order·bins.
        """
        bins, r, pull = len(self.gram), self.order, self.order / 2 / self.sigma**2
        points = np.empty((r, count), dtype=np.intp)
        points[0] = np.minimum(np.searchsorted(self._centres, np.sort(generator.random(count))), bins - 1)
        drawn, which = np.unique(points[0], return_inverse=True)
        wanted = generator.random((r - 1, count)) + which
        for part in _parts(len(drawn)):
            # Row after row: the cumulative weights of the leaves, row i from i to i + 1.
            rows = np.cumsum(_leaves(self.gram[drawn[part]], pull), axis=1)
            rows /= rows[:, -1:]
            rows += np.arange(len(drawn))[part, None]
            here = slice(*np.searchsorted(which, [part.start, part.stop]))
            leaf = np.searchsorted(rows.ravel(), wanted[:, here]) - (which[here] - part.start) * bins
            points[1:, here] = np.clip(leaf, 0, bins - 1)
        flat, pulls = self.gram.ravel(), np.zeros((r, count))
        for a in range(r):
            row = points[a] * bins
            for c in range(a + 1, r):
                each = flat[row + points[c]]
                pulls[a] += each
                pulls[c] += each
        pulls *= pull
        pulls -= pulls.max(axis=0)
        return points[None].astype(np.int32), np.minimum(np.exp(pulls.mean(axis=0)) / np.exp(pulls).mean(axis=0), 1.0)


def _parts(rows: int) -> Iterator[slice]:
    return (slice(start, start + TOLERANCES.memory.rows) for start in range(0, rows, TOLERANCES.memory.rows))


def _leaves(rows: Matrix, pull: float) -> Matrix:
    """The weights of leaves, for some centres."""
    found = rows * pull
    return np.asarray(np.exp(np.minimum(found, 700.0, out=found), out=found))
