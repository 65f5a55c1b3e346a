"""Which users take part in a round: keeps the promise that the accounting relies on, whoever comes and goes."""

import hashlib
import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from fedcgd.participation import Participation
from fedcgd.participation.user_ids import check_not_one_text

_DRAWS = 2**64


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


def eligible(participation: Participation, round: int, users: Iterable[str], history: History) -> list[str]:
    """The `users` that may take part in `round`: fewer than k participations, the last at least b rounds ago.

    Whoever is already counted in this very round may take part when it is tried again.
    """
    check_not_one_text(users)
    k, b = participation.participations, participation.min_separation
    counts, last_rounds = history.counts, history.last_rounds
    allowed = []
    for user in users:
        last = last_rounds.get(user, -b)
        if last == round or (counts.get(user, 0) < k and round - last >= b):
            allowed.append(user)
    return allowed


def cohort(
    participation: Participation,
    round: int,
    available: Iterable[str],
    history: History,
    *,
    cohort_size: int,
    key: bytes,
) -> list[str] | None:
    """The users of `round`, sorted; None if `sampling` is "none" and fewer than `cohort_size` may take part.

    A pure function of its arguments, not of their order; `key` (a secret of at most 64 bytes) stands for all coin
    flips. Without sampling, `cohort_size` users are drawn from those eligible: first those already counted in this
    round, then those with the fewest participations, and among equals in a random order that stays the same for the run. So
    nobody's participations run out before everybody's do, and if all users are always there and cohorts divide them, the first
    rounds split them as central training splits its examples (`place`). With sampling the rule alone decides:

    - Balls-in-Bins: all of bin `round` mod b. A user's bin is secret, uniform, and the same in every epoch.
    - Poisson: each user with probability q. Cyclic Poisson: each user of group `round` mod b with probability q.
    - b-min-sep: all whose coins fall on `round` (`rounds_of`). Coins know nothing of who is there: a user who is drawn but away
      has spent its coin, and rests as if it had taken part.
    - Random allocation: all who drew `round` in this epoch (`rounds_of`). Who is away then has no other round of the epoch.

    Users who were drawn but are away are not replaced: replacements would tell who was drawn. A retry of a round draws
    the same users. Guarantee: no sequence of calls, whatever is available, lets a user exceed `participation`, if each
    result is in the `history` of the next call.
    """
    check_not_one_text(available)
    check_round(participation, round)
    b = participation.min_separation
    match participation.sampling:
        case "none":
            candidates = eligible(participation, round, set(available), history)
            if len(candidates) < cohort_size:
                return None

            def order(user: str) -> tuple[bool, int, int, str]:
                fresh = history.last_rounds.get(user) != round
                return fresh, history.counts.get(user, 0), place(user, key), user

            return sorted(heapq.nsmallest(cohort_size, candidates, key=order))
        case "balls-in-bins":
            drawn = {user for user in available if bin_of(user, b, key) == round % b}
            return sorted(
                eligible(participation, round, drawn, history)
            )  # all of them, unless the history is of another run
        case "poisson" | "cyclic-poisson":
            assert participation.sampling_rate is not None
            limit = int(
                participation.sampling_rate * _DRAWS
            )  # exact, then rounded down: never above the accounted rate
            in_group = {user for user in available if bin_of(user, b, key) == round % b}
            return sorted(user for user in in_group if _draw(key, f"round {round}", user) < limit)
        case "b-min-sep" | "random-allocation":
            drawn = {user for user in available if round in rounds_of(user, participation, key)}
            return sorted(eligible(participation, round, drawn, history))  # at most k times, if there is such a limit


def bin_of(user: str, bins: int, key: bytes) -> int:
    """The bin or group of `user`, uniform in 0 … `bins` − 1 to whoever does not know `key`."""
    return _draw(key, "bin", user) * bins // _DRAWS


@lru_cache(maxsize=2**17)
def rounds_of(user: str, participation: Participation, key: bytes) -> tuple[int, ...]:
    """The rounds that `user` draws for the whole run, ascending: under b-min-sep, or one of each epoch under random allocation.

    Under b-min-sep they are at least b apart. How many rounds it waits, once it may take part, is geometric with rate p: as a
    coin in each of them. All follow from `key` and `user` alone, so that they are fixed before the first round, are the same
    when they are asked for again, and do not depend on releases, on who is available, or on other users.
    """
    n, b, p = participation.rounds, participation.min_separation, participation.sampling_rate
    if participation.sampling == "random-allocation":
        steps = n // participation.participations
        return tuple(start + _draw(key, f"epoch {start}", user) * steps // _DRAWS for start in range(0, n, steps))
    assert p is not None
    assert participation.expected_rate is not None
    free = 0
    if participation.warm_start:
        # Round 1, …, b − 1 with probability r each, and else 0.
        free = int(_uniform(key, "first round", user) / participation.expected_rate) + 1
        free = free if free < b else 0
    found: list[int] = []
    while free < n:
        if p < 1:
            free += int(math.log(_uniform(key, f"wait {len(found)}", user)) / math.log1p(-p))
        if free < n:
            found.append(free)
        free += b
    return tuple(found)


def _uniform(key: bytes, purpose: str, user: str) -> float:
    """In (0, 1], with 64 bits."""
    return (_draw(key, purpose, user) + 1) / _DRAWS


def place(user: str, key: bytes) -> int:
    """Where `user` stands in the random order of a run without sampling: 64 bits, compared."""
    return _draw(key, "order", user)


def check_round(participation: Participation, round: int) -> None:
    """Raise ValueError for a round outside the plan."""
    if not 0 <= round < participation.rounds:
        raise ValueError(
            f"round must be in 0 … {participation.rounds - 1}, got {round}; what comes after is not accounted for"
        )


def _draw(key: bytes, purpose: str, user: str) -> int:
    """64 bits, uniform and independent for each (purpose, user) to whoever does not know `key`: keyed BLAKE2b."""
    text = f"{purpose}\0{user}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=key).digest(), "big")
