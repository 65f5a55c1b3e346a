"""Do the record of mutants, the table of files and the tree agree? `python tools/mutants/check.py`, in seconds; runs no mutant.

    python tools/mutants/check.py --tidy    # drop from the record, and from judged.toml, what the tree no longer holds

Ends with 1 and a line for each disagreement: a file below `fedcgd` or `strategies` that targets.toml neither names nor leaves
out with a reason; a pattern there of nothing; a kill by a test that is gone; a survivor that judged.toml does not explain. What
stands in the record or in judged.toml of lines that are gone claims nothing of the tree: it is counted, and no error.
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


def gone_lines(rows: dict[str, list[str]], records: list[Record]) -> list[Record]:
    """Records of mutants whose file or lines are gone."""
    names: dict[str, set[str]] = {path: {mutant.name for mutant in mutants(path)} for path in rows}
    for bug in run.planted(rows):
        names[bug.path].add(bug.name)
    return [record for record in records if record["mutant"] not in names.get(record["file"], ())]


def gone_tests(records: list[Record]) -> Iterator[tuple[Record, str]]:
    """(record, what is wrong with it) of kills by a test that is gone."""
    tests: dict[str, set[str]] = {}
    for record in records:
        file, _, test = record["by"].partition("::")
        if file and file not in tests:
            source = run.ROOT / file
            text = source.read_text(encoding="utf-8") if source.is_file() else ""
            tests[file] = set(re.findall(r"^\s*def (test_\w+)", text, re.MULTILINE))
        if file and test.partition("[")[0].rpartition("::")[2] not in tests[file]:
            yield record, f"{record['file']} {record['mutant']}: killed by {record['by']}, which is gone"


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
    records = recorded()
    gone = gone_lines(rows, records) + [record for record, _ in gone_tests(records)]
    kept = [record for record in records if record not in gone]
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
    run.RESULTS.write_text("".join(lines), encoding="utf-8")
    text = JUDGED.read_text(encoding="utf-8")
    for entry in stale_judgements():
        text = text.replace(f"[[mutant]]{entry}", "", 1)
    JUDGED.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def disagreements(rows: dict[str, list[str]], records: list[Record]) -> list[str]:
    return [*unnamed_files(rows), *(message for _, message in gone_tests(records)), *unjudged(records)]


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
    records = recorded()
    gone, judgements = gone_lines(rows, records), list(stale_judgements())
    if gone or judgements:
        print(f"{len(gone)} of the record, {len(judgements)} judgements are of lines that are gone: --tidy drops them")
    found = disagreements(rows, [record for record in records if record not in gone])
    print("\n".join(found), file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
