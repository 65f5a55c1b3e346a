"""Settings that every test needs."""

import os
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
from fedcgd.accounting.random_participation import monte_carlo

answers.LONG = float("inf")  # every answer is found by the code that is tested

# Flower's Message asks which task it is made by; outside a run there is none.
TaskIdentity.task_id = 1
TaskIdentity.run_id = 1
TaskIdentity.node_id = 1

LONG = {
    "a program or page that is not installed": (
        "experiments",
        "simulations",
        "project/test_containers.py",
        "project/test_documentation_site.py",
        "project/test_example_flower.py",
        "project/test_example_language.py",
        "project/test_examples.py",
        "opacus/test_trainers.py",
    ),
    "processes of their own: what they do is tested in this one": ("central/test_pure_step_ranks.py",),
    "errors and losses of mechanisms, however they were found; σ is that of whatever was found": (
        "curvature/test_curvature_measure.py",
        "optimisation/test_optimisation_peers.py",
    ),
    "many Monte Carlo samples, as fewer of the same search take in other tests of the file": (
        "accounting/test_answers.py::test_every_other_question_is_another_file_and_each_is_answered_as_before",
        "accounting/test_balls_in_bins.py::test_quick_guarantee_is_an_upper_bound_too",
        "accounting/test_compose.py::test_a_balls_in_bins_run_beside_a_gaussian_one_by_quadrature",
        "accounting/test_selection_of_numbers.py::test_a_plan_is_accounted_for_with_the_damped_mechanism",
    ),
}
"""Folders, files and tests that `make test` leaves out, and why the others notice what these do. So it does with the tests that
start Ray, a SuperLink or processes to kill, and with those that a file marks `long`."""
_LONG = frozenset(place for places in LONG.values() for place in places)


def pytest_itemcollected(item: pytest.Item) -> None:
    path = item.path.relative_to(Path(__file__).parent)
    named = f"{path.as_posix()}::{getattr(item, 'originalname', item.name)}"
    if (
        not _LONG.isdisjoint((named, *(each.as_posix() for each in (path, *path.parents))))
        or path.stem.endswith("_kills")
        or item.get_closest_marker("flower")
    ):
        item.add_marker("long")


@pytest.hookimpl(trylast=True)  # after -m and -k, whose first case it takes
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--smoke"):
        first = {(item.path, getattr(item, "originalname", item.name)): item.nodeid for item in reversed(items)}
        kept = set(first.values())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--smoke", action="store_true", help="of each test its first case alone")
    parser.addoption(
        "--foreign-warnings", action="store_true", help="let other packages warn: for versions beside the lock"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--foreign-warnings"):
        config.addinivalue_line("filterwarnings", "default")
        config.addinivalue_line("filterwarnings", "error:::fedcgd")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that an earlier run has optimised is found."""
    monkeypatch.setenv("FEDCGD_CACHE", str(tmp_path))


@contextmanager
def _few_draws() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        fewest, _ = monte_carlo._DRAWS.removing
        patched.setattr(monte_carlo, "_DRAWS", replace(monte_carlo._DRAWS, removing=(fewest, fewest)))
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
