"""Do the record of mutants, the table of files and the tree agree? `python tools/mutants/check.py`, in seconds; runs no mutant.

    python tools/mutants/check.py --tidy    # drop from the record, and from judged.toml, what the tree no longer holds

Ends with 1 and a line for each disagreement: a file below `fedcgd` or `strategies` that targets.toml neither names nor leaves
out with a reason; a pattern there of nothing; a recorded mutant whose lines are gone; a kill by a test that is gone; a survivor
that judged.toml does not explain; an entry of judged.toml whose lines are gone.
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import run
from operators import mutants

JUDGED = run.HERE / "judged.toml"
Record = dict[str, Any]


def recorded() -> list[Record]:
    return [json.loads(line) for line in run.RESULTS.read_text(encoding="utf-8").splitlines()]


def unnamed_files(rows: dict[str, list[str]]) -> Iterator[str]:
    """Files that targets.toml neither names nor leaves out."""
    patterns = tomllib.loads((run.HERE / "targets.toml").read_text(encoding="utf-8"))["excluded"]
    known = {*rows, *(path for pattern in patterns for path in run.files_of(pattern))}
    for root in ("fedcgd", "strategies"):
        for path in run.files_of(f"{root}/**/*.py"):
            if path not in known:
                yield f"targets.toml neither names nor excludes {path}"


def stale_records(rows: dict[str, list[str]], records: list[Record]) -> Iterator[tuple[Record, str]]:
    """(record, what is wrong with it): its file, its lines or its test are gone."""
    names: dict[str, set[str]] = {}
    for bug in run.planted(rows):
        names.setdefault(bug.path, set()).add(bug.name)
    tests: dict[str, set[str]] = {}
    for path in {record["file"] for record in records} & set(rows):
        names.setdefault(path, set()).update(mutant.name for mutant in mutants(path))
    for record in records:
        where = f"{record['file']} {record['mutant']} {record['operator']}"
        file, _, test = record["by"].partition("::")
        if file and file not in tests:
            source = run.ROOT / file
            text = source.read_text(encoding="utf-8") if source.is_file() else ""
            tests[file] = set(re.findall(r"^\s*def (test_\w+)", text, re.MULTILINE))
        if record["file"] not in rows:
            yield record, f"{where}: no row of targets.toml names the file"
        elif record["mutant"] not in names[record["file"]]:
            yield record, f"{where}: the lines are gone"
        elif file and test.partition("[")[0].rpartition("::")[2] not in tests[file]:
            yield record, f"{where}: killed by {record['by']}, which is gone"


def unjudged(records: list[Record]) -> Iterator[str]:
    """Survivors that nobody has judged."""
    entries = tomllib.loads(JUDGED.read_text(encoding="utf-8"))["mutant"]
    judged = {(entry["file"], run.changed(entry["diff"])) for entry in entries}
    for record in records:
        if record["outcome"] == "survived" and (record["file"], run.changed(record["diff"])) not in judged:
            yield f"{record['file']} {record['mutant']} survived, and judged.toml does not say why it may\n{record['diff']}"


def stale_judgements() -> Iterator[str]:
    """The texts of entries of judged.toml whose file or lines are gone."""
    for text in JUDGED.read_text(encoding="utf-8").split("[[mutant]]")[1:]:
        (entry,) = tomllib.loads(f"[[mutant]]{text}")["mutant"]
        source = run.ROOT / entry["file"]
        held = {line.strip() for line in source.read_text(encoding="utf-8").splitlines()} if source.is_file() else set()
        before = [line[1:] for line in run.changed(entry["diff"]).splitlines() if line.startswith("-")]
        if not all(line in held for line in before):
            yield text


def tidy(rows: dict[str, list[str]]) -> None:
    """Drop what the tree no longer holds."""
    stale = [record for record, _ in stale_records(rows, recorded())]
    kept = [record for record in recorded() if record not in stale]
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
    run.RESULTS.write_text("".join(lines), encoding="utf-8")
    text, gone = JUDGED.read_text(encoding="utf-8"), list(stale_judgements())
    for entry in gone:
        text = text.replace(f"[[mutant]]{entry}", "", 1)
    JUDGED.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    print(f"dropped {len(stale)} of the record, {len(gone)} judgements")


def disagreements(rows: dict[str, list[str]]) -> list[str]:
    records = recorded()
    stale = [message for _, message in stale_records(rows, records)]
    judgements = [f"judged.toml: the lines are gone of{text.rstrip()}" for text in stale_judgements()]
    return [*unnamed_files(rows), *stale, *unjudged(records), *judgements]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tidy", action="store_true", help="drop what the tree no longer holds, then check")
    options = parser.parse_args()
    try:
        rows = run.targets([])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if options.tidy:
        tidy(rows)
    found = disagreements(rows)
    print("\n".join(found), file=sys.stderr)
    if any("gone" in message for message in found):
        print("python tools/mutants/check.py --tidy drops what is gone; make mutants tries anew", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
