"""What several recorded runs cost the people who were in them, together."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedcgd.accounting import JointGuarantee
from fedcgd.accounting.guarantee import rounded_up
from fedcgd.ledger.recorded_run import RecordedRun, recorded
from fedcgd.ledger.registry import RegisteredRun, read_register, register_beside
from fedcgd.ledger.run_composition import RunComposition
from fedcgd.ledger.verification import NO_REGISTER, compare_model_file, verify_records
from fedcgd.support.numbers import plural
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
        copies: where a run was copied and went on in two places: both are counted.
        notes: what contradicts nothing, and has to be known: as `verify` has them, and which runs were compared with no register.
    """

    groups: tuple[UserGroup, ...]
    samplings: tuple[str, ...]
    simulated: bool
    problems: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> UserGroup:
        """The users with the largest ε."""
        return self.groups[0]

    def to_description(self) -> dict[str, Any]:
        """All of it, as JSON-able values."""
        return asdict(self)


def joint(
    paths: Sequence[Path], *, delta: float | None = None, user: str | None = None, register: Path | None = None
) -> JointRecord:
    """The joint ε of several runs for every user in them, or for one; adjacency: zero out one user.

    Users are the same if their ids are.

    - Whoever was asked in a run is given that run's whole bound, however often it took part: how often depends on who was
      available, which may depend on data.
    - Private evaluations are runs of their own, and count with the run that they are of, named or not.
    - With a secret sampling a user that was never drawn is also counted as in the run, for every user of any of the ledgers might
      have been drawn, unless the run's budget refused it.
    - Simulations of one seed share their secret choices, and count as if those were known.
    - A run that is named twice, or with an older copy, counts once; copies that went on in two places count both, with the rounds
      before they went apart once.

    Args:
        paths: the ledgers.
        delta: δ of the joint guarantee; by default that of the plans.
        user: the id of one user; None for all.
        register: a register of keys' runs (noise.key.runs), for those of the ledgers that it knows; others are compared with one
            that lies beside them.

    Raises:
        ValueError: if the plans have different δ and none is given, if nothing is recorded, or no run has the user, if the ledger
            of a run's evaluations is missing, and for what is no ledger or, where one is named, no register.
    """
    if register is not None:
        read_register(register)  # whoever misspells it is told: the runs would be compared with nothing
    together = RunComposition(recorded(paths))
    runs = together.runs
    if delta is None:
        deltas = sorted({run.plan.delta for run in runs})
        if len(deltas) > 1:
            raise ValueError(f"the runs have different δ ({', '.join(f'{d:g}' for d in deltas)}); give one for all")
        (delta,) = deltas
    everybody = frozenset().union(*(run.users for run in runs)) if user is None else frozenset({user})
    if user is not None and not any(user in run.users for run in runs):
        raise ValueError(f"no run has a user {user!r}")
    members = Counter(together.of(one) for one in everybody)
    if not members:
        raise ValueError("no users are on record: nobody was asked in any of the runs")
    problems, notes, unknown = check_runs(runs, register)
    if unnamed := [one for one in unnamed_runs(runs, register) if one.released]:
        budgeted = any(run.budget for run in runs)
        (problems if budgeted else notes).append(
            f"{told(unnamed)}: whoever was in {'it' if len(unnamed) == 1 else 'those'} pays for it too; name all ledgers"
        )
    if unknown:
        notes.append(f"{', '.join(unknown)}: {NO_REGISTER}")
    groups = [
        UserGroup(
            ledgers=tuple(runs[i].name for i in inside),
            users=count,
            planned=together.guarantee(inside, delta),
            released=together.guarantee(inside, delta, released=True),
        )
        for inside, count in sorted(members.items())
    ]
    return JointRecord(
        groups=tuple(sorted(groups, key=lambda group: -group.planned.epsilon)),
        samplings=tuple(str(run.plan.participation.sampling) for run in runs),
        simulated=any(run.simulated for run in runs),
        problems=(*problems, *_budget_problems(together, members)),
        copies=tuple(
            f"{run.name} is a copy that went its own way after {plural(run.shared, 'round', 'rounds')}: those count once, and "
            "the later rounds of each copy count"
            for run in runs
            if run.went_apart
        ),
        notes=tuple(notes),
    )


def check_runs(runs: Sequence[RecordedRun], register: Path | None) -> tuple[list[str], list[str], list[str]]:
    """(What contradicts itself or its register, what is to be known besides, the ledgers that no register knows), by their names.

    Of a run whose copies went on in two places a register knows one copy only, and none is compared.
    """
    copies = Counter(run.run_id for run in runs)
    problems, notes, unknown = [], [], []
    for run in runs:
        path = Path(run.name)
        known_by = register_beside(path, register) if copies[run.run_id] == 1 else None
        found = verify_records(path, register=known_by)
        problems += [f"{path}: {problem}" for problem in found.problems]
        notes += [f"{path}: {text}" for text in found.notes]
        # A last model that was changed changes no ε: what was released is on record.
        notes += [f"{path}: {text}; its releases count all the same" for text in compare_model_file(path)[0]]
        unknown += [run.name] * (known_by is None)
    return problems, notes, unknown


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


def told(unnamed: Sequence[RegisteredRun]) -> str:
    """That a register knows of these runs and nobody has named them."""
    ledgers = ", ".join(f"{clean(one.ledger)} ({plural(one.released, 'round', 'rounds')})" for one in unnamed[:_TOLD])
    more = f", and {len(unnamed) - _TOLD} more" if len(unnamed) > _TOLD else ""
    return (
        f"a key's register knows of {plural(len(unnamed), 'run that is', 'runs that are')} not named: {ledgers}{more}"
    )


_TOLD = 5  # runs that are named in a message


def _budget_problems(together: RunComposition, members: Mapping[tuple[int, ...], int]) -> list[str]:
    """What contradicts the budgets that runs were begun with."""
    found = []
    for i, run in enumerate(together.runs):
        if missing := together.missing(i):
            many = plural(len(missing), "earlier run whose ledger is", "earlier runs whose ledgers are")
            found.append(
                f"{run.name} counted {many} not given (streams {', '.join(missing)}): what follows is without them"
            )
        counted = {} if run.budget is None else run.budget["after"]
        unknown = sum(one.went_apart and one.id not in counted and one.run_id in counted for one in together.runs)
        if unknown:
            found.append(
                f"{run.name} counted a run of which {plural(unknown, 'more copy is', 'more copies are')} given: its budget is "
                "without those"
            )
        epsilon = 0.0 if run.budget is None else run.budget["epsilon"]
        beyond = sum(
            count
            for inside, count in members.items()
            if i in inside and not together.admits(i, inside[: inside.index(i)])
        )
        if beyond:
            found.append(
                f"{plural(beyond, 'user is', 'users are')} in {run.name} beyond its joint budget of ε = {epsilon:g}"
            )
        found += _beyond_with_others(together, members, i, counted.keys())
    return found


def _beyond_with_others(
    together: RunComposition, members: Mapping[tuple[int, ...], int], i: int, counted: Collection[str]
) -> Iterator[str]:
    """That users of run i are beyond its budget by runs that it does not count: earlier ones that it did not name, later ones."""
    budget = together.runs[i].budget
    others = {
        inside: [j for j in inside if j != i and together.runs[j].id not in counted]
        for inside in members
        if i in inside
    }
    beyond = [inside for inside in others if others[inside] and not together.within_budget(i, inside)]
    if beyond and budget is not None:
        names = sorted({together.runs[j].name for inside in beyond for j in others[inside]})
        cost = max(together.epsilon(inside, budget["delta"]) for inside in beyond)
        users = plural(sum(members[inside] for inside in beyond), "user is", "users are")
        yield (
            f"{users} in {together.runs[i].name}, begun with a joint budget of ε = {budget['epsilon']:g} at δ = "
            f"{budget['delta']:g}, and in runs that it does not count ({', '.join(names)}): all together cost up to ε = "
            f"{rounded_up(cost)}. A budget counts the runs that after= names: name every earlier ledger over these people there, "
            "and begin later runs with this budget and this ledger named"
        )
