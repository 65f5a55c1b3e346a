"""Numbers in the pages about people and about the papers' figures are those of the kept results."""

import json
import re
from pathlib import Path

from fedcgd_experiments.people_report import report

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def test_the_tables_are_what_the_report_prints() -> None:
    records = [json.loads(line) for line in (RESULTS / "people.jsonl").read_text().splitlines()]
    page = (ROOT / "docs" / "results_federated.md").read_text()
    assert report(records) in page


def test_the_numbers_of_the_bands_are_the_kept_ones() -> None:
    kept = json.loads((RESULTS / "paper_figures.json").read_text())
    page = (ROOT / "docs" / "paper_figures.md").read_text()
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
    page = (ROOT / "docs" / "paper_figures.md").read_text()
    for k, row in kept["accuracy"].items():
        cells = [f"{100 * mean:.1f} ± {100 * spread:.1f}" for mean, spread, _ in row.values()]
        assert f"| {k} | {' | '.join(cells)} | λ = {kept['rmse_optimal'][k]:.2f} |" in page
    assert {rate for row in kept["accuracy"].values() for *_, rate in row.values()} <= {0.0625, 0.125, 0.25, 0.5}
    assert (kept["best"]["10"], kept["best"]["80"]) == ("0.9", "0.95")


def test_the_numbers_of_learning_are_the_kept_ones() -> None:
    kept = json.loads((RESULTS / "paper_figures.json").read_text())
    page = (ROOT / "docs" / "paper_figures.md").read_text()
    for optimizer, name in (("SGD", "learning-sgd"), ("Adam", "learning-adam")):
        at = kept[name]["rmse"].index(30.0)
        cells = [f"{points[at][0]:.2f}" for points in kept[name]["cross_entropy"].values()]
        assert f"| {optimizer} | {' | '.join(cells)} |" in page


def test_the_numbers_of_the_buffers_are_the_kept_ones() -> None:
    kept = json.loads((RESULTS / "paper_figures.json").read_text())["rational"]
    page = (ROOT / "docs" / "paper_figures.md").read_text()
    row = re.search(r"\| BLT with d buffers, distance \|(.*)\|", page)
    assert row is not None
    printed = [float(cell) for cell in row[1].split("|")]
    assert printed == [float(f"{value:.2g}") for value in kept["blt"]["approximation"]]
