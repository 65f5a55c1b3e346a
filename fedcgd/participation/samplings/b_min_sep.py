"""Random b-min-separation: a coin in each round in which at least b rounds have passed since a user's last."""

import math
from fractions import Fraction
from typing import Any

from fedcgd.participation.draws import uniform
from fedcgd.participation.promise import Promise
from fedcgd.participation.samplings.drawn import DrawnInAdvance
from fedcgd.participation.samplings.sampling import Law

TWO_THIRDS = Fraction(2, 3)
"""Of the rounds until a user's next turn: b if it is left open. A larger b spaces a user's rounds more evenly, which correlated
noise profits from, and a smaller one leaves more to chance, which is what amplifies. Where it was measured (accounting's tables)
two thirds had the least error; a third had 1 % more, and nine tenths 2 to 9 % more."""


class BMinSep(DrawnInAdvance):
    """In each round that is at least b after its last, a user takes part with probability p.

    How many rounds it waits, once it may take part, is geometric with rate p. With a warm start the round from which it may is
    drawn at first, so that a round expects r = 1/(1/p + b − 1) of the users from the start.
    """

    name = "b-min-sep"
    law = Law.RESTING_COINS
    hidden = "the coins"
    takes_rate = True
    takes_warm_start = True
    assumption = (
        "Each user tosses its own coin in each round in which it may take part again, independently of everything else: of other "
        "users, of who is there, and of what was released. The deployment must keep the coins secret (also the size of the "
        "cohort), must count a user who is drawn but away as having taken part (so that it rests), must "
        "not fill up or cut cohorts, must not replace absent users, and must divide by a fixed number. A limit "
        "to a user's rounds may be kept."
    )

    def describe(self, run: Promise) -> str:
        """As the base class has it."""
        start = "a warm start" if run.warm_start else "all free at the start"
        return (
            f"n = {run.rounds} rounds, a user in each, at least b = {run.min_separation} after its last, with probability p = "
            f"{run.sampling_rate:.6g} (in {self.expected_rate(run):.6g} of all rounds; {start})"
        )

    def expected_rate(self, run: Promise) -> float:
        """r."""
        assert run.sampling_rate is not None  # noqa: S101
        return 1 / (1 / run.sampling_rate + run.min_separation - 1)

    def default_separation(self, rounds: int, turns: Fraction) -> int:
        """Two thirds of `turns`."""
        return max(1, min(rounds, int(turns * TWO_THIRDS)))

    def numbers(self, rounds: int, turns: Fraction, separation: int) -> dict[str, Any]:
        """p = 1/(turns − b + 1)."""
        return {"sampling_rate": float(1 / (turns - separation + 1))}

    def draw_rounds(self, user: str, run: Promise, key: bytes) -> tuple[int, ...]:
        """Fixed before the first round: waiting times in place of coins, of the same law."""
        n, b, p = run.rounds, run.min_separation, run.sampling_rate
        assert p is not None  # noqa: S101
        free = 0
        if run.warm_start:
            # Round 1, …, b − 1 with probability r each, and else 0.
            free = int(uniform(key, "first round", user) / self.expected_rate(run)) + 1
            free = free if free < b else 0
        found: list[int] = []
        while free < n:
            if p < 1:
                free += int(math.log(uniform(key, f"wait {len(found)}", user)) / math.log1p(-p))
            if free < n:
                found.append(free)
            free += b
        return tuple(found)
