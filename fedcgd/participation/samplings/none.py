"""No sampling: anybody may know, and choose, who takes part when."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from fedcgd.participation.draws import draw
from fedcgd.participation.history import History
from fedcgd.participation.promise import Promise
from fedcgd.participation.samplings.filled import FilledCohorts
from fedcgd.participation.samplings.sampling import Rows


class NoSampling(FilledCohorts):
    """Those first who took part least, and among equals in a random order that stays the same for the run.

    So nobody's participations run out before everybody's do, and if all users are always there and cohorts divide them, the first
    rounds split them as central training splits its examples.
    """

    name = "none"
    assumption = (
        "None is assumed: the adversary may know, and even choose, the rounds in which each user takes part. Nothing "
        "about the cohorts has to be secret or random."
    )

    def default_separation(self, rounds: int, turns: Fraction) -> int:
        """All the rounds until a user's next turn."""
        return min(int(turns), rounds)

    def rank(self, run: Promise, round: int, user: str, history: History, key: bytes) -> tuple[int, int]:
        """Fewest participations, then the run's order."""
        return history.counts.get(user, 0), draw(key, "order", user)

    def groups(self, run: Promise, names: Sequence[str], key: bytes, parts: int) -> list[Rows]:
        """A fixed split in a random order, the same in every epoch."""
        return equal_parts(names, key, parts)


def equal_parts(names: Sequence[str], key: bytes, parts: int) -> list[Rows]:
    """Places of `names`, split in parts of equal size, or one more, in a random order; each ascending."""
    order = np.argsort(np.array([draw(key, "order", name) for name in names], np.uint64), kind="stable")
    return [np.sort(part) for part in np.array_split(order, parts)]
