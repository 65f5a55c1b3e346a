"""ε derived again from the records of a run alone, and whatever in them contradicts it."""

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcgd.accounting import ADJACENCY, Guarantee, JointGuarantee
from fedcgd.accounting.guarantee import large_delta, rounded_up
from fedcgd.ledger import model_file
from fedcgd.ledger.adoption import adoptions
from fedcgd.ledger.client_metrics import forwards_client_metrics
from fedcgd.ledger.consistency import compare_with_register, disorder, table_problems
from fedcgd.ledger.evaluations import EVALUATION_OF, evaluation_plan, with_evaluations
from fedcgd.ledger.recorded_keepers import RecordedKeepers, recorded_keepers
from fedcgd.ledger.recorded_run import BUDGET
from fedcgd.ledger.store import reader, sha256, stored_run, unpack_ids
from fedcgd.ledger.unreleased import epsilon_if_kept, unreleased_sums
from fedcgd.plan import Plan
from fedcgd.support.numbers import plural

NO_REGISTER = (
    "compared with no register of the key's runs: an older copy of this ledger would look the same. The operator has it beside "
    "the key (noise.key.runs): --register FILE"
)


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What the records of a run prove.

    Attributes:
        released: the rounds that are released.
        planned: the rounds of the plan.
        whole: ε of the whole run as planned: what is promised whatever decides when it stops.
        guarantee: ε for what has been released, under its `condition` if that is a part of the run; None before the first
            release.
        simulated: whether the key came from a simulation seed: then the run is not private, whatever ε says.
        problems: what in the records contradicts each other or the plan; empty if nothing does.
        budget: the joint ε and δ that the run was begun with, and under `after` the plans of the earlier runs that it counts, by
            their streams. Who was in those, their ledgers say: `joint` of them all checks the budget.
        identity: what told one user from another, in words; None for a run without nodes.
        with_evaluations: ε of the whole run and all its private evaluations, if it was begun with some.
        forwards_client_metrics: whether metrics of its users' data are reported without noise: no ε covers those.
        adopted: when its operator declared it the latest ledger of the run, because the key's register was lost
            (`fedcgd.ledger.adopt`).
        keepers: who made the noise, where the server did not, and against whom ε holds.
        notes: what contradicts nothing, and a reviewer has to know or ask about.
        users: how many were asked, answered or not.
        least_users: how many the plan and the planned size of a cohort need, or expect; 0 where that is not on record.
    """

    released: int
    planned: int
    whole: Guarantee
    guarantee: Guarantee | None
    simulated: bool
    problems: tuple[str, ...]
    budget: dict[str, Any] | None = None
    identity: str | None = None
    with_evaluations: JointGuarantee | None = None
    forwards_client_metrics: bool = False
    adopted: tuple[str, ...] = ()
    keepers: RecordedKeepers | None = None
    notes: tuple[str, ...] = ()
    users: int = 0
    least_users: int = 0

    @property
    def delta_note(self) -> str | None:
        """What to say of a δ that is large for the users on record and planned; None if it is not."""
        return large_delta(self.whole.delta, max(self.users, self.least_users))

    @property
    def noiseless(self) -> bool:
        """The plan is one for debugging, without noise: nothing in the run is private."""
        return self.whole.noise_multiplier == 0

    def to_description(self) -> dict[str, Any]:
        """All of it as JSON-able values."""
        parts = {name: getattr(self, name) for name in ("whole", "guarantee", "with_evaluations", "keepers")}
        return {
            **vars(self),
            **{name: part and part.to_description() for name, part in parts.items()},
            "noiseless": self.noiseless,
            "delta_note": self.delta_note,
        }


def verify(path: Path | str, *, register: Path | str | None = None) -> Verification:
    """The ε of a recorded run, derived again from the records alone.

    Checks that plan and configuration are those that were hashed, that rounds were released in order and once each, that no
    noise was used twice, and from the cohorts that were asked, also those of abandoned attempts, that no user exceeds
    the participation that ε relies on, and that the users' counters, which the scheduler goes by, say the same; and that
    attempts, skips, metrics, the last model and its file, and the register if there is one, agree about what was released.

    Args:
        path: the ledger.
        register: the register of its key's runs (noise.key.runs), which knows of releases that an older copy of the ledger lacks.

    Returns:
        What is promised, and under `problems` whatever contradicts it.

    Raises:
        ValueError: if there is no ledger, or no register where one is named.
    """
    found = verify_records(path, register=register)
    changed, missing = compare_model_file(Path(path))
    return replace(found, problems=(*found.problems, *changed), notes=(*found.notes, *missing))


def verify_records(path: Path | str, *, register: Path | str | None = None) -> Verification:
    """As `verify`, of the ledger's own file alone: what ε of a run is, its last model's file does not say."""
    with reader(path) as connection:
        run = stored_run(connection)
        plan = Plan.from_description(run.planned)
        problems = []
        if run.configuration_hash != sha256(f"{run.plan} {run.configuration}"):
            problems.append("the plan and the configuration are not those whose hash is on record")
        rows = connection.execute(
            "SELECT round, attempt FROM attempts WHERE state IN ('released', 'spent') ORDER BY round"
        ).fetchall()
        released = len(rows)
        if [round for round, _ in rows] != list(range(released)):
            problems.append(f"the released rounds are not 1 … {released}, once each")
        if released > plan.participation.rounds:
            problems.append(
                f"{plural(released, 'round is', 'rounds are')} released, and {plan.participation.rounds} are accounted for"
            )
        # Nonces are 128 random bits, and equal by no chance; of a simulation, numbers of tries.
        key = "nonce" if not run.simulated else "round, nonce"
        (doubled,) = connection.execute(
            f"SELECT count(*) FROM (SELECT 1 FROM attempts WHERE nonce IS NOT NULL GROUP BY {key} HAVING count(*) > 1)"  # noqa: S608
        ).fetchone()
        if doubled:
            problems.append(plural(doubled, "nonce is", "nonces are") + " on record for two sums")
        problems += _participation_problems(connection, plan)
        problems += table_problems(connection)
        settings = run.settings
        (users,) = connection.execute("SELECT count(*) FROM users").fetchone()
        notes = _notes(connection, plan, evaluations=EVALUATION_OF in settings)
        if settings.get("kind") == "central":
            notes.append(
                "central training: a user is one example, named by its row number. ε does not cover a person with several rows "
                "as a whole, and runs compose row by row"
            )
        if register is not None:
            differing, asked = compare_with_register(connection, Path(register))
            problems += differing
            notes += asked
        adopted = adoptions(connection)
        forwards = forwards_client_metrics(connection, settings)
        keepers, of_keepers = recorded_keepers(connection, settings, plan)
        problems += of_keepers
    evaluations = evaluation_plan(settings)
    within = min(released, plan.participation.rounds)
    return Verification(
        released=released,
        planned=plan.participation.rounds,
        whole=plan.guarantee(),
        guarantee=plan.guarantee(released=within) if within else None,
        simulated=bool(run.simulated),
        problems=tuple(problems),
        budget=settings.get(BUDGET),
        identity=identity_of(settings),
        with_evaluations=None if evaluations is None else with_evaluations(plan, evaluations),
        forwards_client_metrics=forwards,
        adopted=adopted,
        keepers=keepers,
        notes=tuple(notes),
        users=users,
        least_users=plan.participation.users_for(settings.get("cohort_size", 0)),
    )


def _notes(connection: sqlite3.Connection, plan: Plan, *, evaluations: bool) -> list[str]:
    notes = []
    rounds = () if evaluations else unreleased_sums(connection)  # those of an evaluation nobody sees
    if rounds:
        sums = plural(len(rounds), "noised sum", "noised sums")
        which = f"{', '.join(str(round + 1) for round in rounds[:_NAMED])}{', …' * (len(rounds) > _NAMED)}"
        notes.append(
            f"{sums} may have reached the inner strategy and {'is' if len(rounds) == 1 else 'are'} no release (of round "
            f"{which}): if what it saw there was kept, ε of the whole run is at most "
            f"{rounded_up(epsilon_if_kept(plan, rounds))} at δ = {rounded_up(plan.delta, 6)} ({ADJACENCY}; secret rounds count "
            f"as known; exact Gaussian mechanism), and not {rounded_up(plan.guarantee().epsilon)}"
        )
    if earlier := disorder(connection):
        notes.append(
            f"{plural(earlier, 'time is', 'times are')} on record before one that they must follow: the server's clock was set "
            "back, or the record was changed"
        )
    return notes


_NAMED = 5  # rounds that a note names


def compare_model_file(path: Path) -> tuple[list[str], list[str]]:
    """(Problem, note) about the file of the last model."""
    with reader(path) as connection:
        latest = model_file.described(connection)
    found = None if latest is None else model_file.compared(path, latest)
    if latest is None or found is None:
        return [], []
    with reader(path) as connection:
        if model_file.described(connection) != latest:
            return [], []  # the run went on meanwhile
    name = latest.file(path).name
    if found == "missing":
        return [], [f"the last model, {name}, is not beside the ledger, and was not compared"]
    return [f"{name} is not the model that was released last: it was changed, or is of another round or run"], []


def _participation_problems(connection: sqlite3.Connection, plan: Plan) -> list[str]:
    k, b = plan.participation.participations, plan.participation.min_separation
    (users,) = connection.execute("SELECT count(*) FROM users").fetchone()
    size = users + 1  # numbers are 1, 2, … without gaps
    counts = np.zeros(size, np.int64)
    last = np.full(size, -b, np.int64)
    first = np.full(size, -1, np.int64)
    too_close = in_two_bins = 0
    unknown: set[int] = set()
    for round, packed in connection.execute("SELECT round, users FROM attempts ORDER BY round, id"):
        ids = unpack_ids(packed, users)
        known = ids[(ids > 0) & (ids < size)]
        unknown.update(ids[(ids <= 0) | (ids >= size)].tolist())
        new = known[last[known] != round]  # a round that is tried again counts once
        too_close += int((round - last[new] < b).sum())
        first[new] = np.where(first[new] < 0, round, first[new])
        in_two_bins += int(((round - first[new]) % b != 0).sum())
        counts[new] += 1
        last[new] = round
    stored = np.zeros((2, size), np.int64)
    stored[1] = -b
    in_place = "SELECT id, participations, last_round FROM users WHERE id BETWEEN 1 AND ?"
    for number, count, last_round in connection.execute(in_place, (users,)):
        stored[:, number] = count, last_round
    differing = int(((stored[0] != counts) | (stored[1] != last)).sum())
    found = {
        (f"user took part more than {k} times", f"users took part more than {k} times"): int((counts > k).sum()),
        ("time", "times", f" a user took part less than {b} rounds after the last"): too_close,
        ("time", "times", f" a user took part in another than its bin (round modulo {b})"): (
            in_two_bins * plan.participation.scheme.has_bins
        ),
        ("user has counters that differ", "users have counters that differ", " from the cohorts on record"): differing,
        ("user who was asked is", "users who were asked are", " not in the table of users"): len(unknown),
    }
    return [plural(number, words[0], words[1]) + "".join(words[2:]) for words, number in found.items() if number]


_WORDS = {
    "declared": (
        'whoever a node says (identity "declared"): each name that a node gives is a user. A node that is registered at the '
        "SuperLink keeps the users that it named first, and one with clipped_update_mod stays one user, all run long. What pools "
        "of many users, and nodes that are not registered, say is believed, also if they come back and name others. A person "
        "with two names counts as two users, each with this ε"
    ),
    "authenticated": (
        'a node that is registered at the SuperLink (identity "authenticated"), by its name there. A person who registers two '
        "keys counts as two users, each with this ε"
    ),
}


def identity_of(configuration: Mapping[str, Any]) -> str | None:
    """What tells one user of a run from another, from the run's configuration; None if it has no nodes."""
    return _WORDS.get(str(configuration.get("identity")))
