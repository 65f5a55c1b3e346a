"""What a ledger says of the keepers that made a run's noise, and against whom its ε holds."""

import math
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedcgd.accounting.guarantee import rounded_up
from fedcgd.accounting.shares import KeeperGuarantee, NoiseShares, guarantees_by_collusion
from fedcgd.ledger import openings
from fedcgd.ledger.evaluations import evaluation_plan, with_evaluations_by_collusion
from fedcgd.noise.keys import NONCE_BYTES
from fedcgd.plan import Plan
from fedcgd.support.numbers import plural
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

    def __str__(self) -> str:
        held = ", ".join(f"{found.colluding}: {rounded_up(found.epsilon)}" for found in self.planned)
        if self.with_evaluations:
            both = ", ".join(f"{number}: {rounded_up(epsilon)}" for number, epsilon in enumerate(self.with_evaluations))
            held += f"; with its evaluations {both}"
        spent = f"; {plural(self.spent, 'round is', 'rounds are')} spent without a model" if self.spent else ""
        return (
            f"{len(self.names)} ({', '.join(self.names)}) make the noise, and the server has no key of it. ε at "
            f"δ = {rounded_up(self._delta, 6)} against the server, all other nodes and so many of them: {held}{spent}"
        )

    @property
    def _delta(self) -> float:
        return next(found.guarantee.delta for found in self.planned if found.guarantee is not None)

    @property
    def promise(self) -> str:
        """The promise in words, to stand after that of the released models."""
        epsilons = self.with_evaluations or tuple(found.epsilon for found in self.planned)
        beyond = range(self.colluding + 1, len(self.names))
        what = "ε of models and evaluations together" if self.with_evaluations else "ε"
        more = ", ".join(f"with {number} of them {what} is at most {rounded_up(epsilons[number])}" for number in beyond)
        return (
            f"The noise was made by {len(self.names)} keepers ({', '.join(self.names)}), and the server saw noised sums only: "
            f"the same holds against the server's operator, together with any {self.colluding} of the keepers and all nodes but "
            f"the user's own, as far as they follow the protocol; {more + '; ' if more else ''}with all of them "
            "nothing is promised. It does not hold against an operator who changed the code that nodes or keepers ran."
        )

    def to_description(self) -> dict[str, Any]:
        """All of it as JSON-able values."""
        return {
            "digest": self.digest,
            "names": list(self.names),
            "colluding": self.colluding,
            "away": self.away,
            "planned": [found.to_description() for found in self.planned],
            "so_far": [found.to_description() for found in self.so_far],
            "spent": self.spent,
            "with_evaluations": [None if math.isinf(epsilon) else epsilon for epsilon in self.with_evaluations],
        }


def keeper_facts(description: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Name and value of each figure of a description, as in a privacy statement; none for a run without keepers."""
    if description is None:
        return []
    planned = [found["epsilon"] for found in description["planned"]]
    rows = [("keepers", f"{', '.join(description['names'])} (keepers.toml {description['digest'][:16]})")]
    for what, epsilons in (("ε", planned), ("ε with its evaluations", description["with_evaluations"])):
        for number, epsilon in enumerate(epsilons):
            bound = "∞" if epsilon is None else f"at most {rounded_up(epsilon)}"
            rows.append((f"{what} against the server with {plural(number, 'keeper', 'keepers')}", bound))
    if description["spent"]:
        rows.append(("rounds spent without a model", str(description["spent"])))
    return rows


def recorded_keepers(
    connection: sqlite3.Connection, configuration: Mapping[str, Any], plan: Plan
) -> tuple[RecordedKeepers | None, list[str]]:
    """(What the ledger says of keepers, None for a run without; what in it contradicts itself)."""
    described = configuration.get(openings.KEEPERS)
    if described is None:
        return None, []
    names = tuple(sorted(map(clean, described["keepers"])))
    if len(names) > openings.MOST_KEEPERS:
        raise MalformedError(f"there are at most {openings.MOST_KEEPERS} keepers, and {len(names)} are on record")
    shares = NoiseShares(keepers=len(names), colluding=described["colluding"], away=described["away"])
    least = shares.keepers - shares.away
    counted = [opened for opened in openings.read(connection) if opened.state in ("released", "spent")]
    problems = []
    wrong = sum(
        not least <= len(opened.keepers) <= shares.keepers
        or list(opened.keepers) != sorted(set(opened.keepers))
        or not set(opened.keepers) <= set(names)
        for opened in counted
    )
    if wrong:
        problems.append(plural(wrong, "round has", "rounds have") + " other keepers than the run")
    rows = connection.execute("SELECT round, nonce FROM attempts WHERE state IN ('released', 'spent')").fetchall()
    hashes = {opened.round: opened.list_hash[:NONCE_BYTES] for opened in counted}
    unopened = sum(hashes.get(round) != nonce for round, nonce in rows)
    if unopened:
        problems.append(
            plural(unopened, "round was", "rounds were") + " released without the keepers' opening on record"
        )
    evaluations = evaluation_plan(configuration)
    released = min(len(rows), plan.participation.rounds)
    present = [len(opened.keepers) for opened in counted]

    def by_collusion(rounds: int | None, present: list[int]) -> tuple[KeeperGuarantee, ...]:
        found = guarantees_by_collusion(
            plan.accountant,
            shares,
            noise_multiplier=plan.noise_multiplier,
            delta=plan.delta,
            released=rounds,
            present=present,
        )
        return tuple(found)

    sound = not wrong and released > 0
    keepers = RecordedKeepers(
        digest=clean(described["digest"]),
        names=names,
        colluding=shares.colluding,
        away=shares.away,
        planned=by_collusion(None, []),
        so_far=by_collusion(released, present) if sound else (),
        spent=sum(opened.state == "spent" for opened in counted),
        with_evaluations=() if evaluations is None else with_evaluations_by_collusion(plan, evaluations, shares),
    )
    return keepers, problems
