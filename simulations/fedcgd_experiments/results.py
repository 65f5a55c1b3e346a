"""Results: JSON lines that are appended as they come, and read as one flat row for each training run."""

import csv
import json
import math
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedcgd_experiments.study import Known, Point, identity

Record = dict[str, Any]
Row = dict[str, Any]
"""A training run: the fields of its point, its `accuracy` (None if it broke off), what its ε means, and what made it."""


class Results:
    """A file of records: of kind "runs", in which what all rows share stands once; and of kind "made", which those refer to.

    A line that was cut off by a crash is left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records: list[Record] = []
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            try:
                self.records.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        self._ends_in_a_line = not text or text.endswith("\n")

    def append(self, rows: Sequence[Row]) -> None:
        """Keep `rows`, here and in the file, as one record, with the commit and the versions that made them."""
        made = provenance()
        if not any(record == made for record in self.records):
            self._write(made)
        self._write(packed(rows) | {"made": made["name"]})

    def rows(self) -> list[Row]:
        """All training runs, each with the commit that made it."""
        commits = {record["name"]: record["commit"] for record in self.records if record["kind"] == "made"}
        return [
            {**row, "commit": commits.get(record.get("made"), "")}
            for record in self.records
            if record["kind"] == "runs"
            for row in unpacked(record)
        ]

    def _write(self, record: Record) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(("" if self._ends_in_a_line else "\n") + json.dumps(record, ensure_ascii=False) + "\n")
        self._ends_in_a_line = True
        self.records.append(record)


def packed(rows: Sequence[Row]) -> Record:
    """One record of `rows`: what they share in `common`, the rest by `columns`."""
    first = rows[0]
    common = {name: value for name, value in first.items() if all(row[name] == value for row in rows)}
    columns = [name for name in first if name not in common]
    return {
        "kind": "runs",
        "common": common,
        "columns": columns,
        "rows": [[row[name] for name in columns] for row in rows],
    }


def unpacked(record: Record) -> list[Row]:
    """The rows that `packed` was given."""
    return [{**record["common"], **dict(zip(record["columns"], row, strict=True))} for row in record["rows"]]


def known(rows: Iterable[Row], make: type[Any]) -> Known:
    """The accuracy of each run, by the identity of its point, which is a `make`; −∞ where it broke off."""
    return {identity(point_of(row, make)): -math.inf if row["accuracy"] is None else row["accuracy"] for row in rows}


def point_of(row: Row, make: type[Any]) -> Point:
    """The point of a row, with the defaults of `make` for fields that are newer than the row."""
    names = make.__dataclass_fields__
    made: Point = make(**{name: value for name, value in row.items() if name in names})
    return made


def claims(rows: Iterable[Row]) -> str:
    """What the ε of `rows` means, a sentence for each δ and adjacency: no ε is shown without; empty if there is none."""
    methods: dict[str, dict[str, None]] = {}
    for row in rows:
        claim = f"ε at δ = {row['delta']:g}; adjacency: {row['adjacency']}"
        methods.setdefault(claim, {})[f"sampling: {row['sampling']} ({row['method']})"] = None
    return " ".join(f"{claim}; {'; '.join(found)}." for claim, found in methods.items())


def write_table(rows: Sequence[Row], path: Path) -> None:
    """`rows` as CSV, one line for each training run, as `pandas.read_csv` reads it."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


@cache
def provenance() -> Record:
    """The commit of this tree (`+` behind it if files were changed since), and the versions that decide what a run gives."""
    versions: Mapping[str, str] = {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("numpy", "scipy", "torch", "opacus", "flwr")},
    }
    commit = _git("rev-parse", "--short=12", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")
    return {"kind": "made", "name": f"{commit} torch {versions['torch']}", "commit": commit, "versions": versions}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _git(*words: str) -> str:
    """What git says about this tree; empty where there is none."""
    done = subprocess.run(
        ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=30
    )
    return done.stdout.strip()
