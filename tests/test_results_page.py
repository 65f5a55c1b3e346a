"""Tables are made from results, and those of the page of results are."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fedcgd_experiments.experiment import Point, Setup, shared_identity
from fedcgd_experiments.tables import fill

ROOT = Path(__file__).resolve().parents[1]
BUDGET = Setup(mechanism="dp-sgd", epsilon=2.0, delta=1e-5, steps=9, epochs=10)


def line(mechanism, seed, accuracy, split, **changes):
    setup = replace(BUDGET, mechanism=mechanism, **changes)
    point = Point(setup=setup, task="digits", clip_norm=1.0, learning_rate=1.0, seed=seed, split=split)
    record = {"kind": "runs", "point": json.loads(shared_identity(point)), "learning_rates": [1.0]}
    return json.dumps(record | {"accuracies": [accuracy], "seconds": 3.0}) + "\n"


def results(folder, seeds=10, **changes):
    lines = [line(m, 0, value, "validation", **changes) for m, value in
             (("dp-sgd", 0.5), ("lambda-cgd:0.5", 0.7), ("lambda-cgd:0.8", 0.6), ("blt:2", 0.6))]  # fmt: skip
    for seed in range(seeds):
        wiggle = 0.01 * (-1) ** seed
        for mechanism, accuracy in (("dp-sgd", 0.5), ("lambda-cgd:0.5", 0.7 + wiggle), ("blt:2", 0.6 - wiggle)):
            lines.append(line(mechanism, 1000 + seed, accuracy, "test", **changes))
    with (folder / "digits.jsonl").open("a") as file:
        file.writelines(lines)


def table(folder, name):
    made = fill(f"before\n<!-- table: {name} -->\nold\n<!-- end -->\nafter\n", folder)
    assert made.startswith(f"before\n<!-- table: {name} -->\n")
    assert made.endswith("<!-- end -->\nafter\n")
    assert "old" not in made
    assert fill(made, folder) == made
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in made.splitlines() if row.startswith("|")]


def test_accuracies_with_spread_difference_and_number(tmp_path):
    results(tmp_path)
    head, _, plain, cgd, blt = table(tmp_path, "accuracy/digits")
    assert head == ["mechanism", "ε = 2"]
    assert plain == ["dp-sgd", "50.0 ± 0.0"]
    # ± is the sample standard deviation of 70 ± 1, five times each: √(10/9) = 1.05
    assert cgd == ["lambda-cgd", "70.0 ± 1.1, +20.0 (p < .001), λ 0.5"]
    assert blt[1] == "60.0 ± 1.1, +10.0 (p < .001), d 2†"  # the largest of those tried


def test_what_is_not_complete_is_left_out(tmp_path):
    results(tmp_path, seeds=9)
    assert table(tmp_path, "accuracy/digits") == []
    assert "Not run yet" in fill("<!-- table: accuracy/digits --><!-- end -->".replace("-->", "-->\n", 1), tmp_path)


def test_poisson_dp_sgd_is_what_amplified_mechanisms_are_compared_with(tmp_path):
    results(tmp_path, sampling="balls-in-bins")
    lines = [line("dp-sgd", 0, 0.5, "validation", sampling="poisson")]
    lines += [line("dp-sgd", 1000 + seed, 0.65, "test", sampling="poisson") for seed in range(10)]
    lines.append(line("band-mf:2", 0, 0.5, "validation", sampling="cyclic-poisson"))
    lines += [line("band-mf:2", 1000 + s, 0.66 + s / 500, "test", sampling="cyclic-poisson") for s in range(10)]
    with (tmp_path / "digits.jsonl").open("a") as file:
        file.writelines(lines)
    rows = {row[0]: row[1] for row in table(tmp_path, "amplified/digits")[2:]}
    assert rows["dp-sgd, poisson"] == "65.0 ± 0.0"
    assert rows["lambda-cgd, balls-in-bins"].startswith("70.0 ± 1.1, +5.0 (p < .001)")
    assert rows["band-mf, cyclic-poisson"] == "66.9 ± 0.6, +1.9 (p < .001), p 2†"  # 66 … 67.8 less 65
    rows = {row[0]: row[1] for row in table(tmp_path, "same-sampling/digits")[2:]}
    assert rows["lambda-cgd"] == "+20.00 (p < .001)"


def test_two_rules_beside_each_other(tmp_path):
    results(tmp_path)
    lines = [
        json.dumps({"kind": "rule", "rule": rule, "setup": asdict(BUDGET), "lam": lam}) + "\n"
        for rule, lam in (("practical", 0.2), ("third of the excess", 0.4), ("rmse", 0.9))
    ]
    for lam, accuracy in ((0.2, 0.6), (0.4, 0.61), (0.9, 0.5)):
        lines.append(line(f"lambda-cgd:{lam}", 0, accuracy, "validation"))
        lines += [line(f"lambda-cgd:{lam}", 1000 + s, accuracy + lam * s / 1000, "test") for s in range(10)]
    (tmp_path / "digits-rules.jsonl").write_text("".join(lines))
    head, _, row = table(tmp_path, "between-rules/digits+tweets")
    assert head == ["data", "sampling", "ε = 2"]
    # a point, and the mean of 0 … 0.18 points by which the seeds differ
    assert row == ["digits", "none", "0.2 → 0.4: +1.09 (p < .001)"]


def test_effort_is_processor_time(tmp_path):
    results(tmp_path)
    (row,) = table(tmp_path, "effort/digits")[2:]
    assert row == ["`digits.jsonl`", "4", "0 … 0", "30", "1000 … 1009", "1 … 1", f"{34 * 3 / 60:.1f}"]
    twin = json.loads(line("dp-sgd", 1000, 0.5, "test"))
    twin = {"kind": "federated", "point": twin["point"] | {"learning_rate": 1.0}, "accuracy": 0.5, "seconds": 90.0}
    (tmp_path / "digits-federated.jsonl").write_text(json.dumps(twin) + "\n")
    assert table(tmp_path, "effort/digits-federated")[2] == [
        "`digits-federated.jsonl`",
        "0",
        "",
        "1",
        "1000 … 1000",
        "",
        "1.5",
    ]
    (tmp_path / "tweets.jsonl").write_text((tmp_path / "digits.jsonl").read_text())
    total = table(tmp_path, "effort/digits+tweets")[-1]
    assert total == ["all", "8", "", "60", "", "", f"{2 * 34 * 3 / 60:.1f}"]


def test_an_unknown_table_is_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown table accuracies/digits; the tables are accuracy"):
        table(tmp_path, "accuracies/digits")


def test_the_tables_of_the_page_are_those_of_the_results():
    page = (ROOT / "docs" / "results.md").read_text()
    assert "<!-- table: accuracy/digits -->" in page
    assert fill(page, ROOT / "benchmarks" / "results") == page
