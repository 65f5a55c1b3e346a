"""People across runs: what recorded runs cost them together, and a budget that keeps each within one ε."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcgd.accounting import JointGuarantee
from fedcgd.accounting.guarantee import check_delta, check_epsilon, rounded_up
from fedcgd.ledger.registry import RegisteredRun, read_register, register_beside
from fedcgd.ledger.run_composition import BUDGET, RecordedRun, RunComposition, recorded
from fedcgd.ledger.store import RunSettings, StoredRun, reader, stored_run
from fedcgd.ledger.texts import NAMED, Finding, about, finding, refuse
from fedcgd.ledger.verification import verify
from fedcgd.noise.keys import NoiseKey
from fedcgd.plan import Plan
from fedcgd.support.records import MEMORY
from fedcgd.support.untrusted import clean


@dataclass(frozen=True, kw_only=True)
class UserGroup:
    """Users who were in the same runs, and ε of those runs together for each of them.

    Attributes:
        ledgers: the ledgers of these runs.
        users: how many they are.
        planned: if all rounds that were planned are released, whatever decides when a run stops.
        released: for the rounds that are released so far, under its condition.
    """

    ledgers: tuple[str, ...]
    users: int
    planned: JointGuarantee
    released: JointGuarantee


@dataclass(frozen=True, kw_only=True)
class JointRecord:
    """What ledgers say together, for each group of users and for those with the largest ε.

    Attributes:
        groups: the users by the runs that they were in, the largest planned ε first.
        samplings: that of each run.
        simulated: whether the key of one of the runs came from a simulation seed: that run is not private.
        problems: where a run contradicts its own record, or the joint budget that it was begun with.
        notes: what contradicts nothing, and has to be known: as `verify` has them, which ledgers are copies of one run and which
            of them count, and which were compared with no register.
    """

    groups: tuple[UserGroup, ...]
    samplings: tuple[str, ...]
    simulated: bool
    problems: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()

    @property
    def worst(self) -> UserGroup:
        """The users with the largest ε."""
        return self.groups[0]

    def to_description(self) -> dict[str, Any]:
        """All of it, as JSON-able values."""
        groups = [
            vars(one) | {"planned": one.planned.to_description(), "released": one.released.to_description()}
            for one in self.groups
        ]
        return vars(self) | {"groups": groups}


def joint(
    paths: Sequence[Path], *, delta: float | None = None, user: str | None = None, register: Path | None = None
) -> JointRecord:
    """The joint ε of several runs for every user in them, or for one; adjacency: zero out one user.

    Users are the same if their ids are.

    - A user who was asked in a run is given that run's whole bound, however often it took part: how often depends on who was
      available, which may depend on data.
    - Private evaluations are runs of their own, and count with the run that they are of, named or not.
    - With a secret sampling a user that was never drawn is also counted as in the run, for every user of any of the ledgers might
      have been drawn, unless the run's budget refused it.
    - Simulations of one seed share their secret choices, and count as if those were known.
    - A run that is named twice, or with an older copy, counts once; copies that went on in two places count both.

    Args:
        paths: the ledgers.
        delta: δ of the joint guarantee; by default that of the plans.
        user: the id of one user; None for all.
        register: a register of keys' runs (noise.key.runs), for those of the ledgers that it knows; others are compared with one
            that lies next to them.

    Raises:
        ValueError: if the plans have different δ and none is given, if nothing is recorded, or no run has the user, if the ledger
            of a run's evaluations is missing, and for what is no ledger or, where one is named, no register.
    """
    if register is not None:
        read_register(register)  # a name that is misspelt is refused: the runs would be compared with nothing
    together = RunComposition(recorded(paths))
    runs = together.runs
    deltas = sorted({run.plan.delta for run in runs}) if delta is None else [delta]
    if len(deltas) > 1:
        raise refuse("several-deltas", deltas=", ".join(f"{d:g}" for d in deltas))
    everybody = frozenset().union(*(run.users for run in runs)) if user is None else frozenset({user})
    if user is not None and not any(user in run.users for run in runs):
        raise refuse("unknown-user", user=user)
    members = Counter(together.of(one) for one in everybody)
    if not members:
        raise refuse("no-users")
    problems, notes = check_runs(runs, register)
    if unnamed := [one for one in unnamed_runs(runs, register) if one.released]:
        (problems if any(together.budgets) else notes).append(finding("unnamed-runs", **_named(unnamed)))
    notes += [finding("went-apart", path=run.name) for run in runs if run.branch]
    notes += [finding("older-copy", path=run.name, copies=", ".join(run.copies)) for run in runs if run.copies]
    groups = [
        UserGroup(
            ledgers=tuple(runs[i].name for i in inside),
            users=count,
            planned=together.guarantee(inside, deltas[0]),
            released=together.guarantee(inside, deltas[0], released=True),
        )
        for inside, count in sorted(members.items())
    ]
    return JointRecord(
        groups=tuple(sorted(groups, key=lambda group: -group.planned.epsilon)),
        samplings=tuple(str(run.plan.participation.sampling) for run in runs),
        simulated=any(run.run.defined.simulated for run in runs),
        problems=(*problems, *_budget_problems(together, members)),
        notes=tuple(notes),
    )


def check_runs(runs: Sequence[RecordedRun], register: Path | None) -> tuple[list[Finding], list[Finding]]:
    """(What contradicts itself or its register, what is to be known besides), by the names of the ledgers.

    Of a run whose copies went on in two places a register knows one copy only, and none is compared.
    """
    copies = Counter(run.run_id for run in runs)
    problems: list[Finding] = []
    notes: list[Finding] = []
    for run in runs:
        path = Path(run.name)
        known_by = register_beside(path, register) if copies[run.run_id] == 1 else None
        found = verify(path, register=known_by)
        for one in (*found.problems, *found.notes, *([finding("no-register")] if known_by is None else [])):
            # A last model that was changed changes no ε: what was released is on record.
            harmless = one not in found.problems or one.reason == "model-differs"
            (notes if harmless else problems).append(about(path, one))
    return problems, notes


def unnamed_runs(runs: Sequence[RecordedRun], register: Path | None) -> list[RegisteredRun]:
    """The runs that `register`, or one beside one of the `runs`, knows of besides these."""
    beside = {register_beside(Path(run.name), register) for run in runs}
    ids = {run.run_id for run in runs}
    known = {
        one.stream_id: one
        for path in (beside | {register}) - {None}
        if path is not None and path.exists()
        for one in read_register(path)
        if one.stream_id not in ids
    }
    return sorted(known.values(), key=lambda one: one.begun)


def _named(unnamed: Sequence[RegisteredRun]) -> dict[str, Any]:
    """How many runs a register knows of that nobody has named, and the ledgers of the first of them."""
    ledgers = [f"{clean(one.ledger)} ({one.released} released)" for one in unnamed]
    return {"runs": len(unnamed), "ledgers": ", ".join(ledgers[:NAMED]) + ", …" * (len(ledgers) > NAMED)}


def _budget_problems(together: RunComposition, members: Mapping[tuple[int, ...], int]) -> Iterator[Finding]:
    """What contradicts the budgets that runs were begun with."""
    for i, run in enumerate(together.runs):
        budget = together.budgets[i]
        if budget is None:
            continue
        if missing := together.missing(i):
            yield finding("ledgers-missing", path=run.name, runs=len(missing), streams=", ".join(missing))
        # With all that they were in, counted by the budget or not: earlier runs that it did not name, later ones.
        beyond = [inside for inside in members if i in inside and not together.within_budget(i, inside)]
        if beyond:
            yield finding(
                "beyond-the-budget",
                path=run.name,
                budget=budget,
                users=sum(members[inside] for inside in beyond),
                runs=", ".join(sorted({together.runs[j].name for inside in beyond for j in inside if j != i})),
                cost=rounded_up(max(together.epsilon(inside, budget["delta"]) for inside in beyond)),
            )


_AFTER_ALL = "~"  # of dates


@dataclass(frozen=True)
class Admission:
    """Who may not take part in a run.

    Attributes:
        refused: their ids.
        configuration: what the run's configuration keeps about the budget (no users).
        cost: the least ε of earlier runs and this one together that a refused user would have; ∞ if nobody is refused.
        full_cost: the largest one: a joint budget that refuses nobody; 0 if nobody is refused.
        notes: what the operator has to know about the earlier runs, and what changes no ε.
    """

    refused: frozenset[str]
    configuration: dict[str, Any]
    cost: float = math.inf
    full_cost: float = 0.0
    notes: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JointBudget:
    """At most (ε, δ) for each user, for the runs in the ledgers `after` and the new one together.

    A user of earlier runs may be asked in the new one if ε of those runs' whole plans and the new plan, composed, is
    within the budget (`fedcgd.accounting.compose`); others are refused. An earlier run with a secret sampling counts for
    everybody it might have asked, so that who is refused tells nothing about what was drawn. A run counts with its whole plan,
    also if it ended early: what decided its end may depend on a released model. A run that was copied and went on in two places
    counts as two.

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
                is not named, or a register (of `key`, or next to an earlier ledger) knows of one; and if nobody may take part.
        """
        paths = [Path(path) for path in self.after]
        for path in paths:
            if ledger != MEMORY and path.resolve() == Path(ledger).resolve():
                raise refuse("own-ledger", path=path)
        runs = recorded(paths)
        for run in runs:
            if run.run.defined.simulated and not key.simulated:
                raise refuse("simulation-before", path=run.name)
            if not run.over:
                planned = run.plan.participation.rounds
                raise refuse("not-over", path=run.name, released=run.released, rounds=planned)
        problems, notes = check_runs(runs, key.runs)
        if problems:
            raise refuse("contradiction-before", problems="; ".join(problems))
        if ledger == MEMORY or not Path(ledger).exists():  # one that goes on was checked when it began
            _check_all_named(runs, key)
        ids = {run.id for run in runs}
        for run in runs:
            if unnamed := set(run.run.settings.get(BUDGET, {"after": ()})["after"]) - ids:
                raise refuse("unnamed-before", path=run.name, runs=len(unnamed), streams=", ".join(sorted(unnamed)))
        after = {run.id: run.plan.to_description() for run in runs}
        configuration = {BUDGET: {"epsilon": self.epsilon, "delta": self.delta, "after": after}}
        new = RecordedRun(
            name="this run",
            run_id="this run",
            run=StoredRun(
                RunSettings.from_plan(plan, configuration, key), "", "" if key.simulated else "this run", _AFTER_ALL
            ),
            plan=plan,
            users=frozenset(),
        )
        together = RunComposition([*runs, new])
        last = len(runs)
        users = frozenset[str]().union(*(run.users for run in runs))
        inside = {user: tuple(i for i in together.of(user) if i != last) for user in users}
        over = {group for group in set(inside.values()) if not together.admits(last, group)}
        costs = [together.epsilon([*group, last], self.delta) for group in over]
        nobody_asked = tuple(i for i in together.of(None) if i != last)
        if not together.admits(last, nobody_asked):
            cost = rounded_up(together.epsilon([*nobody_asked, last], self.delta))
            raise refuse(
                "nobody-may-take-part", runs=len(nobody_asked), cost=cost, delta=self.delta, epsilon=self.epsilon
            )
        return Admission(
            refused=frozenset(user for user in users if inside[user] in over),
            configuration=configuration,
            cost=min(costs, default=math.inf),
            full_cost=max(costs, default=0.0),
            notes=tuple(notes),
        )


def _check_all_named(runs: Sequence[RecordedRun], key: NoiseKey) -> None:
    """Raise ValueError if a register knows of a run that is not among `runs` and has released something, or may do so."""
    if others := [one for one in unnamed_runs(runs, key.runs) if one.released or _may_begin_to_release(one)]:
        raise refuse("unregistered-before", **_named(others))


def _may_begin_to_release(run: RegisteredRun) -> bool:
    """Whether a run that has released nothing may go on: its ledger is where it was, and not sealed."""
    with suppress(ValueError), reader(run.ledger) as connection:
        stored = stored_run(connection)
        return stored.stream_id == run.stream_id and stored.sealed is None
    return False
