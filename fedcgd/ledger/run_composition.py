"""What recorded runs cost the people in them together: the runs in ledgers, ε of any of them, and who is counted in which.

A run whose releases are also evaluated on its users' data has two ledgers, and one ε of both together.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any

from fedcgd.accounting import JointGuarantee, PastRun, compose
from fedcgd.accounting.shares import NoiseShares
from fedcgd.ledger.attempts import nonces_of
from fedcgd.ledger.store import StoredRun, reader, stored_run
from fedcgd.ledger.texts import refuse
from fedcgd.participation import Participation
from fedcgd.plan import Plan

BUDGET = "budget"  # in a configuration: the joint ε and δ, and the plans of the earlier runs that count, by their ids
EVALUATION = "evaluation"  # in the training's configuration: the plan of its evaluations, and what is measured
EVALUATION_OF = "evaluation_of"  # in the evaluations' configuration: the stream of the training

_APART = " apart from round "  # in the id of a branch: what follows is not in the id of the run


def evaluation_ledger(path: Path) -> Path:
    """Where the evaluations of the run recorded at `path` are recorded."""
    return path.with_name(f"{path.name}.evaluation")


def evaluation_plan(configuration: Mapping[str, Any]) -> Plan | None:
    """The plan of the evaluations of a run with this configuration; None if it has none."""
    found = configuration.get(EVALUATION)
    return None if found is None else Plan.from_description(found["plan"])


def with_evaluations(training: Plan, evaluations: Plan) -> JointGuarantee:
    """ε of a whole training and all its planned evaluations, for a user who is in both, at the training's δ."""
    runs = [
        PastRun(mechanism=plan.mechanism, participation=plan.participation, noise_multiplier=plan.noise_multiplier)
        for plan in (training, evaluations)
    ]
    return compose(runs, delta=training.delta)


def with_evaluations_by_collusion(training: Plan, evaluations: Plan, shares: NoiseShares) -> tuple[float, ...]:
    """ε of `with_evaluations` against the server with 0, 1, … all keepers; ∞ where no share of the noise is left."""

    def left(plan: Plan, colluding: int) -> Plan:
        return replace(plan, noise_multiplier=shares.noise_multiplier(plan.noise_multiplier, colluding=colluding))

    found = []
    for colluding in range(shares.keepers + 1):
        plans = left(training, colluding), left(evaluations, colluding)
        found.append(math.inf if any(plan.noiseless for plan in plans) else with_evaluations(*plans).epsilon)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What ledgers say about one run, as far as it concerns what several runs cost together."""

    name: str
    id: str
    """The same for all copies of a run's ledger, and no other run's: the stream id; of a simulation, when it began. That of
    a copy which went its own way also says when it did."""
    run: StoredRun
    plan: Plan
    users: frozenset[str]
    """Everyone who was asked, answered or not."""
    nonces: tuple[int, ...] = ()
    """Of each released round."""
    shared: int = 0
    """How many of its first rounds are those of a run that is counted before it."""
    copies: tuple[str, ...] = ()
    """The ledgers in other places that are states of this run too."""

    @property
    def released(self) -> int:
        """How many of its planned rounds are released."""
        return min(len(self.nonces), self.plan.participation.rounds)

    @property
    def over(self) -> bool:
        """Nobody will be asked any more: sealed, or all rounds released."""
        return self.run.sealed is not None or len(self.nonces) >= self.plan.participation.rounds

    @property
    def budget(self) -> dict[str, Any] | None:
        """The joint budget that it was begun with."""
        return self.run.settings.get(BUDGET)

    @property
    def evaluation_of(self) -> str | None:
        """These are the evaluations of the run whose stream this is; None for a training."""
        return self.run.settings.get(EVALUATION_OF)

    @property
    def evaluated(self) -> bool:
        """Its releases are evaluated on users' data too, and another ledger says who was in that."""
        return EVALUATION in self.run.settings

    @property
    def simulated(self) -> bool:
        """The key came from a simulation seed."""
        return bool(self.run.defined.simulated)

    @property
    def choices(self) -> tuple[str, str]:
        """The key and the part of it that secret bins and coins come from."""
        return self.run.defined.key_fingerprint, self.run.stream_id

    @property
    def went_apart(self) -> bool:
        """Whether this is a copy that went its own way, beside the first of the run's branches."""
        return _APART in self.id

    @property
    def run_id(self) -> str:
        """The id that all branches of the run share."""
        return self.id.partition(_APART)[0]

    def past(self, *, known: bool) -> PastRun:
        """The whole run as planned; `known` counts secret rounds as known ones."""
        participation = self.plan.participation
        if known and participation.is_secret:
            participation = Participation(rounds=participation.rounds, min_separation=participation.min_separation)
        return PastRun(
            mechanism=self.plan.mechanism,
            participation=participation,
            noise_multiplier=self.plan.noise_multiplier,
            shared=self.shared,
        )


def recorded(paths: Sequence[Path]) -> list[RecordedRun]:
    """The runs at `paths`, and their private evaluations, named or not: whoever was in those pays for both.

    Copies of a ledger of which one went on where the other stopped are one run; copies that went on in two places are two, with
    the rounds before that counted once. Raises ValueError for what is no ledger, and for a training without the ledger of its
    evaluations or the other way round.
    """
    named = [_read(path) for path in paths]
    trainings = [run for run in named if run.evaluation_of is None]
    for run in named:
        if run.evaluation_of is not None and run.evaluation_of not in [one.run.stream_id for one in trainings]:
            raise refuse("evaluations-alone", path=run.name)
    everything = named + [one for run in trainings if (one := _evaluations_beside(run, named)) is not None]
    by_id: dict[str, list[RecordedRun]] = {}
    for run in everything:
        by_id.setdefault(run.id, []).append(run)
    runs = [run for id, ledgers in by_id.items() for run in _branches_of(id, ledgers)]
    for stream, places in Counter(run.run.stream_id for run in runs if run.evaluated and not run.simulated).items():
        ledgers = len({run.name for run in everything if run.evaluation_of == stream})
        if ledgers < places:
            raise refuse("evaluations-of-a-copy", places=places, ledgers=ledgers)
    return runs


def _branches_of(id: str, ledgers: list[RecordedRun]) -> Iterator[RecordedRun]:
    """The run once, by its latest ledger, with all users that a copy of it asked; where copies went apart, each way it took."""
    ledgers = sorted(ledgers, key=lambda run: not run.over)  # of two that released the same, the one that is over
    for branch in branches([run.nonces for run in ledgers]):
        latest = ledgers[branch.latest]
        others = {
            ledgers[i].name for i in branch.copies if Path(ledgers[i].name).resolve() != Path(latest.name).resolve()
        }
        yield replace(
            latest,
            id=id + branch.name,
            users=frozenset().union(*(ledgers[i].users for i in branch.copies)),
            shared=branch.shared,
            copies=tuple(sorted(others)),
        )


def _evaluations_beside(run: RecordedRun, named: Sequence[RecordedRun]) -> RecordedRun | None:
    """The evaluations of `run` from the ledger beside its own, unless they are among those `named` or there are none."""
    beside = evaluation_ledger(Path(run.name))
    given = [one for one in named if one.evaluation_of == run.run.stream_id]
    if any(Path(one.name).resolve() == beside.resolve() for one in given):
        return None
    # Also of a run that says nothing about evaluations: ledgers of earlier versions do not.
    one = _read(beside) if beside.is_file() else None
    if one is not None and one.evaluation_of == run.run.stream_id:
        return one
    if run.evaluated and (run.simulated or not given):
        raise refuse("evaluations-missing", path=run.name, beside=beside)
    return None


def _read(path: Path) -> RecordedRun:
    with reader(path) as connection:
        run, nonces = stored_run(connection), nonces_of(connection)
        users = frozenset(user for (user,) in connection.execute("SELECT user FROM users"))
    id = run.stream_id
    if run.defined.simulated:
        id = f"simulation of {run.created}{f', {id}' * bool(id)}"
    return RecordedRun(
        name=str(path), id=id, run=run, plan=Plan.from_description(run.planned), users=users, nonces=nonces
    )


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One way that a run took, as far as it is on record."""

    latest: int
    """The copy that has all of it, by its place in the list."""
    copies: tuple[int, ...]
    """All copies that are on this way."""
    shared: int
    """How many of its first rounds are those of a branch before it in the list: they are counted there."""
    name: str
    """Tells it from the others, wherever the ledgers lie; "" for the first."""


def branches(nonces: Sequence[tuple[int, ...]]) -> list[Branch]:
    """The ways that a run took, of which copy i released its rounds under `nonces[i]`.

    A release has a nonce of 128 bits that no other release has. So two ledgers of one run tell what became of it: where the
    nonces of one begin those of the other, the second is the later state of the same run; where they differ from some round on,
    a copy went its own way there, and users paid for the rounds of both.

    Returns:
        One branch, with `shared` = 0, if every copy is a state of the same run. The order does not depend on that of the copies.
    """
    ways = sorted({way for way in nonces if not any(_begins(other, way) and other != way for other in nonces)})
    found: list[Branch] = []
    for i, way in enumerate(ways):
        copies = tuple(j for j, other in enumerate(nonces) if _begins(way, other))
        shared = max((_common(way, earlier) for earlier in ways[:i]), default=0)
        digest = sha256(" ".join(f"{nonce:x}" for nonce in way).encode()).hexdigest()[:16]
        name = f"{_APART}{shared}, {digest}" if i else ""
        found.append(
            Branch(latest=next(j for j in copies if nonces[j] == way), copies=copies, shared=shared, name=name)
        )
    return found


def _begins(way: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return way[: len(part)] == part


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class RunComposition:
    """`runs`, the earliest first, and what any of them cost one user together.

    Whoever was asked in a run is given that run's whole bound. With a secret sampling so is every user that the run might have
    asked: all but those whom its budget refuses. Runs whose secret choices come from the same part of the same key (simulations
    of one seed) count as if their rounds were known: a user's bin is then the same in both, and composition needs independence.
    """

    def __init__(self, runs: Sequence[RecordedRun]) -> None:
        self.runs = sorted(runs, key=lambda run: run.run.created)
        shared = Counter(run.choices for run in runs)
        self._past = [run.past(known=shared[run.choices] > 1) for run in self.runs]
        self._ids = [run.id for run in self.runs]
        self.budgets = [run.budget for run in self.runs]
        self._alone: dict[tuple[PastRun, float], float] = {}
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
        """Whether the runs `inside` together are within the budget that run i was begun with, if it has one."""
        budget = self.budgets[i]  # two ways to calculate one ε differ by rounding
        return budget is None or self.epsilon(inside, budget["delta"]) <= float(budget["epsilon"]) * (1 + 1e-9)

    def epsilon(self, inside: Sequence[int], delta: float) -> float:
        """ε at `delta` of the runs `inside` as planned; of one alone, its own, which no composition makes less tight."""
        if len(inside) > 1 or self.runs[inside[0]].plan.noiseless or self.runs[inside[0]].shared:
            return self.guarantee(inside, delta).epsilon
        (past,) = (self._past[i] for i in inside)
        key = past, delta
        if key not in self._alone:
            self._alone[key] = past.accountant.epsilon(
                noise_multiplier=past.noise_multiplier, delta=delta, released=None
            ).epsilon
        return self._alone[key]

    def missing(self, i: int) -> list[str]:
        """The ids of the earlier runs that run i counted and that are not here."""
        budget = self.budgets[i]
        return [] if budget is None else sorted(set(budget["after"]) - set(self._ids))

    def guarantee(self, inside: Sequence[int], delta: float, *, released: bool = False) -> JointGuarantee:
        """ε at `delta` of the runs `inside` together: of all their planned rounds, or of those `released`."""
        past = [self._past[i] for i in inside]
        if released:
            past = [replace(one, released=self.runs[i].released) for one, i in zip(past, inside, strict=True)]
        if any(self.runs[i].plan.noiseless for i in inside):
            return JointGuarantee(
                epsilon=math.inf,
                delta=delta,
                runs=len(past),
                released=sum(one.rounds_released for one in past),
                method="a run without noise (σ = 0, for debugging) promises nothing",
                exact=True,
            )
        key = (frozenset(Counter(past).items()), delta)
        if key not in self._found:
            self._found[key] = compose(past, delta=delta)
        return self._found[key]
