"""What the released sums are turned into: the lower-triangular A whose error A·C⁻¹Z is reported."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.support.numbers import as_float

Objective = Literal["rmse", "max-se"]
"""Which error an optimised mechanism is best at: the root mean square over all rounds, or that of the worst round."""


@dataclass(frozen=True)
class Workload:
    """A = S·diag(η)·M: heavy-ball momentum M[i, j] = β^(i−j), learning rates η, and the running sum S (all ones below).

    Row t of A·X is then where SGD stands after round t, starting from 0 (Appendix C of McKenna, "Scaling up the Banded Matrix
    Factorization Mechanism for Differentially Private ML", 2024, arXiv:2405.15913).

    Args:
        momentum: β in [0, 1).
        learning_rates: η of each round; () for 1 in every round. What is shorter than the run goes on with its last rate.

    Raises:
        ValueError: for numbers out of range.
        TypeError: for what is no number.
    """

    momentum: float = 0.0
    learning_rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "momentum", as_float("momentum", self.momentum))
        rates = tuple(as_float("each learning rate", rate) for rate in self.learning_rates)
        object.__setattr__(self, "learning_rates", rates)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}; 0 is none, and 0.9 is usual")
        if not all(math.isfinite(rate) and rate >= 0 for rate in self.learning_rates):
            raise ValueError(f"learning rates must be finite and not negative, got {self.learning_rates}")

    def rates(self, rounds: int) -> Vector:
        """η_t for each round.

        Args:
            rounds: n, the releases of the run.

        Returns:
            Shape (rounds,), float64.
        """
        if not self.learning_rates:
            return np.ones(rounds)
        rates = np.full(rounds, self.learning_rates[-1])
        given = np.array(self.learning_rates[:rounds])
        rates[: len(given)] = given
        return rates


PREFIX_SUMS = Workload()
