"""Tests in a copy of the tree, in a fork of this process, which has imported what is slow to import but none of fedcgd."""

import collections
import contextlib
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coverage
import hypothesis
import pytest
from operators import ROOT

ROOTS = ("", "strategies", "simulations", "tests")
FAST = ["-q", "-m", "not slow and not flower", "-p", "no:cacheprovider", "--tb=no"]
FAST += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that are imported before the fork

Tests = dict[str, float]
"""The seconds that each test takes, by its node id."""


def import_what_is_slow() -> None:
    """Import the libraries that the tests import, so that forks need not. One thread each: forks share the machine's cores."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    for library in (
        "torch",
        "hypothesis",
        "flwr.serverapp",
        "flwr.clientapp",
        "flwr.server",
        "opacus",
        "scipy.stats",
        "click.testing",
    ):
        importlib.import_module(library)


class Baseline:
    """A pytest plugin that learns, on unmutated code, how long each test takes and which lines it executes."""

    def __init__(self, tree: Path, sources: list[str]) -> None:
        self.seconds: Tests = collections.defaultdict(float)
        self.failed: list[str] = []
        included = [str(tree / source) for source in sources]
        self._coverage = coverage.Coverage(data_file=None, config_file=False, include=included)
        self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def lines(self) -> dict[str, dict[int, list[str]]]:
        """The tests that execute each line of each file."""
        self._coverage.stop()
        data = self._coverage.get_data()
        return {file: data.contexts_by_lineno(file) for file in data.measured_files()}


class FirstFailure:
    """A pytest plugin that runs some tests first, and quick ones before slow ones, each within a time limit."""

    def __init__(self, seconds: Tests, first: set[str]) -> None:
        self.seconds, self.first, self.by = seconds, first, ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: (item.nodeid not in self.first, self.seconds.get(item.nodeid, 0)))
        limit = 20 + 5 * sum(
            self.seconds.get(item.nodeid, 0) for item in items
        )  # whichever is first sets up what they share
        for item in items:
            item.add_marker(pytest.mark.timeout(limit), append=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.by = self.by or report.nodeid


def enter(tree: Path, silent: tuple[int, ...]) -> None:
    """Make this process one that works in `tree` alone, with a bound on memory and nothing to read or to say."""
    os.setsid()
    os.chdir(tree)
    sink = os.open(os.devnull, os.O_RDWR)
    for stream in silent:
        os.dup2(sink, stream)
    places = [str(tree / root) for root in ROOTS]
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    original = {ROOT / root for root in ROOTS}  # an environment's packages may lie below ROOT too
    sys.path[:] = places + [entry for entry in sys.path if entry and Path(entry) not in original]
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))


def learn(tree: Path, tests: list[str], sources: list[str], answer: Path) -> None:
    """Write what `Baseline` learns from `tests` to `answer`."""
    enter(tree, silent=(0, 1))
    plugin = Baseline(tree, sources)
    status = pytest.main([*FAST, *tests], plugins=[plugin])
    lines = {str(Path(file).relative_to(tree)): found for file, found in plugin.lines().items()}
    inside = Path(sys.modules["fedcgd"].__file__ or "").is_relative_to(tree)
    found = {
        "status": int(status),
        "failed": plugin.failed,
        "inside": inside,
        "seconds": plugin.seconds,
        "lines": lines,
    }
    answer.write_text(json.dumps(found))


def attempt(tree: Path, first: list[str], others: list[str], seconds: Tests, answer: Path) -> None:
    """Run the files of these tests, the quickest file first and in it `first`, until one fails; write whether all passed."""
    enter(tree, silent=(0, 1, 2))
    # A failing case is enough: none is made smaller.
    hypothesis.settings.register_profile("mutants", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
    hypothesis.settings.load_profile("mutants")
    files: Tests = collections.defaultdict(float)
    for test in (*first, *others):
        files[test.split("::")[0]] += seconds[test]
    plugin = FirstFailure(seconds, set(first))
    status = 0
    for file in sorted(files, key=lambda file: files[file]):
        status = status or int(pytest.main([*FAST, "-x", file], plugins=[plugin]))
    answer.write_text(json.dumps({"passed": status == 0, "by": plugin.by}))


def copy_tree(to: Path) -> Path:
    """The files of the working tree that git does not ignore, and the C parts as they are built, in the folder `to`."""
    listing = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in [*names, *(str(path.relative_to(ROOT)) for path in (ROOT / "fedcgd").rglob("*.shared"))]:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def in_a_fork(work: Callable[..., None], *arguments: Any, answer: Path, limit: float) -> dict[str, Any] | None:
    """What `work` writes to `answer` in a fork; None if it does not within `limit` seconds. Nothing that it starts is left."""
    answer.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=work, args=(*arguments, answer))
    process.start()
    try:
        process.join(limit)
    finally:
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    return json.loads(answer.read_text()) if answer.exists() else None
