"""A recorded run as what it may cost the people in it: its plan, who was in it, and the evaluations that belong to it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any

from fedcgd.accounting import PastRun
from fedcgd.ledger.attempts import nonces_of
from fedcgd.ledger.evaluations import EVALUATION, EVALUATION_OF, evaluation_ledger
from fedcgd.ledger.store import reader, stored_run
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
    """The same for all copies of a run's ledger, and no other run's: the stream id; of a simulation, when it began. That of
    a copy which went its own way also says when it did."""
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
    nonces: tuple[int, ...] = ()
    """Of each released round."""
    shared: int = 0
    """How many of its first rounds are those of a run that is counted before it."""

    @property
    def stream(self) -> str:
        """The run's part of its key."""
        return self.choices[1]

    @property
    def went_apart(self) -> bool:
        """Whether this is a copy that went its own way, beside the first of the run's branches."""
        return f" {APART} " in self.id

    @property
    def run_id(self) -> str:
        """The id that all branches of the run share."""
        return self.id.partition(f" {APART} ")[0]

    @property
    def sampled(self) -> bool:
        """Whether the rounds of a user are secret."""
        return self.plan.participation.is_secret

    def past(self, *, known: bool) -> PastRun:
        """The whole run as planned; `known` counts secret rounds as known ones."""
        participation = self.plan.participation
        if known and self.sampled:
            participation = Participation(rounds=participation.rounds, min_separation=participation.min_separation)
        return PastRun(
            mechanism=self.plan.mechanism,
            participation=participation,
            noise_multiplier=self.plan.noise_multiplier,
            shared=self.shared,
        )


def recorded(paths: Sequence[Path]) -> list[RecordedRun]:
    """The runs at `paths`, and their private evaluations, named or not: whoever was in those pays for both.

    Copies of a ledger of which one went on where the other stopped are one run (`distinct_runs`); copies that went on in
    two places are two, with the rounds before that counted once. Raises ValueError for what is no ledger, and for a training
    without the ledger of its evaluations or the other way round.
    """
    named = [_read(path) for path in paths]
    trainings = [run for run in named if run.evaluation_of is None]
    for run in named:
        if run.evaluation_of is not None and run.evaluation_of not in [training.stream for training in trainings]:
            raise ValueError(f"{run.name} records the evaluations of a run whose own ledger is not named: name both")
    everything = named + [one for run in trainings if (one := _evaluations_beside(run, named)) is not None]
    runs = distinct_runs(everything)
    for stream, places in Counter(run.stream for run in runs if run.evaluated and not run.simulated).items():
        ledgers = len({run.name for run in everything if run.evaluation_of == stream})
        if ledgers < places:
            raise ValueError(
                f"a run was copied and went on in {places} places, each with evaluations on its users' data, and {ledgers} "
                "ledgers of those are there: put each beside its training's (run.db.evaluation), or name it where it is"
            )
    return runs


def distinct_runs(copies: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Each run once, by its latest ledger, with all users that a copy of it asked; where copies went apart, each way it took."""
    by_id: dict[str, list[RecordedRun]] = {}
    for run in copies:
        by_id.setdefault(run.id, []).append(run)
    return [run for id, ledgers in by_id.items() for run in _branches_of(id, ledgers)]


def _branches_of(id: str, ledgers: list[RecordedRun]) -> Iterator[RecordedRun]:
    ledgers = sorted(ledgers, key=lambda run: not run.over)  # of two that released the same, the one that is over
    for branch in branches([run.nonces for run in ledgers]):
        yield replace(
            ledgers[branch.latest],
            id=id + f" {branch.name}" * bool(branch.name),
            users=frozenset().union(*(ledgers[i].users for i in branch.copies)),
            shared=branch.shared,
        )


def _evaluations_beside(run: RecordedRun, named: Sequence[RecordedRun]) -> RecordedRun | None:
    """The evaluations of `run` from the ledger beside its own, unless they are among those `named` or there are none."""
    beside = evaluation_ledger(Path(run.name))
    given = [one for one in named if one.evaluation_of == run.stream]
    if any(Path(one.name).resolve() == beside.resolve() for one in given):
        return None
    # Also of a run that says nothing about evaluations: ledgers of earlier versions do not.
    one = _read(beside) if beside.is_file() else None
    if one is not None and one.evaluation_of == run.stream:
        return one
    if run.evaluated and (run.simulated or not given):
        raise ValueError(
            f"{run.name} is of a run that was evaluated on its users' data too, and {beside}, which says who was in that, is "
            f"{'not there' if one is None else 'of another run'}: put it there, or name it where it is"
        )
    return None


def _read(path: Path) -> RecordedRun:
    with reader(path) as connection:
        run = stored_run(connection)
        nonces = nonces_of(connection)
        users = frozenset(user for (user,) in connection.execute("SELECT user FROM users"))
        plan, settings, stream_id = Plan.from_description(run.planned), run.settings, run.stream_id
    released = len(nonces)
    return RecordedRun(
        name=str(path),
        id=f"simulation of {run.created}{f', {stream_id}' * bool(stream_id)}" if run.simulated else stream_id,
        created=run.created,
        plan=plan,
        released=min(released, plan.participation.rounds),
        over=run.sealed is not None or released >= plan.participation.rounds,
        users=users,
        simulated=bool(run.simulated),
        choices=(run.key_fingerprint, stream_id),
        budget=settings.get(BUDGET),
        evaluated=EVALUATION in settings,
        evaluation_of=settings.get(EVALUATION_OF),
        nonces=nonces,
    )


APART = "apart from round"  # in the id of a branch: what follows is not in the id of the run


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
        name = f"{APART} {shared}, {digest}" if i else ""
        found.append(
            Branch(latest=next(j for j in copies if nonces[j] == way), copies=copies, shared=shared, name=name)
        )
    return found


def _begins(way: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return way[: len(part)] == part


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
