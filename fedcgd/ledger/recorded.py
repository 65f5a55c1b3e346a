"""Recorded runs as what they may cost the people in them: who was in which, and ε of any of them together."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedcgd.accounting import JointGuarantee, PastRun, compose
from fedcgd.ledger.evaluations import EVALUATION, EVALUATION_OF, evaluation_ledger
from fedcgd.ledger.store import reader
from fedcgd.participation import Participation
from fedcgd.plan import Plan

BUDGET = (
    "budget"  # in a run's configuration: the joint ε and δ, and the plans of the earlier runs that count, by their ids
)

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What a ledger says about one run, as far as it concerns what several runs cost together."""

    name: str
    id: str
    """The same for all copies of a run's ledger, and no other run's: the stream id; of a simulation, when it began."""
    created: str
    plan: Plan
    released: int
    over: bool
    """Nobody will be asked any more: sealed, or all rounds released."""
    users: frozenset[str]
    """Whoever was asked, answered or not."""
    simulated: bool
    choices: tuple[str, str]
    """The key and the part of it that secret bins and coins come from."""
    budget: dict[str, Any] | None = None
    evaluated: bool = False
    """Its releases are evaluated on users' data too, and another ledger says who was in that."""
    evaluation_of: str | None = None
    """These are the evaluations of the run whose stream this is; None for a training."""

    @property
    def stream(self) -> str:
        """The run's part of its key."""
        return self.choices[1]

    @property
    def sampled(self) -> bool:
        """Whether the rounds of a user are secret."""
        return self.plan.participation.sampling != "none"

    def past(self, *, known: bool) -> PastRun:
        """The whole run as planned; `known` counts secret rounds as known ones."""
        participation = self.plan.participation
        if known and self.sampled:
            participation = Participation(rounds=participation.rounds, min_separation=participation.min_separation)
        return PastRun(
            mechanism=self.plan.mechanism,
            participation=participation,
            noise_multiplier=self.plan.noise_multiplier,
        )


def recorded(paths: Sequence[Path]) -> list[RecordedRun]:
    """The runs at `paths`, and their private evaluations, named or not: whoever was in those pays for both.

    Raises ValueError for what is no ledger, if one run is named twice, and for a training without the ledger of its
    evaluations or the other way round.
    """
    runs: list[RecordedRun] = []
    found: dict[str, Path] = {}
    for path in paths:
        run = _read(path)
        if run.id in found:
            raise ValueError(f"{path} and {found[run.id]} are ledgers of one run; give its latest, once")
        found[run.id] = path
        runs.append(run)
    trainings = [run for run in runs if run.evaluation_of is None]
    for run in runs:
        if run.evaluation_of is not None and run.evaluation_of not in [training.stream for training in trainings]:
            raise ValueError(f"{run.name} records the evaluations of a run whose own ledger is not named: name both")
    return runs + [one for run in trainings if (one := _unnamed_evaluations(run, runs)) is not None]


def _unnamed_evaluations(run: RecordedRun, named: Sequence[RecordedRun]) -> RecordedRun | None:
    """The evaluations of `run` from the ledger beside its own, unless they are among those `named` or there are none."""
    beside = evaluation_ledger(Path(run.name))
    if any(
        one.evaluation_of == run.stream and (not run.simulated or Path(one.name).resolve() == beside.resolve())
        for one in named
    ):
        return None
    # Also of a run that says nothing about evaluations: ledgers of earlier versions do not.
    one = _read(beside) if beside.is_file() else None
    if one is not None and one.evaluation_of == run.stream:
        return one
    if run.evaluated:
        raise ValueError(
            f"{run.name} is of a run that was evaluated on its users' data too, and {beside}, which says who was in that, is "
            f"{'not there' if one is None else 'of another run'}: put it there, or name it where it is"
        )
    return None


def _read(path: Path) -> RecordedRun:
    with reader(path) as connection:
        text, configuration, stream_id, fingerprint, simulated, created, sealed = connection.execute(
            "SELECT plan, configuration, stream_id, key_fingerprint, simulated, created, sealed FROM run"
        ).fetchone()
        (released,) = connection.execute("SELECT count(*) FROM attempts WHERE state = 'released'").fetchone()
        users = frozenset(user for (user,) in connection.execute("SELECT user FROM users"))
    plan = Plan.from_description(json.loads(text))
    settings = json.loads(configuration)
    return RecordedRun(
        name=str(path),
        id=stream_id or f"simulation of {created}",
        created=created,
        plan=plan,
        released=min(released, plan.participation.rounds),
        over=sealed is not None or released >= plan.participation.rounds,
        users=users,
        simulated=bool(simulated),
        choices=(fingerprint, stream_id),
        budget=settings.get(BUDGET),
        evaluated=EVALUATION in settings,
        evaluation_of=settings.get(EVALUATION_OF),
    )


class Together:
    """`runs`, the earliest first, and what any of them cost one user together.

    Whoever was asked in a run is given that run's whole bound. With a secret sampling so is every user that the run might have
    asked: all but those whom its budget refuses. Runs whose secret choices come from the same part of the same key (simulations
    of one seed) count as if their rounds were known: a user's bin is then the same in both, and composition needs independence.
    """

    def __init__(self, runs: Sequence[RecordedRun]) -> None:
        self.runs = sorted(runs, key=lambda run: run.created)
        shared = Counter(run.choices for run in runs)
        self._past = [run.past(known=shared[run.choices] > 1) for run in self.runs]
        self._ids = [run.id for run in self.runs]
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
                if asked[i] or (run.sampled and self.admits(i, inside)):
                    inside.append(i)
            self._groups[asked] = tuple(inside)
        return self._groups[asked]

    def admits(self, i: int, inside: Sequence[int]) -> bool:
        """Whether a user who was in the runs `inside` may be in run i, by that run's budget, if it has one.

        True if the ledger of a run that the budget counts is not here: then nobody can say.
        """
        budget = self.runs[i].budget
        if budget is None or self.missing(i):
            return True
        earlier = [j for j in inside if self._ids[j] in budget["after"]]
        return self.epsilon([*earlier, i], budget["delta"]) <= float(budget["epsilon"]) * (1 + _ROUNDING)

    def epsilon(self, inside: Sequence[int], delta: float) -> float:
        """ε at `delta` of the runs `inside` as planned; of one alone, its own, which no composition makes less tight."""
        if len(inside) > 1 or self.runs[inside[0]].plan.noiseless:
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
        budget = self.runs[i].budget
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
