"""Settings that every test needs."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

# One thread a process: the machine's cores are shared, and thread contention makes times jump.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
# The terminal of whoever runs the tests has no say in how tables break; workers of pytest-xdist are told it.
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)

import pytest
from flwr.supercore.task_identity import TaskIdentity

from fedcgd.accounting import answers
from fedcgd.accounting.random_participation import search

answers.LONG = float("inf")  # every answer is found by the code that is tested

# Flower's Message asks which task it is made by; outside a run there is none.
TaskIdentity.task_id = 1
TaskIdentity.run_id = 1
TaskIdentity.node_id = 1

LONG = {
    "curvature/test_curvature_measure.py": "measures losses",
    "experiments": "studies: they are not installed",
    "optimisation/test_optimisation_peers.py": "errors of other libraries' mechanisms; σ is that of whatever was found",
    "project/test_documentation_site.py": "pages and pictures",
    "project/test_example_flower.py": "programs to copy, trained until they learn",
    "project/test_example_language.py": "programs to copy, trained until they learn",
    "project/test_examples.py": "programs to copy, trained until they learn",
    "simulations": "a program that is not installed",
}
"""Files and folders that `make test` leaves out, and why no ε of a run depends on them. So it does with the tests that start Ray,
a SuperLink or processes to kill."""


def pytest_itemcollected(item: pytest.Item) -> None:
    path = item.path.relative_to(Path(__file__).parent)
    if (
        not LONG.keys().isdisjoint(map(str, (path, *path.parents)))
        or path.stem.endswith("_kills")
        or item.get_closest_marker("flower")
    ):
        item.add_marker("long")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--foreign-warnings", action="store_true", help="let other packages warn: for versions beside the lock"
    )


def pytest_configure(config: pytest.Config) -> None:
    assert all((Path(__file__).parent / place).exists() for place in LONG), "a place of LONG is gone"
    if config.getoption("--foreign-warnings"):
        config.addinivalue_line("filterwarnings", "default")
        config.addinivalue_line("filterwarnings", "error:::fedcgd")


@pytest.fixture(autouse=True)
def _no_runs_of_other_tests() -> None:
    """No test is told of the runs of another one over the same examples."""
    if (runs := sys.modules.get("fedcgd.opacus.earlier_runs")) is not None:
        runs._released.clear()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that an earlier run has optimised is found."""
    monkeypatch.setenv("FEDCGD_CACHE", str(tmp_path))


@contextmanager
def _few_draws() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        fewest, _ = search._DRAWS.removing
        patched.setattr(search, "_DRAWS", replace(search._DRAWS, removing=(fewest, fewest)))
        yield


@pytest.fixture
def few_draws() -> Iterator[None]:
    """Answers under secret rounds are upper bounds as ever, and looser: for tests of what is asked, not of how near."""
    with _few_draws():
        yield


@pytest.fixture(scope="module")
def few_draws_everywhere() -> Iterator[None]:
    """The same for all tests of a file and what they share."""
    with _few_draws():
        yield


@pytest.fixture
def threads_as_they_were() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
