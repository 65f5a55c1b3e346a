"""What recorded runs cost the people in them together: the runs in ledgers, ε of any of them, and who is counted in which.

A run whose releases are also evaluated on its users' data has two ledgers, and one ε of both together.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedcgd.accounting import JointGuarantee, PastRun, compose
from fedcgd.accounting.guarantee import Proof
from fedcgd.accounting.shares import NoiseShares
from fedcgd.ledger.attempts import nonces_of
from fedcgd.ledger.store import StoredRun, reader, stored_run
from fedcgd.ledger.texts import refuse
from fedcgd.plan import Plan

BUDGET = "budget"  # in a configuration: the joint ε and δ, and the plans of the earlier runs that count, by their ids
EVALUATION = "evaluation"  # in the training's configuration: the plan of its evaluations, and what is measured
EVALUATION_OF = "evaluation_of"  # in the evaluations' configuration: the stream of the training


def evaluation_ledger(path: Path) -> Path:
    """Where the evaluations of the run recorded at `path` are recorded."""
    return path.with_name(f"{path.name}.evaluation")


def evaluation_plan(configuration: Mapping[str, Any]) -> Plan | None:
    """The plan of the evaluations of a run with this configuration; None if it has none."""
    found = configuration.get(EVALUATION)
    return None if found is None else Plan.from_description(found["plan"])


def with_evaluations(training: Plan, evaluations: Plan) -> JointGuarantee:
    """ε of a whole training and all its planned evaluations, for a user who is in both, at the training's δ."""
    return compose([past(training), past(evaluations)], delta=training.delta)


def past(plan: Plan, *, known: bool = False) -> PastRun:
    """A whole run as planned; `known` counts secret rounds as known ones."""
    participation = plan.participation
    if known and participation.is_secret:
        participation = replace(participation, sampling="none", sampling_rate=None, warm_start=True)
    return PastRun(mechanism=plan.mechanism, participation=participation, noise_multiplier=plan.noise_multiplier)


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
        digest = sha256(" ".join(f"{nonce:x}" for nonce in way).encode()).hexdigest()[:16]
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
        self.budgets = [run.run.settings.get(BUDGET) for run in self.runs]
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
        """ε at `delta` of the runs `inside` as planned."""
        return self.guarantee(inside, delta).epsilon

    def missing(self, i: int) -> list[str]:
        """The ids of the earlier runs that run i counted and that are not here."""
        budget = self.budgets[i]
        return [] if budget is None else sorted(set(budget["after"]) - set(self._ids))

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
