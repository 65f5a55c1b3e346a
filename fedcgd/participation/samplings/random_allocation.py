"""Random allocation: in each of k epochs a user takes part in one round, secret, uniform and drawn anew."""

from fractions import Fraction
from typing import Any

from fedcgd.participation.draws import one_of
from fedcgd.participation.promise import Promise
from fedcgd.participation.samplings.drawn import DrawnInAdvance
from fedcgd.participation.samplings.sampling import Law


class RandomAllocation(DrawnInAdvance):
    """One of the n/k rounds of each epoch. b = 1: the last round of an epoch and the first of the next are neighbours."""

    name = "random-allocation"
    law = Law.ONE_OF_EACH_EPOCH
    hidden = "the rounds"
    assumption = (
        "In each epoch each user draws one of its rounds, uniformly and independently of everything else. The deployment must "
        "keep secret who drew what (also the size of the cohort), must draw anew in each epoch, must not fill up or cut "
        "cohorts to a fixed size, must not replace absent users or give them another round, and must divide by a fixed number."
    )

    def check(self, run: Promise) -> None:
        """b is 1, and k divides n."""
        if run.min_separation != 1:
            raise ValueError(
                "random-allocation has min_separation 1, since the last round of an epoch and the first of the next are "
                f"neighbours, got {run.min_separation}; leave it out"
            )
        check_epochs(self.name, run)
        super().check(run)

    def describe(self, run: Promise) -> str:
        """As the base class has it."""
        return f"n = {run.rounds} rounds, a user in one of each {self.spacing(run)}, drawn anew"

    def spacing(self, run: Promise) -> int:
        """n/k, the rounds of an epoch; those of two epochs may be nearer."""
        return run.rounds // run.participations

    def expected_rate(self, run: Promise) -> float:
        """k/n."""
        return run.participations / run.rounds

    def numbers(self, rounds: int, turns: Fraction, separation: int) -> dict[str, Any]:
        """Epochs of ⌊turns⌋ rounds."""
        return {"max_participations": rounds // int(turns)}

    def draw_rounds(self, user: str, run: Promise, key: bytes) -> tuple[int, ...]:
        """One of each epoch."""
        steps = self.spacing(run)
        return tuple(start + one_of(steps, key, f"epoch {start}", user) for start in range(0, run.rounds, steps))


def check_epochs(name: str, run: Promise) -> None:
    """Raise ValueError unless k is given and divides n."""
    n, k = run.rounds, run.max_participations
    if k is None or not 1 <= k <= n or n % k:
        raise ValueError(f"{name} needs max_participations, the number of epochs, that divides the {n} rounds; got {k}")
