"""Mutation testing: change one thing in a file that ε depends on, and see whether a test fails.

    python tools/mutants/run.py --minutes 60

Cosmic Ray's operators make the mutants. Its runner is not used, because it changes files in place, knows one test command for
all of them and does not sample. Here each mutant lives in a copy of the tree, in a fork of a process that has done the slow
imports; the tests of its row in targets.toml run until one fails, those that execute the mutated lines first. Results are
appended to a file of JSON lines; a mutant that is in it is not run again as long as the lines around it are the same.
The sample is a function of the seed and the sources, and every file has its turn, so that any time limit leaves an even sample.
Ends with 1 if a planted bug is not found, or if a mutant survives that judged.toml does not explain.
"""

import argparse
import collections
import hashlib
import json
import multiprocessing
import signal
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterable
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from forks import attempt, copy_tree, import_what_is_slow, in_a_fork, learn
from operators import ROOT, Mutant, mutants, named

HERE = Path(__file__).resolve().parent
RESULTS = ROOT / "benchmarks" / "results" / "mutants.jsonl"


def targets(only: list[str]) -> dict[str, list[str]]:
    """Each file of targets.toml whose path holds one of `only`, and its test files. Raises ValueError for patterns of nothing."""
    table = tomllib.loads((HERE / "targets.toml").read_text(encoding="utf-8"))
    rows: dict[str, list[str]] = {}
    for pattern, tests in table["targets"].items():
        rows |= dict.fromkeys(files_of(pattern), sorted({path for test in tests for path in files_of(f"tests/{test}")}))
    excluded = {path for pattern in table["excluded"] for path in files_of(pattern)}
    named = {
        *table["targets"],
        *table["excluded"],
        *(f"tests/{test}" for row in table["targets"].values() for test in row),
    }
    if gone := sorted(pattern for pattern in named if not files_of(pattern)):
        raise ValueError(f"targets.toml names what is gone: {', '.join(gone)}")
    return {
        path: tests
        for path, tests in rows.items()
        if path not in excluded and (not only or any(part in path for part in only))
    }


def files_of(pattern: str) -> list[str]:
    """The files of a row or an exclusion, by their paths from the root."""
    return [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(pattern)) if path.name != "__init__.py"]


def sample(path: str, seed: int) -> list[Mutant]:
    """The mutants of a file, in an order that seed and source decide: each place once before any place twice."""

    def drawn(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.name}".encode()).hexdigest()

    places = collections.defaultdict(list)
    for mutant in sorted(mutants(path), key=drawn):
        places[mutant.place].append(mutant)
    ranked = [(rank, drawn(mutant), mutant) for place in places.values() for rank, mutant in enumerate(place)]
    return [mutant for _, _, mutant in sorted(ranked, key=lambda entry: entry[:2])]


def planted(rows: dict[str, list[str]]) -> list[Mutant]:
    """The bugs of planted.toml. Raises ValueError for one whose text the code does not hold exactly once."""
    bugs = []
    for bug in tomllib.loads((HERE / "planted.toml").read_text())["bug"]:
        path, before = bug["file"], bug["before"]
        source = (ROOT / path).read_text()
        if source.count(before) != 1:
            raise ValueError(f"planted.toml: {path} holds {source.count(before)} times {before!r}")
        text = source.replace(before, bug["after"])
        first = source[: source.index(before)].count("\n") + 1
        lines = first, first + before.count("\n")
        name = named(path, before, bug["after"])
        bugs.append(Mutant(path, source, f"planted: {bug['name']}", (first, 0), lines, name, partial(str, text)))
    return [bug for bug in bugs if bug.path in rows]


def learned(rows: dict[str, list[str]], folder: Path) -> dict[str, Any]:
    """What the tests do on unmutated code: seconds and covered lines. Ends the program if they fail, in this order or another."""
    tests = sorted({test for row in rows.values() for test in row})
    print(f"{len(rows)} files; running {len(tests)} test files on unmutated code, twice", flush=True)
    tree, answer = copy_tree(folder / "baseline"), folder / "baseline.json"
    found = in_a_fork(learn, tree, tests, list(rows), answer=answer, limit=3600)
    if found is None or found["status"] != 0 or not found["inside"]:
        sys.exit(f"mutants mean nothing: unmutated code fails, or is not the copy's: {found and found['failed']}")
    control = in_a_fork(attempt, tree, list(found["seconds"]), [], found["seconds"], answer=answer, limit=3600)
    if control is None or not control["passed"]:
        sys.exit(f"mutants mean nothing: unmutated code fails in another order of the tests: {control}")
    return found


def concerned(mutant: Mutant, files: list[str], known: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The tests of `files` that execute the mutated statement, and the others of their files, with which they may share set-up.

    All tests where none is known to: a module's own statements are executed when it is imported. Tests that start processes, in
    which nobody watches the lines, are always among them.
    """
    covered = known["lines"].get(mutant.path, {})
    first, last = mutant.lines
    found = {test for line in range(first, last + 1) for test in covered.get(str(line), ())}
    mine = {test for test in known["seconds"] if test.split("::")[0] in files}
    covering = mine if "" in found or not found & mine else found & mine
    chosen = {test.split("::")[0] for test in covering}
    chosen |= {f"tests/{name}" for name in tomllib.loads((HERE / "targets.toml").read_text())["processes"]}
    others = {test for test in mine - covering if test.split("::")[0] in chosen}
    return sorted(covering), sorted(others)


def work(
    queue: Any, chosen: list[Mutant], rows: dict[str, list[str]], known: dict[str, Any], folder: Path, deadline: float
) -> None:
    """Try the mutants whose numbers come from `queue` in the tree `folder`, and append what became of each."""
    copy_tree(folder)
    while (number := queue.get()) is not None and time.time() < deadline:
        mutant = chosen[number]
        tests = concerned(mutant, rows[mutant.path], known)
        limit = 60 + 5 * sum(known["seconds"][test] for test in (*tests[0], *tests[1]))
        before = (folder / mutant.path).read_text()
        (folder / mutant.path).write_text(mutant.text)
        start = time.monotonic()
        answer = folder.with_suffix(".json")
        found = in_a_fork(attempt, folder, *tests, known["seconds"], answer=answer, limit=limit)
        (folder / mutant.path).write_text(before)
        outcome = "timeout" if found is None else "survived" if found["passed"] else "killed"
        record = {"mutant": mutant.name, "file": mutant.path, "operator": mutant.operator, "outcome": outcome}
        record |= {"by": (found or {}).get("by", ""), "seconds": round(time.monotonic() - start, 1)}
        record |= {"diff": mutant.diff} if outcome == "survived" else {}
        with RESULTS.open("a") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        place = f"{mutant.path}:{mutant.lines[0]} {mutant.operator}"
        print(f"{number + 1}/{len(chosen)} {outcome:8} {record['seconds']:5.1f} s  {place}", flush=True)


def changed(text: str) -> str:
    """The changed lines of a diff, without the spaces around them."""
    return "\n".join(line[0] + line[1:].strip() for line in text.splitlines() if line[:1] in "+-")


def report(rows: Iterable[str], results: list[dict[str, Any]]) -> list[str]:
    """Print the score by file; the diffs of survivors that nobody has judged."""
    entries = tomllib.loads((HERE / "judged.toml").read_text())["mutant"]
    judged = {(entry["file"], changed(entry["diff"])) for entry in entries}
    columns = ["file", "tried", "killed", "of these by time", "survived, judged harmless", "survived, not judged"]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    unexplained = []
    for path in [*rows, "all"]:
        mine = [record for record in results if path in (record["file"], "all")]
        survivors = [record for record in mine if record["outcome"] == "survived"]
        open_ones = [record for record in survivors if (record["file"], changed(record["diff"])) not in judged]
        slow = sum(record["outcome"] == "timeout" for record in mine)
        numbers = len(mine), len(mine) - len(survivors), slow, len(survivors) - len(open_ones), len(open_ones)
        print(f"| {' | '.join(map(str, (path, *numbers)))} |")
        if path != "all":
            unexplained += [f"{path} {record['mutant']} {record['operator']}\n{record['diff']}" for record in open_ones]
    return unexplained


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="parts of paths of targets.toml (default: all)")
    parser.add_argument("--per-file", type=int, default=40, help="mutants of each file at most (default 40)")
    parser.add_argument("--minutes", type=float, default=60, help="start no mutant after so long (default 60)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default 0)")
    parser.add_argument("--survivors", action="store_true", help="run those again that survived, and no new ones")
    parser.add_argument("--report", action="store_true", help="run nothing: print the score and what survived")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was forked ends too
    warnings.simplefilter("ignore")  # of mutants that compile with a warning
    deadline = time.time() + 60 * options.minutes
    rows = targets(options.files)
    samples = {path: sample(path, options.seed) for path in rows}
    RESULTS.touch()
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    results = {record["mutant"]: record for record in lines}
    bugs = planted(rows)
    chosen: list[Mutant] = []
    if not options.report:  # what a mutant's text is takes a quarter of a second to find out
        firsts = [islice((mutant for mutant in row if mutant.text), options.per_file) for row in samples.values()]
        drawn = bugs + [mutant for turn in zip_longest(*firsts) for mutant in turn if mutant]
        wanted = "survived" if options.survivors else None
        chosen = [mutant for mutant in drawn if results.get(mutant.name, {}).get("outcome") == wanted]
    if chosen:
        import_what_is_slow()
        with tempfile.TemporaryDirectory(prefix="mutants-") as place:
            known = learned(rows, Path(place))
            queue = multiprocessing.get_context("fork").Queue()
            for item in [*range(len(chosen)), *[None] * options.jobs]:
                queue.put(item)
            fork = multiprocessing.get_context("fork").Process
            workers = [
                fork(target=work, args=(queue, chosen, rows, known, Path(place) / f"tree{job}", deadline))
                for job in range(options.jobs)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        results = {record["mutant"]: record for record in map(json.loads, RESULTS.read_text().splitlines())}
    current = {mutant.name for mutant in bugs} | {mutant.name for row in samples.values() for mutant in row}
    # What no longer is in the code goes; the rest stays, for runs of other files too.
    kept = {name: record for name, record in results.items() if name in current or record["file"] not in rows}
    if not options.report:
        order = sorted(kept.values(), key=lambda record: (record["file"], record["mutant"]))
        RESULTS.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in order))
    unexplained = report(rows, [record for record in kept.values() if record["file"] in rows])
    print("\n\n".join(["", *unexplained, f"{len(unexplained)} survivors to judge"]))
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
