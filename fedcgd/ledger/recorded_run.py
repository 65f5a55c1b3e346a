"""A recorded run as what it may cost the people in it: its plan, who was in it, and the evaluations that belong to it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcgd.accounting import PastRun
from fedcgd.ledger.attempts import count_released
from fedcgd.ledger.evaluations import EVALUATION, EVALUATION_OF, evaluation_ledger
from fedcgd.ledger.store import reader
from fedcgd.participation import Participation
from fedcgd.plan import Plan

BUDGET = (
    "budget"  # in a run's configuration: the joint ε and δ, and the plans of the earlier runs that count, by their ids
)


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
        released = count_released(connection)
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
