"""Samplings of k epochs, in each of which a user takes part in one round."""

from fractions import Fraction
from typing import Any

from fedcgd.participation.promise import Promise
from fedcgd.participation.samplings.sampling import Sampling


class OneOfEachEpoch(Sampling):
    """k has to be given, and divides n: an epoch has n/k rounds. Rounds of two epochs may be neighbours."""

    def check(self, run: Promise) -> None:
        """k divides n."""
        n, k = run.rounds, run.max_participations
        if k is None or not 1 <= k <= n or n % k:
            raise ValueError(
                f"{self.name} needs max_participations, the number of epochs, that divides the {n} rounds; got {k}"
            )
        super().check(run)

    def spacing(self, run: Promise) -> int:
        """n/k, the rounds of an epoch."""
        return run.rounds // run.participations

    def most_of(self, run: Promise, rounds: int) -> int:
        """One of each epoch that has begun."""
        return -(-rounds // self.spacing(run))

    def expected_rate(self, run: Promise) -> float:
        """k/n."""
        return run.participations / run.rounds

    def numbers(self, rounds: int, turns: Fraction, separation: int) -> dict[str, Any]:
        """Epochs of ⌊turns⌋ rounds."""
        return {"max_participations": rounds // int(turns)}
