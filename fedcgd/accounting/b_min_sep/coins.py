"""The law of one user's rounds: a coin in each round in which at least b rounds have passed since the last one."""

from dataclasses import dataclass

import numpy as np

from fedcgd.mechanisms.mechanism import Vector


@dataclass(frozen=True)
class Coins:
    """A user who may take part does so with probability `rate`; then `separation` rounds pass until it may again.

    With a warm start the first round in which it may is such that the expected cohort is the same in every round: 1, …,
    b − 1 with probability r each, and else 0, for r = 1/(1/p + b − 1). With a cold start it is 0 for everybody.
    """

    rounds: int
    separation: int
    rate: float
    warm: bool

    @property
    def expected_rate(self) -> float:
        """r: the part of rounds in which a user takes part, in the long run."""
        return 1 / (1 / self.rate + self.separation - 1)

    def first_chances(self) -> Vector:
        """The probability that a user may take part first in round 0, 1, …, b − 1; shape (b,)."""
        chances = np.zeros(self.separation)
        if self.warm:
            chances[1:] = self.expected_rate
        chances[0] = 1 - chances.sum()
        return chances
