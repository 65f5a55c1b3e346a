"""What a ledger says of the keepers that made a run's noise, and against whom its ε holds."""

import math
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedcgd.accounting.shares import KeeperGuarantee, NoiseShares, guarantees_by_collusion
from fedcgd.ledger.attempts import COUNTED, KEEPERS, read_openings
from fedcgd.ledger.run_composition import evaluation_plan, with_evaluations_by_collusion
from fedcgd.ledger.texts import Finding, finding
from fedcgd.noise.keys import NONCE_BYTES
from fedcgd.plan import Plan
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


MOST_KEEPERS = 64


def recorded_keepers(
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
    counted = [opened for opened in read_openings(connection) if opened.state in COUNTED]
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

    def by_collusion(rounds: int | None, present: list[int]) -> tuple[KeeperGuarantee, ...]:
        guarantees = guarantees_by_collusion(
            plan.accountant,
            shares,
            noise_multiplier=plan.noise_multiplier,
            delta=plan.delta,
            released=rounds,
            present=present,
        )
        return tuple(guarantees)

    sound = not wrong and released > 0
    keepers = RecordedKeepers(
        digest=clean(described["digest"]),
        names=names,
        colluding=shares.colluding,
        away=shares.away,
        planned=by_collusion(None, []),
        so_far=by_collusion(released, [len(opened.keepers) for opened in counted]) if sound else (),
        spent=sum(opened.state == "spent" for opened in counted),
        with_evaluations=() if evaluations is None else with_evaluations_by_collusion(plan, evaluations, shares),
    )
    return keepers, [finding(reason, rounds=number) for reason, number in found.items() if number]
