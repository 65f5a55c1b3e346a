"""Whether there are enough users for the rounds that are planned: each has k turns, b rounds apart."""

import math
from collections.abc import Collection, Mapping

from fedcgd.participation import Participation
from fedcgd.participation.cohorts import History, eligible
from fedcgd_flower.places import Nodes, nodes_of_all


def users_needed(participation: Participation, cohort_size: int) -> int:
    """The fewest users that all rounds can be done with, a full cohort each; 1 with a sampling, where cohorts vary."""
    if participation.sampling != "none":
        return 1
    n, k, b = participation.rounds, participation.participations, participation.min_separation
    return max(cohort_size * min(b, n), math.ceil(cohort_size * n / k))


def can_replace(
    participation: Participation, round: int, cohort: Collection[str], reachable: Collection[str], history: History
) -> bool:
    """Whether `cohort` may be asked in place of users who were asked in this round before, and later rounds still find theirs.

    Whoever was asked has had a turn, so replacing a user costs a turn more. From round b on, users come back as fast as they
    leave; the rounds before must live on those that have not been asked yet.
    """
    k, b, size = participation.participations, participation.min_separation, len(cohort)
    fresh = sum(history.last_rounds.get(user) != round for user in cohort)
    waiting = sum(history.last_rounds.get(user) != round for user in eligible(participation, round, reachable, history))
    turns = sum(k - history.counts.get(user, 0) for user in reachable)
    first_rounds = max(0, min(b, participation.rounds) - 1 - round)
    return waiting - fresh >= size * first_rounds and turns - fresh >= size * (participation.rounds - round - 1)


def too_few(
    participation: Participation,
    round: int,
    cohort_size: int,
    nodes: Mapping[str, Nodes],
    history: History,
    missing: str = "",
) -> str:
    """Why no cohort could be drawn: who is there, who of them may take part, and what keeps the others, `missing` ones too."""
    k, b = participation.participations, participation.min_separation
    used_up = sum(history.counts.get(user, 0) >= k and history.last_rounds[user] != round for user in nodes)
    held_back = sum(
        history.counts[user] < k and 0 < round - history.last_rounds[user] < b
        for user in nodes
        if user in history.counts
    )
    there = nodes_of_all(nodes)
    parts = [
        f"{len(nodes)} users are there at {len(there)} nodes and {len(nodes) - used_up - held_back} of them may "
        f"take part, of {cohort_size} for a cohort",
        f"{held_back} took part less than {b} rounds ago" if held_back else "",
        f"{used_up} have taken part {k} times, which is all they may" if used_up else "",
        missing,
    ]
    return "; ".join(part for part in parts if part)
