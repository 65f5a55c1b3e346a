"""ε derived again from the records of a run alone, and whatever in them contradicts it or the register of the key."""

import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedcgd.accounting import ADJACENCY, Guarantee, JointGuarantee, PastRun, compose, gaussian
from fedcgd.accounting.guarantee import large_delta, rounded_up
from fedcgd.accounting.shares import KeeperGuarantee, NoiseShares, guarantees_by_collusion
from fedcgd.ledger import attempts, model_file
from fedcgd.ledger.registry import read_register
from fedcgd.ledger.store import (
    BUDGET,
    EVALUATION_OF,
    KEEPERS,
    MOST_KEEPERS,
    StoredRun,
    evaluation_plan,
    reader,
    stored_run,
    unpack_ids,
)
from fedcgd.ledger.texts import NAMED, NOTES, PROBLEMS, Finding, LedgerError, finding
from fedcgd.mechanisms.mechanism import Mechanism, Vector
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.mechanisms.toeplitz import Toeplitz
from fedcgd.noise.keys import NONCE_BYTES
from fedcgd.participation import Participation
from fedcgd.plan import Plan
from fedcgd.support.html import table
from fedcgd.support.untrusted import MalformedError, clean


@dataclass(frozen=True, kw_only=True)
class RecordedKeepers:
    """The keepers of a run: who they are, in which rounds they were, and what holds against how many of them.

    Of `planned` and `so_far` each has one entry for 0, 1, … all keepers that work with the server; `so_far` goes by the keepers
    of each round on record, and is empty before the first release.
    """

    digest: str
    names: tuple[str, ...]
    colluding: int
    away: int
    planned: tuple[KeeperGuarantee, ...]
    so_far: tuple[KeeperGuarantee, ...]
    spent: int
    """Rounds that keepers were asked to open and that gave no model: they count as released."""
    with_evaluations: tuple[float, ...] = ()
    """ε of the planned run and its planned evaluations, in the order of `planned`; empty if there are no evaluations."""

    def to_description(self) -> dict[str, Any]:
        """All of it as JSON-able values."""
        return vars(self) | {
            "planned": [found.to_description() for found in self.planned],
            "so_far": [found.to_description() for found in self.so_far],
            "with_evaluations": [None if math.isinf(epsilon) else epsilon for epsilon in self.with_evaluations],
        }


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a ledger says of its run besides its plan.

    Attributes:
        simulated: whether the key came from a simulation seed: then the run is not private, whatever ε says.
        identity: "declared" or "authenticated", what tells one user from another; None for a run without nodes.
        budget: the joint ε and δ that the run was begun with, and under `after` the plans of the earlier runs that it counts, by
            their streams. Who was in those, their ledgers say: `joint` of them all checks the budget.
        users: how many were asked, answered or not.
        least_users: how many the plan and the planned size of a cohort need, or expect; 0 where that is not on record.
        said: who ran it, what for and on which data, as its operator noted it in the ledger.
    """

    simulated: bool
    identity: str | None
    budget: dict[str, Any] | None
    users: int
    least_users: int
    said: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What the records of a run prove.

    Attributes:
        released: the rounds that are released.
        whole: ε of the whole run as planned: what is promised whatever decides when it stops.
        guarantee: ε for what has been released, under its `condition` if that is a part of the run; None before the first
            release.
        with_evaluations: ε of the whole run and all its private evaluations, if it was begun with some.
        keepers: who made the noise, where the server did not, and against whom ε holds.
        run: what else the ledger says of its run.
        problems: what in the records contradicts each other or the plan; empty if nothing does.
        notes: what contradicts nothing, and a reviewer has to know or ask about.
    """

    released: int
    whole: Guarantee
    guarantee: Guarantee | None
    with_evaluations: JointGuarantee | None
    keepers: RecordedKeepers | None
    run: RunFacts
    problems: tuple[Finding, ...]
    notes: tuple[Finding, ...]

    @property
    def planned(self) -> int:
        """The rounds of the plan."""
        return self.whole.rounds

    @property
    def delta_note(self) -> str | None:
        """What to say of a δ that is large for the users on record and planned; None if it is not."""
        return large_delta(self.whole.delta, max(self.run.users, self.run.least_users))

    @property
    def noiseless(self) -> bool:
        """The plan is one for debugging, without noise: nothing in the run is private."""
        return self.whole.noise_multiplier == 0

    def _repr_html_(self) -> str:
        """What the records prove, for notebooks; no ε where they contradict each other or the key is a simulation's."""
        rows: dict[str, object] = {"rounds released": f"{self.released} of {self.planned}"}
        if self.run.simulated:
            rows["simulated"] = "yes: not private, whatever ε would be"
        rows |= {name: "; ".join(found) for name in ("problems", "notes") if (found := getattr(self, name))}
        sound = not (self.problems or self.run.simulated)
        return table(rows) + "".join(each._repr_html_() for each in (self.whole, self.guarantee) if sound and each)

    def to_description(self) -> dict[str, Any]:
        """All of it as JSON-able values."""
        parts = {name: getattr(self, name) for name in ("whole", "guarantee", "with_evaluations", "keepers")}
        return {
            **vars(self.run),
            "released": self.released,
            "planned": self.planned,
            "problems": self.problems,
            "notes": self.notes,
            **{name: part and part.to_description() for name, part in parts.items()},
            "noiseless": self.noiseless,
            "delta_note": self.delta_note,
        }


def verify(path: Path | str, *, register: Path | str | None = None) -> Verification:
    """The ε of a recorded run, derived again from the records alone.

    Checks that plan and configuration are those that were hashed, that rounds were released in order and once each, that no
    noise was used twice, and from the cohorts that were asked, also those of abandoned attempts, that no user exceeds
    the participation that ε relies on, and that the users' counters, which the scheduler goes by, say the same; and that
    attempts, the last model and its file, and the register if there is one, agree about what was released.

    Args:
        path: the ledger.
        register: the register of its key's runs (noise.key.runs), which knows of releases that an older copy of the ledger lacks.

    Returns:
        What is promised, and under `problems` whatever contradicts it.

    Raises:
        ValueError: if there is no ledger, or no register where one is named.
    """
    with reader(path) as connection:
        run = stored_run(connection)
        plan, settings = Plan.from_description(run.planned), run.settings
        released = attempts.count_released(connection)
        (users,) = connection.execute("SELECT count(*) FROM users").fetchone()
        found = _table_problems(connection, run) + _participation_problems(connection, plan, users)
        if run.configuration_hash != run.defined.configuration_hash:
            found.append(finding("another-hash"))
        if released > plan.participation.rounds:
            found.append(finding("too-many-rounds", released=released, planned=plan.participation.rounds))
        found += [] if register is None else _compare_with_register(connection, run, Path(register))
        keepers, of_keepers = _recorded_keepers(connection, settings, plan)
        found += of_keepers + _notes(connection, plan, settings)
        facts = RunFacts(
            simulated=bool(run.defined.simulated),
            identity=settings.get("identity") and clean(settings["identity"]),
            budget=settings.get(BUDGET),
            users=users,
            least_users=plan.participation.users_for(settings.get("cohort_size", 0)),
            said={clean(name): clean(text) for name, text in connection.execute("SELECT name, text FROM notes")},
        )
    try:
        model_file.last(Path(path))
    except LedgerError as error:
        found += [finding(_OF_MODELS[error.reason])] if error.reason in _OF_MODELS else []
    evaluations = evaluation_plan(settings)
    within = min(released, plan.participation.rounds)
    return Verification(
        released=released,
        whole=plan.guarantee(),
        guarantee=plan.guarantee(released=within) if within else None,
        with_evaluations=None if evaluations is None else with_evaluations(plan, evaluations),
        keepers=keepers,
        run=facts,
        problems=tuple(one for one in found if one.reason in PROBLEMS),
        notes=tuple(one for one in found if one.reason in NOTES),
    )


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


_OF_MODELS = {"model-changed": "model-differs", "model-missing": "model-not-there"}
"""Why the last model cannot be read → what is found then; of a run that has released none there is nothing to say."""


def _notes(connection: sqlite3.Connection, plan: Plan, settings: Mapping[str, Any]) -> list[Finding]:
    notes = []
    # Whose sum got noise from the server, and is no release: they failed after that.
    query = "SELECT round FROM attempts WHERE state = 'aggregated' OR (state = 'abandoned' AND nonce IS NOT NULL) ORDER BY id"
    rounds = [round for (round,) in connection.execute(query)]
    if rounds and EVALUATION_OF not in settings:  # nobody sees those of an evaluation
        which = f"{', '.join(str(round + 1) for round in rounds[:NAMED])}{', …' * (len(rounds) > NAMED)}"
        kept, whole = rounded_up(epsilon_if_kept(plan, rounds)), rounded_up(plan.guarantee().epsilon)
        delta = rounded_up(plan.delta, 6)
        notes.append(
            finding(
                "kept-sums", sums=len(rounds), rounds=which, kept=kept, delta=delta, adjacency=ADJACENCY, whole=whole
            )
        )
    for at, released in connection.execute("SELECT at, released FROM places ORDER BY rowid LIMIT -1 OFFSET 1"):
        notes.append(finding("another-place", at=clean(at, 10), rounds=released))
    if settings.get("kind") == "central":
        notes.append(finding("central"))
    return notes


_TRIES = """(SELECT *,
    coalesce(sum(state IN ('released', 'spent')) OVER (ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS turn,
    coalesce(lag(id) OVER (ORDER BY id), 0) AS last,
    CASE WHEN lag(state) OVER (ORDER BY id) IN ('released', 'spent') THEN 0
        ELSE coalesce(lag(attempt) OVER (ORDER BY id) + 1, 0) END AS next
    FROM attempts)"""
"""Every attempt with the number of rounds that were over before it, the one before, and the number that it should have."""

_CHECKS = {
    "two-sums": """SELECT count(*) FROM (SELECT 1 FROM attempts, run WHERE nonce IS NOT NULL
        GROUP BY nonce, CASE WHEN simulated THEN attempts.round END HAVING count(*) > 1)""",
    "another-turn": f"SELECT count(*) FROM {_TRIES} WHERE round != turn",
    "attempts-missing": f"SELECT count(*) FROM {_TRIES} WHERE id != last + 1 OR (round = turn AND attempt != next)",
    "another-state": """SELECT count(*) FROM attempts WHERE (nonce IS NULL) != (aggregated IS NULL)
        OR (state != 'abandoned' AND (aggregated IS NULL) != (state = 'planned'))
        OR (ended IS NULL) != (state IN ('planned', 'aggregated', 'opening'))""",
    "opened-and-undone": """SELECT count(*) FROM openings LEFT JOIN attempts USING (round, attempt)
        WHERE coalesce(state, '') NOT IN ('opening', 'released', 'spent')""",
    "spent-unasked": """SELECT count(*) FROM attempts LEFT JOIN openings USING (round, attempt)
        WHERE state IN ('opening', 'spent') AND list_hash IS NULL""",
    "made-up-stream": """SELECT count(*) FROM run WHERE NOT simulated
        AND (length(stream_id) != 32 OR stream_id GLOB '*[^0-9a-f]*')""",
}
"""Reason → how often the tables of a ledger say what cannot be true."""


def _table_problems(connection: sqlite3.Connection, run: StoredRun) -> list[Finding]:
    """What the tables of a ledger say that cannot all be true."""
    numbers = {reason: connection.execute(query).fetchone()[0] for reason, query in _CHECKS.items()}
    found = [finding(reason, number=number, run=run) for reason, number in numbers.items() if number]
    latest, models = model_file.described(connection), model_file.count_models(connection)
    if (latest is None) != (models == 0) or (latest is not None and latest.round != models - 1):
        here = "none" if latest is None else f"number {latest.round + 1}"
        found.append(finding("last-model", here=here, models=models))
    return found


def _participation_problems(connection: sqlite3.Connection, plan: Plan, users: int) -> list[Finding]:
    k, b = plan.participation.participations, plan.participation.min_separation
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
    found = {
        "more-participations": int((counts > k).sum()),
        "too-close": too_close,
        "two-bins": in_two_bins * plan.participation.scheme.has_bins,
        "other-counters": int(((stored[0] != counts) | (stored[1] != last)).sum()),
        "users-unknown": len(unknown),
    }
    return [finding(reason, number=number, k=k, b=b) for reason, number in found.items() if number]


def _compare_with_register(connection: sqlite3.Connection, run: StoredRun, register: Path) -> list[Finding]:
    """Where a ledger differs from what the register of its key's runs knows of the run.

    The register is written after the ledger: a crash in between leaves the ledger one round ahead, and no more. A seal that it
    does not know is no contradiction: `seal` without the key file writes into the ledger alone.

    Raises ValueError if there is no register at `register`.
    """
    known = next((one for one in read_register(register) if one.stream_id == run.stream_id), None)
    if known is None:
        return [finding("register-does-not-know", register=register)]
    nonces = attempts.nonces_of(connection)
    here, there = len(nonces), known.released
    last = nonces[there - 1].to_bytes(NONCE_BYTES, "big") if 0 < there <= here else None
    found = {
        "register-has-other-settings": known.settings != run.defined.run_hash,
        "register-has-more": here < there,
        "register-has-less": here > there + 1,
        "register-has-another-nonce": there <= here <= there + 1 and last != known.nonce and there > 0,
        "register-has-a-seal": known.sealed is not None and run.sealed is None,
        "seal-unknown": run.sealed is not None and known.sealed is None,
    }
    facts = {"register": register, "here": here, "there": there, "sealed": clean(known.sealed or run.sealed)}
    return [finding(reason, **facts) for reason, wrong in found.items() if wrong]


def epsilon_if_kept(plan: Plan, rounds: Sequence[int]) -> float:
    """ε at the plan's δ of the whole run and one noised sum more for each of `rounds`, whatever the plan's sampling hides.

    Adjacency: zero out one user. ∞ without noise. Secret rounds count as known.

    The inner strategy sees a round's noised mean before the release is on record. If the server is killed then, the round is
    tried again, with other noise for the vector Z of that round. A copy that was kept is then one more output of the run.

    Let the copy be of round t. It is y = x' + ζσ·(C⁻¹Z)_t with a fresh Z_t and the Z_s of the earlier releases. Given those
    releases it has the same information as Σ_{s<t} C[t, s]·x_s + C[t, t]·x' + ζσ·Z_t: one more row of CX, with noise of its
    own. So releases and copies together are one Gaussian mechanism, whose matrix is lower-triangular in the order in which
    they were made (so that updates may depend on what came before), and whose squared sensitivity is that of C and, for each
    copy, the square of the most that one user moves row t of CX: Σ_j |C[t, p_j]| over rounds p_j ≤ t that are at least b
    apart, at most k of them. Also a user who is not in that sum is in the row.
    """
    if plan.noiseless:
        return math.inf
    reach = sensitivity(plan.mechanism, plan.participation).value
    squares = reach**2 + sum(row_reach(plan.mechanism, plan.participation, round) ** 2 for round in rounds)
    together = math.sqrt(squares) * (1 + 1e-9)  # rounding
    return max(plan.guarantee().epsilon, gaussian.epsilon(sigma=plan.noise_multiplier / together, delta=plan.delta))


def row_reach(mechanism: Mechanism, participation: Participation, round: int) -> float:
    """max Σ_j |C[t, p_j]| over rounds p_j ≤ t = `round` that one user may take part in, or an upper bound of it.

    Exact where |C[t, s]| does not fall with s; else for the least such row above it.
    """
    k, b = participation.participations, participation.min_separation
    rising = np.maximum.accumulate(_row(mechanism, round, participation.rounds))
    return float(np.sum(rising[::-1][::b][:k]))


def _row(mechanism: Mechanism, round: int, rounds: int) -> Vector:
    """|C[t, 0 … t]|."""
    if isinstance(mechanism, Toeplitz):
        row = np.asarray(mechanism.coefficients(rounds), np.float64)[: round + 1][::-1]
    else:
        parts = (np.arange(i, min(i + 64, round + 1)) for i in range(0, round + 1, 64))  # columns that fit into memory
        row = np.concatenate([mechanism.columns(rounds, part)[round] for part in parts])
    size: Vector = np.abs(row)
    return size


def _recorded_keepers(
    connection: sqlite3.Connection, configuration: Mapping[str, Any], plan: Plan
) -> tuple[RecordedKeepers | None, list[Finding]]:
    """(What the ledger says of keepers, None for a run without; what in it contradicts itself)."""
    described = configuration.get(KEEPERS)
    if described is None:
        return None, []
    names = tuple(sorted(map(clean, described["keepers"])))
    if len(names) > MOST_KEEPERS:
        raise MalformedError(f"there are at most {MOST_KEEPERS} keepers, and {len(names)} are on record")
    shares = NoiseShares(keepers=len(names), colluding=described["colluding"], away=described["away"])
    counted = [opened for opened in attempts.read_openings(connection) if opened.state in attempts.COUNTED]
    wrong = sum(
        not len(names) - shares.away <= len(opened.keepers) <= len(names)
        or list(opened.keepers) != sorted(set(opened.keepers))
        or not set(opened.keepers) <= set(names)
        for opened in counted
    )
    rows = connection.execute("SELECT round, nonce FROM attempts WHERE state IN ('released', 'spent')").fetchall()
    hashes = {opened.round: opened.list_hash[:NONCE_BYTES] for opened in counted}
    unopened = sum(hashes.get(round) != nonce for round, nonce in rows)
    found = {"other-keepers": wrong, "no-opening": unopened}
    evaluations = evaluation_plan(configuration)
    released = min(len(rows), plan.participation.rounds)
    against = partial(
        guarantees_by_collusion, plan.accountant, shares, noise_multiplier=plan.noise_multiplier, delta=plan.delta
    )
    present = [len(opened.keepers) for opened in counted]
    keepers = RecordedKeepers(
        digest=clean(described["digest"]),
        names=names,
        colluding=shares.colluding,
        away=shares.away,
        planned=tuple(against(released=None, present=[])),
        so_far=tuple(against(released=released, present=present)) if released and not wrong else (),
        spent=sum(opened.state == "spent" for opened in counted),
        with_evaluations=() if evaluations is None else with_evaluations_by_collusion(plan, evaluations, shares),
    )
    return keepers, [finding(reason, rounds=number) for reason, number in found.items() if number]
