"""What several recorded runs cost the people who were in them, together."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedcgd.accounting import JointGuarantee, PastRun, compose
from fedcgd.ledger.store import reader
from fedcgd.plan import Plan


@dataclass(frozen=True, kw_only=True)
class UserGroup:
    """Users who were in the same runs, `ledgers`, and ε of those runs together for each of them."""

    ledgers: tuple[str, ...]
    users: int
    planned: JointGuarantee
    """If all rounds that were planned are released, whatever decides when a run stops."""
    released: JointGuarantee
    """For the rounds that are released so far, under its condition."""


@dataclass(frozen=True, kw_only=True)
class JointRecord:
    """What ledgers say together, for each group of users and for those with the largest ε."""

    groups: tuple[UserGroup, ...]
    """The largest planned ε first."""
    samplings: tuple[str, ...]
    simulated: bool

    @property
    def worst(self) -> UserGroup:
        """The users with the largest ε."""
        return self.groups[0]

    def to_description(self) -> dict[str, Any]:
        """All of it, as JSON-able values."""
        return asdict(self)


@dataclass(frozen=True)
class _Recorded:
    name: str
    plan: Plan
    released: int
    users: frozenset[str]
    simulated: bool


def joint(paths: Sequence[Path], *, delta: float | None = None, user: str | None = None) -> JointRecord:
    """The joint ε of the runs at `paths` for every user in them, or for one `user`; adjacency is add or remove one user.

    Users are the same if their ids are. Whoever was asked in a run is given that run's whole bound, however often it took part:
    how often depends on who was available, which may depend on data. With a secret sampling a user that was never drawn is also
    counted as in the run, for every user of any of the ledgers might have been drawn. `delta` is by default that of the plans.
    Raises ValueError if the plans have different δ and none is given, if one run is named twice, if nothing is recorded, and for
    what is no ledger.
    """
    runs = _recorded(paths)
    deltas = {run.plan.delta for run in runs}
    if delta is None and len(deltas) > 1:
        raise ValueError(f"the runs have different δ ({', '.join(f'{d:g}' for d in sorted(deltas))}); give one for all")
    everybody = frozenset().union(*(run.users for run in runs)) if user is None else frozenset({user})
    if user is not None and not any(user in run.users for run in runs):
        raise ValueError(f"no run has a user {user!r}")
    members = Counter(
        tuple(i for i, run in enumerate(runs) if one in run.users or run.plan.participation.sampling != "none")
        for one in everybody
    )
    if not members:
        raise ValueError("no users are on record: nobody was asked in any of the runs")
    target = delta if delta is not None else deltas.pop()
    groups = [
        UserGroup(
            ledgers=tuple(runs[i].name for i in inside),
            users=count,
            planned=compose([_past(runs[i], None) for i in inside], delta=target),
            released=compose([_past(runs[i], runs[i].released) for i in inside], delta=target),
        )
        for inside, count in members.items()
    ]
    return JointRecord(
        groups=tuple(sorted(groups, key=lambda group: -group.planned.epsilon)),
        samplings=tuple(str(run.plan.participation.sampling) for run in runs),
        simulated=any(run.simulated for run in runs),
    )


def _past(run: _Recorded, released: int | None) -> PastRun:
    past = PastRun(
        mechanism=run.plan.mechanism,
        participation=run.plan.participation,
        noise_multiplier=run.plan.noise_multiplier,
    )
    return past if released is None else replace(past, released=released)


def _recorded(paths: Sequence[Path]) -> list[_Recorded]:
    runs: list[_Recorded] = []
    streams: dict[str, Path] = {}
    for path in paths:
        with reader(path) as connection:
            text, stream_id, simulated = connection.execute("SELECT plan, stream_id, simulated FROM run").fetchone()
            (released,) = connection.execute("SELECT count(*) FROM attempts WHERE state = 'released'").fetchone()
            users = frozenset(user for (user,) in connection.execute("SELECT user FROM users"))
        if stream_id and stream_id in streams:
            raise ValueError(f"{path} and {streams[stream_id]} are ledgers of one run; give its latest, once")
        streams[stream_id] = path
        plan = Plan.from_description(json.loads(text))
        runs.append(_Recorded(str(path), plan, min(released, plan.participation.rounds), users, bool(simulated)))
    return runs
