"""Samplings without a secret: cohorts of a fixed size, filled from those who may take part."""

import heapq
from abc import abstractmethod
from typing import ClassVar

from fedcgd.participation.history import History
from fedcgd.participation.promise import Promise
from fedcgd.participation.samplings.sampling import Law, Sampling


class FilledCohorts(Sampling):
    """Exactly `cohort_size` users in each round, while users come and go. Anybody may know them."""

    law = Law.KNOWN
    absence: ClassVar[str] = (
        "Cohorts are filled up: in the place of a user who is not there at all somebody else is asked, and who is asked "
        "is not protected. What a user's data are, and whether they were used, is."
    )

    @abstractmethod
    def rank(self, run: Promise, round: int, user: str, history: History, key: bytes) -> tuple[int, int]:
        """Where `user` stands among those that may take part; the least are taken."""

    def cohort(
        self, run: Promise, round: int, available: set[str], history: History, *, cohort_size: int, key: bytes
    ) -> list[str] | None:
        """Users counted in this round, then those of least `rank`; None if fewer than `cohort_size` may take part."""
        candidates = self.eligible(run, round, available, history)
        if len(candidates) < cohort_size:
            return None

        def order(user: str) -> tuple[bool, tuple[int, int], str]:
            return history.last_rounds.get(user) != round, self.rank(run, round, user, history, key), user

        return sorted(heapq.nsmallest(cohort_size, candidates, key=order))
