"""Numbers in the pages of results and of the papers' figures are those of the kept results."""

import importlib.util
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from fedcgd_experiments import real_tables
from fedcgd_experiments.results import Results
from fedcgd_experiments.tables import NOT_RUN, Found, fill

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    "docs/results",
    "benchmarks/reports/results_data",
    "benchmarks/reports/results_federated",
    "benchmarks/reports/results_real_data",
)


@pytest.fixture(scope="module", autouse=True)
def _each_study_is_read_once() -> Iterator[None]:
    """Its points are parsed by the hundred thousand, and many tables are of one study."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Found, "read", staticmethod(cache(Found.read)))
        yield


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_the_pages_are_those_of_the_results(name: str) -> None:
    page = (ROOT / f"{name}.md").read_text()
    assert "<!-- table: " in page
    assert NOT_RUN not in page
    assert fill(page, RESULTS) == page


def test_the_tables_of_samplings_are_the_kept_ones() -> None:
    """What `python benchmarks/b_min_sep.py --tables` prints stands in the page."""
    spec = importlib.util.spec_from_file_location("b_min_sep", ROOT / "benchmarks" / "b_min_sep.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    page = (ROOT / "benchmarks" / "reports" / "accounting.md").read_text()
    rows = benchmark.kept()
    tables = {size.table: benchmark.samplings(rows, size) for size in benchmark.SIZES}
    assert len(tables) == 3
    for name, table in (tables | {"separations": benchmark.separations(rows)}).items():
        assert f"<!-- {name} -->\n\n{table}\n\n<!-- end -->" in page


def test_the_numbers_of_cifar_are_those_of_its_trainings() -> None:
    """On the first page, in the words of the results, and on the leader board."""
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs" / "results.md").read_text()
    board = (ROOT / "benchmarks" / "reports" / "results_real_data.md").read_text()
    rows = real_tables.rows_of(RESULTS)
    found = real_tables.cells(rows)
    means = {
        (name, label): [f"{fmean(values):.1f}" for values in by.values()]
        for name, by_label in found.items()
        for label, by in by_label.items()
    }
    pictures, reviews = "cifar10-45000-15552", "imdb-22500-4096"
    for label, words in {
        "λ-CGD, without amplification": "λ-CGD, without amplification",
        "DP-SGD, Poisson": "DP-SGD, secret Poisson sampling",
        "DP-SGD, full batch": "DP-SGD on the full batch, without amplification",
    }.items():
        one, _, three, _, eight = means[pictures, label]
        assert f"| {words} | {one} | {three} | {eight} |" in readme
        for name in (pictures, reviews):
            assert f" | {' | '.join(means[name, label])} |\n" in board
    public = [(name, real_tables.PUBLIC) for name in found if name.startswith("cifar10-public")]
    for place in (*public, (pictures, real_tables.PUBLIC), (reviews, real_tables.PLAN)):
        assert f" | {' | '.join(means[place])} |\n" in board
    tests: dict[tuple[str, float], list[float]] = {}
    for row in Results(RESULTS / "cifar10-scattering-4.jsonl").rows():
        if row["split"] == "test" and row["seed"] in (1000, 1001):
            tests.setdefault((row["sampling"], row["epsilon"]), []).append(100 * row["accuracy"])
    for sampling in ("none", "poisson"):
        one, three, eight = (f"{fmean(tests[sampling, epsilon]):.1f}" for epsilon in (1.0, 3.0, 8.0))
        assert f"{one}, {three} and {eight} %" in page


def test_the_first_page_says_what_the_picture_of_digits_does() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = {row["epsilon"]: row for row in json.loads((RESULTS / "planner-digits.json").read_text())}
    mean = {
        (label, epsilon): 100 * fmean(row[label])
        for epsilon, row in rows.items()
        for label in ("plan, nothing secret", "dp-sgd, nothing secret", "dp-sgd, full batch", "dp-sgd, poisson")
    }
    gains = [mean["plan, nothing secret", e] - mean["dp-sgd, nothing secret", e] for e in (1.0, 4.0)]
    assert f"**+{gains[0]:.0f}** at ε = 1, **+{gains[1]:.0f}** at ε = 4" in readme
    assert [round(mean["dp-sgd, full batch", e]) for e in (1.0, 4.0)] == [84, 92]
    assert "(84 and 92 %)" in readme
    assert [round(mean["dp-sgd, poisson", e]) for e in (1.0, 4.0)] == [84, 92]
    guide = (ROOT / "benchmarks" / "reports" / "planner.md").read_text()
    for epsilon in rows:
        cells = (mean[label, epsilon] for label in
                 ("dp-sgd, nothing secret", "dp-sgd, full batch", "plan, nothing secret", "dp-sgd, poisson"))  # fmt: skip
        assert f"| {epsilon:g} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |" in guide
