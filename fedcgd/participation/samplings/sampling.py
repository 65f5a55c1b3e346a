"""What a sampling is: which numbers it takes, whose round it is, and what is said and promised of it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcgd.participation.history import History, within_limits
from fedcgd.participation.promise import Promise

Rows = NDArray[np.intp]

LEAST_RATE = 2.0**-64
"""Cohorts are drawn by 64 bits; and rates near the least double have no digits left to account by."""


class Law(Enum):
    """The distribution of a user's rounds, as an adversary sees it who knows all but them. Each has an accountant."""

    KNOWN = auto()
    """The adversary knows the rounds, and may choose them within (k, b): nothing is amplified."""
    COINS = auto()
    """A coin of probability q in every b-th round, independent of all else."""
    ONE_BIN = auto()
    """One of b bins, uniform, drawn once: rounds j, j + b, …"""
    RESTING_COINS = auto()
    """A coin of probability p in each round in which b rounds have passed since the last."""
    ONE_OF_EACH_EPOCH = auto()
    """One round of each epoch of n/k rounds, uniform, drawn anew."""


class Sampling(ABC):
    """How a user's rounds are chosen: a value without state. Its numbers are those of the `Promise` that each method takes.

    A new one is a subclass in a file of its own and a row in `fedcgd.participation.samplings.SAMPLINGS`.
    """

    name: ClassVar[str]
    """In Python, on the command line and in ledgers."""
    law: ClassVar[Law]
    """Which accountant its runs have."""
    hidden: ClassVar[str | None] = None
    """What of a user nobody may learn for ε to hold; None if nothing has to be secret."""
    assumption: ClassVar[str]
    """What the deployment must do for ε to hold."""
    absence: ClassVar[str] = (
        "Adding or removing the user altogether has the same ε: nobody else is asked more or less often for it, because each "
        "user's rounds are drawn without regard to the others, and nothing is divided by how many there are."
    )
    """What zeroing a user's updates says about a user who is not there at all."""
    takes_rate: ClassVar[bool] = False
    takes_warm_start: ClassVar[bool] = False
    takes_groups: ClassVar[bool] = False
    """Whether b is a number of groups, as many as C has bands."""
    has_bins: ClassVar[bool] = False
    """Whether every user has one bin, or group, and takes part only in rounds of its number modulo b."""

    def check(self, run: Promise) -> None:
        """Raise ValueError for numbers that the sampling does not take, or that contradict each other."""
        n, b, k, q = run.rounds, run.min_separation, run.max_participations, run.sampling_rate
        if not run.warm_start and not self.takes_warm_start:
            raise ValueError(f"warm_start=False does not apply to {self.name} sampling: leave it out")
        if self.takes_rate and (q is None or not LEAST_RATE <= q <= 1):
            raise ValueError(
                f"sampling_rate must be in (0, 1] for {self.name} sampling, and at least 2⁻⁶⁴, as a draw has 64 bits, got {q}: "
                "the part of users in a round"
            )
        if not self.takes_rate and q is not None:
            raise ValueError(f"sampling_rate does not apply to {self.name} sampling, got {q}: leave it out")
        most = math.ceil(n / b)
        if k is not None and not 1 <= k <= most:
            raise ValueError(
                f"max_participations must be between 1 and ⌈rounds / min_separation⌉ = {most} for {n} rounds {b} apart, got {k}; "
                "leave it out for the most"
            )

    def describe(self, run: Promise) -> str:
        """How often a user takes part, and how far apart, in words and numbers."""
        n, k, b = run.rounds, run.participations, run.min_separation
        return f"n = {n} rounds, a user in at most k = {k} of them, at least b = {b} apart"

    def spacing(self, run: Promise) -> int:
        """Rounds from one participation of a user to the next, about: b, if they are not nearer by chance."""
        return run.min_separation

    def most_of(self, run: Promise, rounds: int) -> int:
        """The most of the first so many rounds that a user takes part in."""
        return min(run.participations, -(-rounds // run.min_separation))

    def expected_rate(self, run: Promise) -> float | None:
        """The part of all users that a round is expected to have, once the start is over; None without a sampling."""
        return None

    def coin(self, run: Promise) -> float | None:
        """The probability with which a user of the round's group takes part; None where groups are drawn, or filled, already."""
        return None

    def default_separation(self, rounds: int, turns: Fraction) -> int:
        """b if it is left open, where a user takes part once in `turns` rounds, on average."""
        return 1

    def numbers(self, rounds: int, turns: Fraction, separation: int) -> dict[str, Any]:
        """What a `Participation` takes besides n and b, so that a user takes part once in `turns` ≥ b rounds, on average."""
        return {}

    def eligible(self, run: Promise, round: int, users: Iterable[str], history: History) -> list[str]:
        """The `users` that may take part in `round`. Users who are counted in this very round may when it is tried again."""
        return within_limits(run, round, users, history)

    def rounds_without_return(self, run: Promise, round: int) -> int:
        """How many rounds after `round` live on users who have not been asked yet; from then on they come back as they leave."""
        return run.min_separation - 1 - round

    @abstractmethod
    def cohort(
        self, run: Promise, round: int, available: set[str], history: History, *, cohort_size: int, key: bytes
    ) -> list[str] | None:
        """The users of `round`, sorted; None if it needs more of them. A pure function; `key` stands for all coin flips."""

    @abstractmethod
    def groups(self, run: Promise, names: Sequence[str], key: bytes, parts: int) -> list[Rows]:
        """Of a fixed population, all there: places of those who are in round t, or toss its coin, at t modulo the length.

        Args:
            run: n, b, k and q.
            names: of the users.
            key: stands for all coin flips.
            parts: into how many the users are split, where that is not drawn.
        """
