"""In which rounds users took part so far, and who may take part in the next one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fedcgd.participation.promise import Promise
from fedcgd.participation.user_ids import check_not_one_text


@dataclass(frozen=True)
class History:
    """In how many rounds each user took part, and in which one last. Users that are missing never did."""

    counts: Mapping[str, int] = field(default_factory=dict)
    last_rounds: Mapping[str, int] = field(default_factory=dict)

    def with_round(self, round: int, users: Iterable[str]) -> "History":
        """The history after `users` took part in `round`; a round that is tried again counts once."""
        check_not_one_text(users)
        counts, last_rounds = dict(self.counts), dict(self.last_rounds)
        for user in users:
            if last_rounds.get(user) != round:
                counts[user] = counts.get(user, 0) + 1
                last_rounds[user] = round
        return replace(self, counts=counts, last_rounds=last_rounds)


def within_limits(run: Promise, round: int, users: Iterable[str], history: History) -> list[str]:
    """Those of `users` with fewer than k participations, the last at least b rounds ago, or counted in this very round."""
    k, b = run.participations, run.min_separation
    counts, last_rounds = history.counts, history.last_rounds
    allowed = []
    for user in users:
        last = last_rounds.get(user, -b)
        if last == round or (counts.get(user, 0) < k and round - last >= b):
            allowed.append(user)
    return allowed
