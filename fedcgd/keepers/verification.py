"""Whether keepers were told the same: their records beside each other, and beside the ledger of the run."""

import json
from collections.abc import Mapping
from pathlib import Path

from fedcgd.keepers.record import Recorded
from fedcgd.ledger import openings
from fedcgd.ledger.store import reader


def contradictions(records: Mapping[str, Recorded], ledger: Path | None = None) -> list[str]:
    """What in the records of keepers contradicts each other or the run's ledger; empty if nothing does.

    Two honest keepers that opened different lists have opened nothing; but a server that asked them to is not one that follows
    the protocol. A keeper may have been away, or never answered a round that was spent.

    Args:
        records: keeper's name → what its record says.
        ledger: that of the run; None if it is not at hand.
    """
    problems = []
    contexts = {name: record.context for name, record in records.items() if record.context is not None}
    if len(set(contexts.values())) > 1:
        problems.append(f"{', '.join(sorted(contexts))} have not served the same run, or not under the same terms")
    lists: dict[int, dict[bytes, list[str]]] = {}
    for name, record in records.items():
        for opened in record.openings:
            lists.setdefault(opened.round, {}).setdefault(opened.list_hash, []).append(name)
    for round, by_hash in sorted(lists.items()):
        if len(by_hash) > 1:
            groups = " and ".join(", ".join(sorted(names)) for names in by_hash.values())
            problems.append(f"round {round}: different lists were opened by {groups}")
    return problems if ledger is None else problems + _beside_the_ledger(records, lists, ledger)


def _beside_the_ledger(
    records: Mapping[str, Recorded], lists: Mapping[int, Mapping[bytes, list[str]]], ledger: Path
) -> list[str]:
    with reader(ledger) as connection:
        on_record = {opened.round: opened for opened in openings.read(connection)}
        stream_id, plan, configuration = connection.execute("SELECT stream_id, plan, configuration FROM run").fetchone()
    described = json.loads(configuration).get(openings.KEEPERS)
    if described is None:
        return [f"{ledger} is the ledger of a run without keepers"]
    problems = []
    for name, record in sorted(records.items()):
        if described["keepers"].get(name) != record.key_fingerprint:
            problems.append(f"{name} ({record.key_fingerprint}) is none of the keepers in {ledger}")
        if record.agreement is None:
            continue
        agreed = json.loads(record.agreement)
        if agreed["run"] != stream_id:
            problems.append(f"{name} has served another run than that of {ledger}")
        wanted = json.loads(plan)
        if {key: value for key, value in agreed["plan"].items() if key != "clip_norm"} != {
            key: value for key, value in wanted.items() if key != "clip_norm"
        }:
            problems.append(f"{name} has made noise for another plan than that of {ledger}")
    for round, by_hash in sorted(lists.items()):
        opened = on_record.get(round)
        names = sorted(name for found in by_hash.values() for name in found)
        if opened is None:
            problems.append(f"round {round} was opened by {', '.join(names)}, and {ledger} knows nothing of it")
        elif set(by_hash) != {opened.list_hash}:
            problems.append(f"round {round}: the list in {ledger} is not the one that {', '.join(names)} opened")
    for round, opened in sorted(on_record.items()):
        missing = [
            name
            for name in opened.keepers
            if name in records and round not in {one.round for one in records[name].openings}
        ]
        if missing and opened.state == "released":
            problems.append(f"round {round} is released in {ledger}, and {', '.join(missing)} never opened it")
    return problems
