"""Random allocation: in each of k epochs a user takes part in one round, secret, uniform and drawn anew."""

from fedcgd.participation.draws import one_of
from fedcgd.participation.promise import Promise
from fedcgd.participation.samplings.drawn import DrawnInAdvance
from fedcgd.participation.samplings.epochs import OneOfEachEpoch
from fedcgd.participation.samplings.sampling import Law


class RandomAllocation(OneOfEachEpoch, DrawnInAdvance):
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
        """b is 1."""
        if run.min_separation != 1:
            raise ValueError(
                "random-allocation has min_separation 1, since the last round of an epoch and the first of the next are "
                f"neighbours, got {run.min_separation}; leave it out"
            )
        super().check(run)

    def describe(self, run: Promise) -> str:
        """As the base class has it."""
        return f"n = {run.rounds} rounds, a user in one of each {self.spacing(run)}, drawn anew"

    def draw_rounds(self, user: str, run: Promise, key: bytes) -> tuple[int, ...]:
        """One of each epoch."""
        steps = self.spacing(run)
        return tuple(start + one_of(steps, key, f"epoch {start}", user) for start in range(0, run.rounds, steps))
