"""Numbers in the pages of results and of the papers' figures are those of the kept results."""

import importlib.util
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from fedcgd_experiments import real_tables
from fedcgd_experiments.comparison import epsilons, pick
from fedcgd_experiments.results import Results
from fedcgd_experiments.studies import STUDIES
from fedcgd_experiments.tables import CASES, NOT_RUN, Found, fill, headline_comparisons

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


def test_the_words_of_the_verdict_are_what_the_results_say() -> None:
    """If this fails the verdict at the top of docs/results.md wants other words."""
    found = [Found.read(RESULTS, name) for name in STUDIES if STUDIES[name].work == "epochs"]
    many, few, secret, _ = ([row for one in found for row in headline_comparisons(one, case)] for case in CASES)
    assert len(few) >= 8
    assert sum(row.corrected < 0.05 and row.pairs.difference > 0 for row in few) >= 0.75 * len(few)
    behind = [row for row in few if row.pairs.difference < 0]
    assert [(row.epsilon, row.ours.point.task, row.ours.point.model) for row in behind] == [
        (4.0, "fashion-mnist", "softmax"),
        (1.0, "digits", "tanh-cnn"),
    ]
    assert min(row.corrected for row in behind) >= 0.05
    assert behind[0].pairs.difference > -0.0055  # "within half a point"
    assert not [row for row in many if row.epsilon == 1 and row.pairs.difference > 0.005]
    assert not [row for row in many if row.epsilon > 1 and row.corrected < 0.05 and row.pairs.difference < 0]
    assert [row for row in secret if row.epsilon > 1 and row.corrected < 0.05 and row.pairs.difference > 0]
    assert not [row for row in secret if row.epsilon > 1 and row.corrected < 0.05 and row.pairs.difference < 0]
    assert not [row for row in secret if row.epsilon == 1 and row.pairs.difference > 0]
    people = Found.read(RESULTS, "people")
    gains = [row for case in CASES for row in headline_comparisons(people, case)]
    assert [row.secret for row in gains] == ["nothing"] * 3 + ["sampling"] * 3
    assert all(row.corrected < 0.05 and row.pairs.difference > 0 for row in gains)
    assert max(row.pairs.difference for row in gains if row.secret == "sampling") < 0.0105
    for one in found:
        for epsilon in epsilons(one.study):
            arms = [arm for arm in ("λ-CGD, default λ", "λ-CGD, default λ, constant rate") if arm in one.study.arms]
            free, constant = (
                (pick(one.study, one.tuned, epsilon, [arm]) for arm in arms) if len(arms) == 2 else (None, None)
            )
            if free and constant:
                assert fmean(free.accuracies.values()) > fmean(constant.accuracies.values()) - 0.003


def test_every_file_of_results_is_used_and_every_picture_is_there() -> None:
    """Studies by the tables, and others by a page, a benchmark or a test that names them."""
    pages = "".join(path.read_text() for folder in ("docs", "benchmarks") for path in (ROOT / folder).rglob("*.*")
                    if path.suffix in (".md", ".py", ".sh", ".txt"))  # fmt: skip
    tests = (
        "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
        + (ROOT / "simulations" / "fedcgd_experiments" / "studies.py").read_text()
    )
    kept = [path for path in RESULTS.rglob("*") if path.is_file()]
    unused = [
        path.name for path in kept if path.name not in pages and path.stem not in tests and path.stem not in pages
    ]
    assert unused == []
    shown = set(re.findall(r"\]\(\.\./benchmarks/results/plots/([^)]+)\)", pages))
    assert {"gains.png", "frontier.png"} <= shown
    assert shown <= {path.name for path in kept}


def test_the_numbers_of_the_bands_are_the_kept_ones() -> None:
    kept = json.loads((RESULTS / "paper_figures.json").read_text())
    page = (ROOT / "benchmarks" / "reports" / "paper_figures.md").read_text()
    one, eight = (kept["bands"]["curves"][epsilon] for epsilon in ("1", "8"))

    def over_full(k: int, bands: int) -> float:
        row: float = one["epochs"][str(k)]["rmse"][str(bands)]
        return row / float(one["full_batch"])

    best = one["epochs"]["2"]["best"]
    assert f"| {over_full(2, best):.2f} times |" in page
    assert f"{over_full(32, 1):.2f} times; below 32 it degrades: {over_full(8, 1):.2f} times with 8 epochs" in page
    listed = [str(one["epochs"][k]["best"]) for k in ("1", "2", "8", "32", "128", "512")]
    assert f"{', '.join(listed[:-1])} and {listed[-1]} bands for 1, 2, 8, 32, 128 and 512 epochs" in page
    gains = [eight["epochs"][k]["uncorrelated"] for k in ("2", "1")]
    assert f"{gains[0]:.1f} times at ε = 8 with two epochs and {gains[1]:.1f} with one" in page
    assert kept["example-b1"]["largest_difference"] < 0.0005 < 0.001


def test_the_numbers_of_epochs_are_the_kept_ones() -> None:
    kept = json.loads((RESULTS / "paper_figures.json").read_text())["epochs"]
    page = (ROOT / "benchmarks" / "reports" / "paper_figures.md").read_text()
    for k, row in kept["accuracy"].items():
        cells = [f"{100 * mean:.1f} ± {100 * spread:.1f}" for mean, spread, _ in row.values()]
        assert f"| {k} | {' | '.join(cells)} | λ = {kept['rmse_optimal'][k]:.2f} |" in page
    assert {rate for row in kept["accuracy"].values() for *_, rate in row.values()} <= {0.0625, 0.125, 0.25, 0.5}
    assert (kept["best"]["10"], kept["best"]["80"]) == ("0.9", "0.95")


def test_the_numbers_of_learning_are_the_kept_ones() -> None:
    kept = json.loads((RESULTS / "paper_figures.json").read_text())
    page = (ROOT / "benchmarks" / "reports" / "paper_figures.md").read_text()
    for optimizer, name in (("SGD", "learning-sgd"), ("Adam", "learning-adam")):
        at = kept[name]["rmse"].index(30.0)
        cells = [f"{points[at][0]:.2f}" for points in kept[name]["cross_entropy"].values()]
        assert f"| {optimizer} | {' | '.join(cells)} |" in page


def test_the_numbers_of_the_buffers_are_the_kept_ones() -> None:
    kept = json.loads((RESULTS / "paper_figures.json").read_text())["rational"]
    page = (ROOT / "benchmarks" / "reports" / "paper_figures.md").read_text()
    row = re.search(r"\| BLT with d buffers, distance \|(.*)\|", page)
    assert row is not None
    printed = [float(cell) for cell in row[1].split("|")]
    assert printed == [float(f"{value:.2g}") for value in kept["blt"]["approximation"]]


def test_the_times_of_a_step_are_those_of_the_kept_turns() -> None:
    page = (ROOT / "benchmarks" / "reports" / "performance.md").read_text()
    records = [json.loads(line) for line in (RESULTS / "runtime.jsonl").read_text().splitlines()]
    assert len(records) == 4
    for record in records:
        opacus, *others = record["rows"]
        cells = [f"{row['ratio']:.2f} ({row['quartiles'][0]:.2f}–{row['quartiles'][1]:.2f})" for row in others]
        name = f"{record['model']}, {record['mode']}, batch {record['batch']}"
        assert f"| {name} | {opacus['milliseconds']:.0f} ms | {' | '.join(cells)} |" in page


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
    for label in ("λ-CGD, without amplification", "DP-SGD, Poisson", "DP-SGD, full batch"):
        one, _, three, _, eight = means[pictures, label]
        assert f"{one} / {three} / {eight} %" in readme
        for name in (pictures, reviews):
            assert f" | {' | '.join(means[name, label])} |\n" in board
    assert f" | {' | '.join(means[reviews, 'plan, without amplification'])} |\n" in board
    gaps = {
        name: [
            fmean(by["λ-CGD, without amplification"][e]) - fmean(by["DP-SGD, Poisson"][e])
            for e in by["DP-SGD, Poisson"]
        ]
        for name, by in found.items()
    }
    every = sorted(gap for several in gaps.values() for gap in several)
    assert (round(every[0], 1), round(every[-1], 1)) == (-0.7, 0.4)  # as the board's words say
    assert sum(gap >= -0.45 for gap in every) == 39
    whole = {
        epsilon: sorted(
            fmean(by["λ-CGD, without amplification"][epsilon]) - fmean(by["DP-SGD, full batch"][epsilon])
            for by in found.values()
        )
        for epsilon in (1.0, 8.0)
    }
    assert max(map(abs, whole[1.0])) <= 0.55
    assert [whole[8.0][0], whole[8.0][-1]] == pytest.approx([1.15, 2.85], abs=0.05)
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
