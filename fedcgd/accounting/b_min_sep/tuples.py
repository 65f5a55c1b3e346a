"""Rounds of r users with weights exp(Σ_{a<c} K(P_a, P_c)), K = ⟨C1_P, C1_P′⟩/σ²: the r-th moment of S is their sum.

The pairs {a, c} are split into r − 1 perfect matchings. The weight is the geometric mean over these of exp((r − 1)·Σ K over the
matching), and so at most their arithmetic mean; and each of these is r/2 independent pairs (`pairs`). So pairs are drawn, and
accepted with the probability geometric mean over arithmetic mean, times exp((r − 1)·(K − K̃)) for each where K̃ is larger than
K. What is accepted has exactly the weights asked for, and the mean weight, E[S^r], is (E exp((r − 1)K̃))^(r/2) times the mean
of these probabilities. That alone bounds it: E[S^r] ≤ (E exp((r − 1)K))^(r/2), an instance of hypercontractivity.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcgd.accounting.b_min_sep.pairs import PairChain
from fedcgd.accounting.random_participation.columns import Columns
from fedcgd.accounting.random_participation.law import Turns
from fedcgd.accounting.random_participation.overlaps import overlaps
from fedcgd.mechanisms.mechanism import Vector


@dataclass(frozen=True, eq=False)
class Tuples:
    """Tuples of an even number r = `order` of users for one σ."""

    columns: Columns
    sigma: float
    order: int
    chain: PairChain

    @property
    def log_total(self) -> float:
        """log of at least E[S^r]. Infinite if it overflows."""
        return self.order / 2 * self.chain.log_total

    @property
    def cost(self) -> float:
        """About the time of a tuple, in units of that of a draw."""
        return self.order / 16

    def draw(self, generator: np.random.Generator, count: int) -> tuple[Turns, Vector]:
        """The rounds of the users of `count` tuples, shape (most, r, count), and the probability of each to be accepted."""
        r = self.order
        one, two, more = self.chain.draw(generator, count * r // 2)
        turns = np.concatenate([one, two], axis=1).reshape(len(one), r, count)
        products = overlaps(self.columns, turns) / self.sigma**2
        # The pairs drawn are users a and a + r/2: matching 0. Another would be as likely, and the labels mean nothing else.
        total = products.sum(axis=(1, 2)) / 2
        along = np.stack([products[:, a, c].sum(axis=1) for a, c in matchings(r)])
        exponents = (r - 1) * along
        top = exponents.max(axis=0)
        accepted = np.exp(total - top) / np.exp(exponents - top).mean(axis=0)
        accepted *= np.exp((r - 1) * along[0] - more.reshape(r // 2, count).sum(axis=0))
        return turns, np.minimum(accepted, 1.0)


def matchings(order: int) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """The pairs of 0 … `order` − 1 split into `order` − 1 perfect matchings, of which the first is {a, a + order/2}.

    By the circle method: one stays, the others turn.
    """
    half = order // 2
    found = []
    for turn in range(order - 1):
        ring = [0, *((i + turn) % (order - 1) + 1 for i in range(order - 1))]
        found.append([(ring[i], ring[order - 1 - i]) for i in range(half)])
    names = {old: new for i, (a, c) in enumerate(found[0]) for old, new in ((a, i), (c, i + half))}
    return [(np.array([names[a] for a, _ in pairs]), np.array([names[c] for _, c in pairs])) for pairs in found]
