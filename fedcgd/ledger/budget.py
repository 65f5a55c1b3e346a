"""A budget for people across runs: who was in earlier runs may be in the next one only as far as ε of all of them allows."""

import math
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedcgd.accounting.guarantee import check_delta, check_epsilon, rounded_up
from fedcgd.ledger.joint import check_runs, told, unnamed_runs
from fedcgd.ledger.recorded_run import BUDGET, RecordedRun, recorded
from fedcgd.ledger.registry import RegisteredRun
from fedcgd.ledger.run_composition import RunComposition
from fedcgd.ledger.store import reader, stored_run
from fedcgd.ledger.transactions import MEMORY
from fedcgd.noise.keys import NoiseKey
from fedcgd.plan import Plan
from fedcgd.support.numbers import plural

_MOST_NOISE = 1e4
"""Times the plan's noise: a run that is refused with so much more would be of no use."""
_PRECISION = 1e-4
"""Of the noise with which users are admitted."""


@dataclass(frozen=True)
class Admission:
    """Who may not take part in a run.

    Attributes:
        refused: their ids.
        configuration: what the run's configuration keeps about the budget (no users).
        cost: the least ε of earlier runs and this one together that a refused user would have; ∞ if nobody is refused.
        full_cost: the largest one: a joint budget that refuses nobody; 0 if nobody is refused.
        room: the largest ε, at the plan's δ, of a run that would refuse nobody; 0 if there is none. None if nobody is refused,
            and where a secret sampling counts, of which each ε takes long to find.
        notes: what the operator has to know about the earlier runs, and what changes no ε.
    """

    refused: frozenset[str]
    configuration: dict[str, Any]
    cost: float = math.inf
    full_cost: float = 0.0
    room: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JointBudget:
    """At most (ε, δ) for each user, for the runs in the ledgers `after` and the new one together.

    Whoever was asked in earlier runs may be asked in the new one if ε of those runs' whole plans and the new plan, composed, is
    within the budget (`fedcgd.accounting.compose`); others are refused. An earlier run with a secret sampling counts for
    everybody it might have asked, so that who is refused tells nothing about what was drawn. A run counts with its whole plan,
    also if it ended early: what decided its end may depend on a released model. A run that was copied and went on in two places
    counts with both, and with the rounds before once.

    Name every earlier run over the same people, and whatever else the key's register knows of: a run over others costs them
    nothing. Each must be over (all rounds released, or sealed), so that it asks nobody any
    more; and of two runs at one time neither would count the other. Users are the same if their ids are.

    Args:
        epsilon: ε of all runs together, in [1e-300, 1e15].
        delta: δ of all runs together, in [1e-300, 1).
        after: the ledgers of the earlier runs.

    Raises:
        ValueError: for ε or δ out of range.
        TypeError: for one path in place of a list.
    """

    epsilon: float
    delta: float
    after: Sequence[Path | str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check_epsilon(self.epsilon))
        object.__setattr__(self, "delta", check_delta(self.delta))
        if isinstance(self.after, str | Path):
            raise TypeError(f"after must be a list of ledgers, for example [{str(self.after)!r}]; got one path")

    def admission(self, plan: Plan, *, key: NoiseKey, ledger: Path | str = MEMORY) -> Admission:
        """Who may not take part in a run.

        Args:
            plan: that of the run.
            key: that of the run.
            ledger: its own record.

        Raises:
            ValueError: for earlier ledgers that cannot be read, contradict themselves or the register of their key, or are
                `ledger`; for runs that are not over, or simulations before a run that is none; if one of them counted a run that
                is not named, or a register (of `key`, or beside an earlier ledger) knows of one; and if nobody may take part.
        """
        paths = [Path(path) for path in self.after]
        for path in paths:
            if ledger != MEMORY and path.resolve() == Path(ledger).resolve():
                raise ValueError(f"{path} is this run's own ledger; after names those of earlier runs")
        runs = recorded(paths)
        for run in runs:
            _check_earlier(run, key)
        problems, notes, _ = check_runs(runs, key.runs)
        notes += _check_all_named(runs, key, ledger)
        if problems:
            raise ValueError(
                f"records contradict each other, and nobody can say what the runs cost: {'; '.join(problems)}"
            )
        ids = {run.id for run in runs}
        for run in runs:
            if unnamed := set(run.budget["after"]) - ids if run.budget else set():
                raise ValueError(
                    f"{run.name} came after {plural(len(unnamed), 'run that is', 'runs that are')} not named (streams "
                    f"{', '.join(sorted(unnamed))}); name all earlier ledgers: whoever was in those counts too"
                )
        description = {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "after": {run.id: run.plan.to_description() for run in runs},
        }
        new = RecordedRun(
            name="this run",
            id="this run",
            created="~",  # after all dates
            plan=plan,
            released=0,
            over=False,
            users=frozenset(),
            simulated=key.simulated,
            choices=(key.fingerprint, "" if key.simulated else "this run"),
            budget=description,
        )
        together = RunComposition([*runs, new])
        last = len(runs)
        users = frozenset[str]().union(*(run.users for run in runs))
        inside = {user: tuple(i for i in together.of(user) if i != last) for user in users}
        over = {group for group in set(inside.values()) if not together.admits(last, group)}
        costs = [together.epsilon([*group, last], self.delta) for group in over]
        nobody_asked = tuple(i for i in together.of(None) if i != last)
        if not together.admits(last, nobody_asked):
            epsilon = together.epsilon([*nobody_asked, last], self.delta)
            raise ValueError(
                f"nobody may take part: this plan{' and the earlier runs with a secret sampling' * bool(nobody_asked)} cost "
                f"ε ≤ {rounded_up(epsilon)} at δ = {self.delta:g}, and the joint budget is {self.epsilon:g}; raise it, or plan a "
                "smaller ε"
            )
        refused = frozenset(user for user in users if inside[user] in over)
        return Admission(
            refused=refused,
            configuration={BUDGET: description},
            cost=min(costs, default=math.inf),
            full_cost=max(costs, default=0.0),
            room=_room([*runs, new], over),
            notes=tuple(notes),
        )


def _room(runs: Sequence[RecordedRun], groups: Set[tuple[int, ...]]) -> float | None:
    """`Admission.room` for the last of the runs, if users in the earlier ones of each of `groups` are to be in it too."""
    *earlier, new = runs
    if not groups or any(run.sampled for run in runs):
        return None

    def admits(noise_multiplier: float) -> bool:
        plan = replace(new.plan, noise_multiplier=noise_multiplier)
        together = RunComposition([*earlier, replace(new, plan=plan)])
        return all(together.admits(len(earlier), group) for group in groups)

    too_little = new.plan.noise_multiplier
    enough = too_little * _MOST_NOISE
    if not admits(enough):
        return 0.0
    while enough > too_little * (1 + _PRECISION):
        middle = math.sqrt(too_little * enough)
        if admits(middle):
            enough = middle
        else:
            too_little = middle
    return replace(new.plan, noise_multiplier=enough).guarantee().epsilon


def _check_all_named(runs: Sequence[RecordedRun], key: NoiseKey, ledger: Path | str) -> list[str]:
    """Raise ValueError if a register knows of a run that began before this one and is not among `runs`; notes on later ones."""
    unnamed = unnamed_runs(runs, key.runs)
    own = None
    if ledger != MEMORY and Path(ledger).exists():
        with reader(ledger) as connection:  # it goes on
            own = stored_run(connection)
    others = [
        one
        for one in unnamed
        if (own is None or one.stream_id != own.stream_id) and (one.released or _may_begin_to_release(one))
    ]
    if earlier := [one for one in others if own is None or one.begun <= own.created]:
        raise ValueError(
            f"{told(earlier)}. Whoever was in {'it' if len(earlier) == 1 else 'those'} pays for it too: give the ledger in "
            "after= as well, sealed or finished, or delete one that has released nothing. If one is lost that has, nobody can "
            "say who was in its run: begin with other people, and with a key that has a register of its own"
        )
    if others:
        return [
            f"{told(others)}, begun since this one: for whoever is in both, ε is more than this budget counts. Begin later runs "
            "with a budget that names this one"
        ]
    return []


def _may_begin_to_release(run: RegisteredRun) -> bool:
    """Whether a run that has released nothing may go on: its ledger is where it was, and not sealed."""
    with suppress(ValueError), reader(run.ledger) as connection:
        stored = stored_run(connection)
        return stored.stream_id == run.stream_id and stored.sealed is None
    return False


def _check_earlier(run: RecordedRun, key: NoiseKey) -> None:
    if run.simulated and not key.simulated:
        raise ValueError(
            f"{run.name} is of a simulation: nothing in it was private, and no budget makes up for that. If no real person was "
            "in it, leave it out"
        )
    if not run.over:
        raise ValueError(
            f"{run.name} is of a run that may go on ({run.released} of {run.plan.participation.rounds} rounds are released) and "
            f"ask more users: let it finish, or end it with fedcgd ledger seal {run.name}"
        )
