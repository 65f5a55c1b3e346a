"""People across runs: who was in which recorded run, what runs cost them together, and a budget that keeps each within one ε.

A run whose releases are also evaluated on its users' data has two ledgers, and one ε of both together.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedcgd.accounting import JointGuarantee, PastRun, compose
from fedcgd.accounting.guarantee import Proof, check_delta, check_epsilon, rounded_up
from fedcgd.ledger.attempts import nonces_of
from fedcgd.ledger.registry import RegisteredRun, read_register, register_beside
from fedcgd.ledger.store import (
    BUDGET,
    EVALUATION,
    EVALUATION_OF,
    RunSettings,
    StoredRun,
    evaluation_ledger,
    reader,
    sha256,
    stored_run,
)
from fedcgd.ledger.texts import NAMED, Finding, about, finding, refuse
from fedcgd.ledger.verification import past, verify
from fedcgd.noise.keys import NoiseKey
from fedcgd.plan import Plan
from fedcgd.support.records import MEMORY
from fedcgd.support.untrusted import clean


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What ledgers say about one run, as far as it concerns what several runs cost together."""

    name: str
    run_id: str
    """The same for all copies of a run's ledger, and no other run's: the stream id; of a simulation, when it began."""
    branch: str = ""
    """Of a copy that went its own way, next to the first of the run's branches: which it is."""
    run: StoredRun
    plan: Plan
    users: frozenset[str]
    """Everyone who was asked, answered or not."""
    nonces: tuple[int, ...] = ()
    """Of each released round."""
    copies: tuple[str, ...] = ()
    """The ledgers in other places that are states of this run too."""

    @property
    def id(self) -> str:
        """Of this run, or of this branch of it."""
        return self.run_id + self.branch

    @property
    def released(self) -> int:
        """How many of its planned rounds are released."""
        return min(len(self.nonces), self.plan.participation.rounds)

    @property
    def over(self) -> bool:
        """Nobody will be asked any more: sealed, or all rounds released."""
        return self.run.sealed is not None or len(self.nonces) >= self.plan.participation.rounds

    @property
    def evaluation_of(self) -> str | None:
        """These are the evaluations of the run whose stream this is; None for a training."""
        return self.run.settings.get(EVALUATION_OF)


def recorded(paths: Sequence[Path]) -> list[RecordedRun]:
    """The runs at `paths`, and their private evaluations, named or not: users of both pay for both.

    Copies of a ledger of which one went on where the other stopped are one run; copies that went on in two places are two.
    Raises ValueError for what is no ledger, for a training without the ledger of its evaluations next to its own, and for
    evaluations whose training is not named.
    """
    named = [_read(path) for path in paths]
    trainings = {run.run.stream_id for run in named if run.evaluation_of is None}
    by_id: dict[str, list[RecordedRun]] = {}
    for run in named:
        if run.evaluation_of is not None and run.evaluation_of not in trainings:
            raise refuse("evaluations-alone", path=run.name)
        for one in (run, *_evaluations(run)):
            by_id.setdefault(one.run_id, []).append(one)
    return [run for ledgers in by_id.values() for run in branches(ledgers)]


def _evaluations(run: RecordedRun) -> Iterator[RecordedRun]:
    """The private evaluations of `run`, if it was begun with some, from the ledger next to its own."""
    if EVALUATION in run.run.settings:
        beside = evaluation_ledger(Path(run.name))
        one = _read(beside) if beside.is_file() else None
        if one is None or one.evaluation_of != run.run.stream_id:
            raise refuse("evaluations-missing", path=run.name, beside=beside)
        yield one


def branches(ledgers: Sequence[RecordedRun]) -> Iterator[RecordedRun]:
    """The run once, by its latest ledger, with all users that a copy of it asked; where copies went apart, each way it took.

    A release has a nonce of 128 bits that no other release has. So two ledgers of one run tell what became of it: where the
    nonces of one begin those of the other, the second is the later state of the same run; where they differ from some round on,
    a copy went its own way there, and users paid for the rounds of both. Each way counts with all of its rounds: what the ways
    release together is less than two runs with noise of their own would. The order does not depend on that of the copies.
    """
    ledgers = sorted(ledgers, key=lambda run: not run.over)  # of two that released the same, the one that is over
    states = {run.nonces for run in ledgers}
    ways = sorted(way for way in states if not any(_begins(other, way) and other != way for other in states))
    for i, way in enumerate(ways):
        copies = [run for run in ledgers if _begins(way, run.nonces)]
        latest = next(run for run in copies if run.nonces == way)
        others = {run.name for run in copies if Path(run.name).resolve() != Path(latest.name).resolve()}
        digest = sha256(" ".join(f"{nonce:x}" for nonce in way))[:16]
        yield replace(
            latest,
            branch=f" apart as {digest}" if i else "",
            users=frozenset().union(*(run.users for run in copies)),
            copies=tuple(sorted(others)),
        )


def _begins(way: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return way[: len(part)] == part


def _read(path: Path) -> RecordedRun:
    with reader(path) as connection:
        run, nonces = stored_run(connection), nonces_of(connection)
        users = frozenset(user for (user,) in connection.execute("SELECT user FROM users"))
    id = run.stream_id
    if run.defined.simulated:
        id = f"simulation of {run.created}{f', {id}' * bool(id)}"
    return RecordedRun(
        name=str(path), run_id=id, run=run, plan=Plan.from_description(run.planned), users=users, nonces=nonces
    )


class RunComposition:
    """`runs`, the earliest first, and what any of them cost one user together.

    A user who was asked in a run is given that run's whole bound. With a secret sampling so is every user that the run might have
    asked: all but those whom its budget refuses. Runs whose secret choices come from the same part of the same key (simulations
    of one seed) count as if their rounds were known: a user's bin is then the same in both, and composition needs independence.
    """

    def __init__(self, runs: Sequence[RecordedRun]) -> None:
        self.runs = sorted(runs, key=lambda run: run.run.created)
        choices = [(run.run.defined.key_fingerprint, run.run.stream_id) for run in self.runs]
        self._past = [past(run.plan, known=choices.count(own) > 1) for run, own in zip(self.runs, choices, strict=True)]
        self._ids = [run.id for run in self.runs]
        self.budgets: list[Any] = [run.run.settings.get(BUDGET) for run in self.runs]  # None for a run without one
        self._found: dict[tuple[frozenset[tuple[PastRun, int]], float], JointGuarantee] = {}
        self._groups: dict[tuple[bool, ...], tuple[int, ...]] = {}

    def of(self, user: str | None) -> tuple[int, ...]:
        """The runs, by their places in `runs`, that `user` is counted in; None is somebody who was never asked.

        Users who were asked in the same runs share an answer.
        """
        asked = tuple(user in run.users for run in self.runs)
        if asked not in self._groups:
            inside: list[int] = []
            for i, run in enumerate(self.runs):
                if asked[i] or (run.plan.participation.is_secret and self.admits(i, inside)):
                    inside.append(i)
            self._groups[asked] = tuple(inside)
        return self._groups[asked]

    def admits(self, i: int, inside: Sequence[int]) -> bool:
        """Whether a user who was in the runs `inside` may be in run i, by that run's budget, if it has one.

        True if the ledger of a run that the budget counts is not here: then nobody can say.
        """
        budget = self.budgets[i]
        if budget is None or self.missing(i):
            return True
        return self.within_budget(i, [*(j for j in inside if self._ids[j] in budget["after"]), i])

    def within_budget(self, i: int, inside: Sequence[int]) -> bool:
        """Whether the runs `inside` together are within the budget that run i was begun with."""
        budget = self.budgets[i]  # two ways to calculate one ε differ by rounding
        return self.guarantee(inside, budget["delta"]).epsilon <= float(budget["epsilon"]) * (1 + 1e-9)

    def missing(self, i: int) -> list[str]:
        """The ids of the earlier runs that run i, which has a budget, counted and that are not here."""
        return sorted(set(self.budgets[i]["after"]) - set(self._ids))

    def guarantee(self, inside: Sequence[int], delta: float, *, released: bool = False) -> JointGuarantee:
        """ε at `delta` of the runs `inside` together: of all their planned rounds, or of those `released`."""
        together = [
            replace(self._past[i], released=self.runs[i].released) if released else self._past[i] for i in inside
        ]
        key = (frozenset(Counter(together).items()), delta)
        if key not in self._found:
            self._found[key] = _guarantee(together, delta)
        found = self._found[key]
        if len({self.runs[i].run_id for i in inside}) == len(inside):
            return found
        method = f"{found.proof.method}; the rounds that copies share count in each"
        return replace(found, proof=replace(found.proof, exact=False, method=method))


def _guarantee(runs: Sequence[PastRun], delta: float) -> JointGuarantee:
    """Of one run its own, which no composition makes less tight."""
    rounds = sum(one.rounds_released for one in runs)
    if not all(one.noise_multiplier for one in runs):
        nothing = Proof("a run without noise (σ = 0, for debugging) promises nothing", exact=True)
        return JointGuarantee(epsilon=math.inf, delta=delta, runs=len(runs), released=rounds, proof=nothing)
    if len(runs) > 1:
        return compose(runs, delta=delta)
    [one] = runs
    alone = one.accountant.epsilon(noise_multiplier=one.noise_multiplier, delta=delta, released=one.released)
    return JointGuarantee(epsilon=alone.epsilon, delta=delta, runs=1, released=rounds, proof=alone.proof)


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
        for path in beside | {register}
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
                cost=rounded_up(max(together.guarantee(inside, budget["delta"]).epsilon for inside in beyond)),
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
        defined = RunSettings.from_plan(plan, configuration, key)
        stored = StoredRun(defined, "", "" if key.simulated else "this run", _AFTER_ALL)
        new = RecordedRun(name="this run", run_id="this run", run=stored, plan=plan, users=frozenset())
        together = RunComposition([*runs, new])
        last = len(runs)
        users = frozenset[str]().union(*(run.users for run in runs))
        inside = {user: tuple(i for i in together.of(user) if i != last) for user in users}
        over = {group for group in set(inside.values()) if not together.admits(last, group)}
        costs = [together.guarantee([*group, last], self.delta).epsilon for group in over]
        unasked = tuple(i for i in together.of(None) if i != last)
        if not together.admits(last, unasked):
            cost = rounded_up(together.guarantee([*unasked, last], self.delta).epsilon)
            raise refuse("nobody-may-take-part", runs=len(unasked), cost=cost, delta=self.delta, epsilon=self.epsilon)
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
