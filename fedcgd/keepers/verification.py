"""Whether keepers were told the same: their records next to each other, and next to the ledger of the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcgd.keepers.agreement import EVALUATION, TRAINING
from fedcgd.keepers.record import Recorded
from fedcgd.ledger.attempts import RecordedOpening, read_openings
from fedcgd.ledger.store import KEEPERS, evaluation_ledger, reader, stored_run
from fedcgd.plan import PLAN_FORM
from fedcgd.support.untrusted import Optional, clean, parse_json


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
    lists: _Lists = {}
    for name, record in records.items():
        for opened in record.openings:
            lists.setdefault((opened.kind, opened.round), {}).setdefault(opened.list_hash, []).append(name)
    for (kind, round), by_hash in sorted(lists.items(), key=_training_first):
        if len(by_hash) > 1:
            groups = " and ".join(", ".join(sorted(names)) for names in by_hash.values())
            problems.append(f"{_round(kind, round)}: different lists were opened by {groups}")
    return problems if ledger is None else problems + _beside_the_ledger(records, lists, ledger)


AGREED: dict[Any, Any] = {
    "run": str,
    "size": int,
    "keepers": str,
    "plan": PLAN_FORM,
    EVALUATION: Optional({"plan": PLAN_FORM, str: object}),
    str: object,
}
"""What a keeper's record says of the agreement, as far as it is read."""

_Lists = dict[tuple[str, int], dict[bytes, list[str]]]
"""(kind, round) → what was opened → by which keepers."""


def _training_first(entry: tuple[tuple[str, int], object]) -> tuple[bool, int]:
    (kind, round), _ = entry
    return kind != TRAINING, round


def _round(kind: str, round: int) -> str:
    return f"round {round}" if kind == TRAINING else f"{kind} round {round}"


def _on_record(ledger: Path) -> dict[tuple[str, int], RecordedOpening]:
    """What keepers were asked to open, in the run's ledger and in that of its evaluations next to it."""
    found: dict[tuple[str, int], RecordedOpening] = {}
    for kind, path in ((TRAINING, ledger), (EVALUATION, evaluation_ledger(ledger))):
        if kind == TRAINING or path.exists():
            with reader(path) as connection:
                found |= {(kind, opened.round): opened for opened in read_openings(connection)}
    return found


def _beside_the_ledger(records: Mapping[str, Recorded], lists: _Lists, ledger: Path) -> list[str]:
    on_record = _on_record(ledger)
    with reader(ledger) as connection:
        run = stored_run(connection)
    settings = run.settings
    described, evaluations = settings.get(KEEPERS), settings.get(EVALUATION)
    if described is None:
        return [f"{ledger} is the ledger of a run without keepers"]
    problems = []
    for name, record in sorted(records.items()):
        if described["keepers"].get(name) != record.key_fingerprint:
            problems.append(f"{name} ({clean(record.key_fingerprint)}) is none of the keepers in {ledger}")
        if record.agreement is None:
            continue
        agreed = parse_json(record.agreement, AGREED, f"the agreement of {name}")
        if agreed["run"] != run.stream_id:
            problems.append(f"{name} has served another run than that of {ledger}")
        wanted = run.planned
        if {key: value for key, value in agreed["plan"].items() if key != "clip_norm"} != {
            key: value for key, value in wanted.items() if key != "clip_norm"
        }:
            problems.append(f"{name} has made noise for another plan than that of {ledger}")
        if agreed.get(EVALUATION, {}).get("plan") != (evaluations and evaluations["plan"]):
            problems.append(f"{name} has agreed on evaluations of another plan than those of {ledger}")
    for (kind, round), by_hash in sorted(lists.items(), key=_training_first):
        opened, which = on_record.get((kind, round)), _round(kind, round)
        names = sorted(name for found in by_hash.values() for name in found)
        if opened is None:
            problems.append(f"{which} was opened by {', '.join(names)}, and {ledger} knows nothing of it")
        elif set(by_hash) != {opened.list_hash}:
            problems.append(f"{which}: the list in {ledger} is not the one that {', '.join(names)} opened")
    for (kind, round), opened in sorted(on_record.items(), key=_training_first):
        missing = [
            name
            for name in opened.keepers
            if name in records and (kind, round) not in {(one.kind, one.round) for one in records[name].openings}
        ]
        if missing and opened.state == "released":
            problems.append(f"{_round(kind, round)} is released in {ledger}, and {', '.join(missing)} never opened it")
    return problems
