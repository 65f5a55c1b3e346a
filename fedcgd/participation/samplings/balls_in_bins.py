"""Balls-in-Bins: a user falls in one secret, uniform bin of b and takes part in its rounds in every epoch."""

from fractions import Fraction
from typing import Any

from fedcgd.participation.draws import bin_of
from fedcgd.participation.promise import Promise
from fedcgd.participation.samplings.drawn import DrawnInAdvance
from fedcgd.participation.samplings.sampling import Law


class BallsInBins(DrawnInAdvance):
    """Rounds j, j + b, … for the bin j of a user; n = k·b."""

    name = "balls-in-bins"
    law = Law.ONE_BIN
    hidden = "the bin"
    has_bins = True
    assumption = (
        "Each user falls in one bin, uniformly at random and independently of the others, before the first round, and "
        "takes part in the rounds of that bin in every epoch: bins are reused, not drawn again. The deployment must "
        "keep the bins secret (nobody who sees a release may see who trained when), must not replace users who are "
        "absent by others (an absent user's update is zero), must not let the number of answers decide whether a "
        "round is released, and must divide by a fixed number."
    )

    def check(self, run: Promise) -> None:
        """n is a multiple of b, and k is n/b."""
        n, b, k = run.rounds, run.min_separation, run.max_participations
        if n % b:
            raise ValueError(
                f"balls-in-bins needs rounds to be a multiple of the {b} bins (min_separation), got {n}; "
                f"use {n - n % b or b} or {n + b - n % b} rounds"
            )
        super().check(run)
        if k is not None and k * b != n:
            raise ValueError(
                f"balls-in-bins has max_participations · min_separation = rounds, got {k} · {b} ≠ {n}; "
                f"a user takes part in every one of the {n // b} epochs: leave max_participations out"
            )

    def expected_rate(self, run: Promise) -> float:
        """1/b."""
        return 1 / run.min_separation

    def default_separation(self, rounds: int, turns: Fraction) -> int:
        """A bin for each round until a user's next turn."""
        return min(int(turns), rounds)

    def numbers(self, rounds: int, turns: Fraction, separation: int) -> dict[str, Any]:
        """b alone gives the cohorts."""
        if separation != (bins := self.default_separation(rounds, turns)):
            raise ValueError(
                f"min_separation must be {bins} for balls-in-bins, the rounds until a user's next participation, got "
                f"{separation}; leave it out"
            )
        return {}

    def draw_rounds(self, user: str, run: Promise, key: bytes) -> range:
        """Those of the user's bin."""
        return range(bin_of(user, run.min_separation, key), run.rounds, run.min_separation)

    rounds_of = draw_rounds  # found sooner than looked up
