"""Samplings whose rounds are all drawn before the first one, from the key and the user's name alone."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from fedcgd.participation.history import History
from fedcgd.participation.promise import Promise
from fedcgd.participation.samplings.sampling import Rows, Sampling


class DrawnInAdvance(Sampling):
    """A user takes part in its rounds if it is there. Draws know nothing of who is there, of other users and of releases.

    Users who were drawn but are away are not replaced: replacements would tell who was drawn. They have spent that round.
    """

    @abstractmethod
    def draw_rounds(self, user: str, run: Promise, key: bytes) -> Sequence[int]:
        """The rounds of `user`, ascending."""

    def rounds_of(self, user: str, run: Promise, key: bytes) -> Sequence[int]:
        """`draw_rounds`, which are asked for in every round."""
        return _rounds_of(self, user, run, key)

    def cohort(
        self, run: Promise, round: int, available: set[str], history: History, *, cohort_size: int, key: bytes
    ) -> list[str]:
        """All who drew `round`, unless a limit to their rounds, or a history of another run, forbids it."""
        drawn = {user for user in available if round in self.rounds_of(user, run, key)}
        return sorted(self.eligible(run, round, drawn, history))

    def groups(self, run: Promise, names: Sequence[str], key: bytes, parts: int) -> list[Rows]:
        """Who drew each round."""
        found: list[list[int]] = [[] for _ in range(run.rounds)]
        for place, name in enumerate(names):
            for round in self.draw_rounds(name, run, key):
                found[round].append(place)
        return [np.array(places, dtype=np.intp) for places in found]


@lru_cache(maxsize=2**17)
def _rounds_of(sampling: DrawnInAdvance, user: str, run: Promise, key: bytes) -> Sequence[int]:
    return sampling.draw_rounds(user, run, key)
