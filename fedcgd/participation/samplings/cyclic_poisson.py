"""Cyclic Poisson sampling: groups take turns, and each user of the round's group tosses a coin."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from fedcgd.participation.draws import DRAWS, bin_of, draw
from fedcgd.participation.history import History
from fedcgd.participation.promise import Promise
from fedcgd.participation.samplings.none import equal_parts
from fedcgd.participation.samplings.sampling import Law, Rows, Sampling


class CyclicPoisson(Sampling):
    """In round t each user of group t mod b takes part with probability q."""

    name = "cyclic-poisson"
    law = Law.COINS
    hidden = "the coins"
    takes_rate = True
    takes_groups = True
    has_bins = True
    assumption = (
        "Users are split into groups once, which the adversary may know; in its group's rounds each user tosses its "
        "own coin, independently of everything else. The deployment must keep the outcomes secret (also the size of "
        "the cohort), must not move users between groups, must not fill up or cut cohorts, must not replace absent "
        "users, and must divide by a fixed number."
    )

    def check(self, run: Promise) -> None:
        """Nothing but coins bounds a user's rounds."""
        if run.max_participations is not None:
            raise ValueError(f"max_participations does not apply to {self.name} sampling; give sampling_rate")
        super().check(run)

    def describe(self, run: Promise) -> str:
        """As the base class has it."""
        groups = f", users in {run.min_separation} groups that take turns" if self.takes_groups else ""
        return f"n = {run.rounds} rounds{groups}, a user in each with probability q = {run.sampling_rate:.6g}"

    def expected_rate(self, run: Promise) -> float:
        """q/b."""
        return self.coin(run) / run.min_separation

    def numbers(self, rounds: int, turns: Fraction, separation: int) -> dict[str, Any]:
        """q = b/turns: a user's group comes every b rounds."""
        return {"sampling_rate": float(separation / turns)}

    def cohort(
        self, run: Promise, round: int, available: set[str], history: History, *, cohort_size: int, key: bytes
    ) -> list[str]:
        """All of the round's group whose coin says so; who is away is not replaced, which would tell who was drawn."""
        b = run.min_separation
        limit = int(self.coin(run) * DRAWS)  # exact, then rounded down: never above the accounted rate
        in_group = (user for user in available if bin_of(user, b, key) == round % b)
        return sorted(user for user in in_group if draw(key, f"round {round}", user) < limit)

    def groups(self, run: Promise, names: Sequence[str], key: bytes, parts: int) -> list[Rows]:
        """A fixed random split, whose users toss the coins of their rounds."""
        return equal_parts(names, key, run.min_separation)

    def coin(self, run: Promise) -> float:
        """q."""
        assert run.sampling_rate is not None  # noqa: S101
        return run.sampling_rate
