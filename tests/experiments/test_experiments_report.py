"""What a study found: compared with the better baseline, in tables and pictures that are made from the results alone."""

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedcgd_experiments import plots
from fedcgd_experiments.__main__ import app
from fedcgd_experiments.comparison import compare, pick, tuned
from fedcgd_experiments.flower_command import flower_command
from fedcgd_experiments.point import CentralPoint
from fedcgd_experiments.results import Results, Row, claims, known
from fedcgd_experiments.significance import holm, paired
from fedcgd_experiments.studies import STUDIES, central_point
from fedcgd_experiments.study import Log, Study, missing
from fedcgd_experiments.tables import CASES, Found, fill

GAINS = {"DP-SGD": 0.0, "DP-SGD, full batch": 0.02, "λ-CGD, default λ": 0.05, "DP-SGD, Poisson": 0.06}
"""What each arm adds to an accuracy of one half."""


def make(values) -> CentralPoint:
    return central_point(
        {"momentum": 0.0, "clip_norm": 1.0, "schedule": "constant", **values}, examples=1260, task="digits"
    )


STUDY = Study(
    name="digits",
    title="Toy",
    make=make,
    settings=tuple({"epsilon": epsilon, "epochs": epochs} for epsilon in (1.0, 2.0) for epochs in (5, 10)),
    axes={"progress": Log(0.1, 1.0)},
    arms={
        "DP-SGD": {"mechanism": ("dp-sgd",), "steps": (7,)},
        "DP-SGD, full batch": {"mechanism": ("dp-sgd",), "steps": (1,)},
        "λ-CGD, default λ": {"mechanism": ("lambda-cgd:0.9",), "steps": (7,)},
        "DP-SGD, Poisson": {"mechanism": ("dp-sgd",), "sampling": ("poisson",), "steps": (7,)},
    },
    candidates=2,
    finalists=1,
    tuning=(0,),
    tests=tuple(range(1000, 1006)),
    baselines={"nothing": ("DP-SGD", "DP-SGD, full batch"), "sampling": ("DP-SGD, Poisson", "DP-SGD, full batch")},
    work="epochs",
    unit="passes",
)  # fmt: skip


def arm_of(point: CentralPoint) -> str:
    if point.sampling == "poisson":
        return "DP-SGD, Poisson"
    if point.steps == 1:
        return "DP-SGD, full batch"
    return "λ-CGD, default λ" if point.mechanism.startswith("lambda") else "DP-SGD"


def pretended(point: CentralPoint) -> Row:
    """At ten epochs a point more, with odd seeds one less, and with λ-CGD at odd seeds another one less."""
    gain = GAINS[arm_of(point)] + 0.01 * (point.epochs == 10) - 0.01 * (point.seed % 2)
    gain -= 0.01 * (point.seed % 2) * (arm_of(point) == "λ-CGD, default λ")
    claim = {"noise_multiplier": 3.0, "adjacency": "zero out one user", "method": "exact"}
    return asdict(point) | claim | {"accuracy": 0.5 + gain - 0.01 * (point.learning_rate > 79.8), "seconds": 3.0}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the study `digits` is complete, and no other has begun."""
    monkeypatch.setitem(STUDIES, "digits", STUDY)
    file = Results(tmp_path / "digits.jsonl")
    while todo := missing(STUDY, known(file.rows(), CentralPoint)):
        file.append([pretended(point) for point in todo if isinstance(point, CentralPoint)])
    return tmp_path


def test_an_arm_is_compared_with_the_better_baseline_of_its_secret(results: Path) -> None:
    found = tuned(STUDY, Results(results / "digits.jsonl").rows(), CentralPoint)
    assert len(found) == len(STUDY.settings) * len(STUDY.arms)
    rows = compare(STUDY, found)
    assert [(row.epsilon, row.ours.arm, row.baseline.arm) for row in rows] == [
        (epsilon, "λ-CGD, default λ", "DP-SGD, full batch") for epsilon in (1.0, 2.0)
    ]
    first = rows[0]
    assert (first.ours.setting["epochs"], first.baseline.setting["epochs"]) == (10, 10)
    # 5 − 2 points, and one less with every other seed: 2.5 ± 0.548; t of 5 degrees of freedom 2.5706; 0.548/√6·2.5706 = 0.575
    assert 100 * first.pairs.difference == pytest.approx(2.5)
    assert 100 * first.pairs.low == pytest.approx(2.5 - 0.575, abs=1e-3)
    assert first.corrected == pytest.approx(2 * first.pairs.p_value)
    little = compare(STUDY, found, most=5)
    assert {row.ours.setting["epochs"] for row in little} == {5}
    assert STUDY.secret("DP-SGD, Poisson") == "sampling"


def test_the_baseline_is_the_one_that_is_best_on_the_test_whatever_validation_says(results: Path) -> None:
    rows = Results(results / "digits.jsonl").rows()
    misled = [
        row | {"accuracy": 0.9}
        if (row["steps"], row["split"], row["mechanism"]) == (7, "validation", "dp-sgd")
        else row
        for row in rows
    ]
    found = tuned(STUDY, misled, CentralPoint)
    assert pick(STUDY, found, 1.0, STUDY.baselines["nothing"]).arm == "DP-SGD"
    assert {row.baseline.arm for row in compare(STUDY, found)} == {"DP-SGD, full batch"}


def test_a_table_without_results_says_so_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    assert "*Not run yet.*" in fill("<!-- table: accuracy/digits -->\n<!-- end -->", tmp_path)
    with pytest.raises(ValueError, match=r"accuracies/digits.*verdict"):
        fill("<!-- table: accuracies/digits -->\n<!-- end -->", tmp_path)
    with pytest.raises(ValueError, match=r"'digit'.*digits"):
        fill("<!-- table: accuracy/digit -->\n<!-- end -->", tmp_path)


def test_the_pictures(results: Path) -> None:
    found = [Found.read(results, name) for name in STUDIES]
    gains = plots.gains(found)
    labels = [text.get_text() for text in gains.axes[0].texts]
    assert labels == ["+2.5", "+2.5"]
    assert [len(axes.patches) for axes in gains.axes[: len(CASES)]] == [2, 2, 0, 0]  # framed: p < .05
    frontier = plots.frontier(found, 1.0)
    (axes,) = frontier.axes
    assert len(axes.containers) == 4
    assert [round(y, 1) for y in axes.containers[1].lines[0].get_ydata()] == [51.5, 52.5]
    with pytest.raises(ValueError, match=r"0\.5"):
        plots.frontier(found, 0.5)
    with pytest.raises(ValueError, match="an arm"):
        plots.gains([])


def test_the_commands(results: Path, tmp_path: Path) -> None:
    run = CliRunner()
    done = run.invoke(app, ["run", "digits", "--results", str(results)])
    assert done.exit_code == 0, done.output  # nothing is missing
    csv = tmp_path / "runs.csv"
    assert run.invoke(app, ["table", str(csv), "digits", "--results", str(results)]).exit_code == 0
    head, *lines = csv.read_text().splitlines()
    assert {"study", "mechanism", "epsilon", "momentum", "seed", "split", "accuracy", "commit"} <= set(head.split(","))
    assert len(lines) == 128
    page = tmp_path / "page.md"
    page.write_text("<!-- table: effort -->\n<!-- end -->\n")
    assert run.invoke(app, ["page", str(page), "--results", str(results)]).exit_code == 0
    assert "`digits.jsonl`" in page.read_text()
    done = run.invoke(app, ["plot", "--results", str(results), "--output", str(tmp_path / "plots"), "--format", "svg"])
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"gains.svg", "frontier.svg"}
    assert "no runtime.svg: there are no running times" in done.output
    done = run.invoke(app, ["flower", "digits", "--results", str(results)])
    assert done.exit_code == 0, done.output
    printed = done.output.strip().splitlines()
    assert len(printed) == 2 * 4
    found = tuned(STUDY, Results(results / "digits.jsonl").rows(), CentralPoint)
    best = pick(STUDY, found, 1.0, ["DP-SGD"])
    assert best is not None
    assert printed[0] == flower_command(replace(best.point, seed=1000, split="test"), users=1260, gpus=0)
    assert "digits: Toy; 2 candidates for each of 4 arms at 4 settings" in run.invoke(app, ["list"]).output
    assert run.invoke(app, ["run", "digit"]).exit_code == 2
    assert run.invoke(app, ["flower", "people"]).exit_code == 2


def test_seeds_are_paired() -> None:
    found = paired({0: 0.53, 1: 0.64, 2: 0.75, 9: 0.0}, {0: 0.50, 1: 0.60, 2: 0.70})
    assert found is not None
    assert (found.accuracy, found.baseline, found.seeds) == (pytest.approx(0.64), pytest.approx(0.60), 3)
    # differences 0.03, 0.04, 0.05: mean 0.04, standard error 0.01/√3, t = 6.928 with 2 degrees of freedom
    assert found.difference == pytest.approx(0.04)
    assert found.p_value == pytest.approx(1 - 6.9282 / math.sqrt(2 + 6.9282**2), rel=1e-4)
    # the 97.5 % quantile of Student's t with 2 degrees of freedom is 4.30265
    half = 4.30265 * 0.01 / math.sqrt(3)
    assert (found.low, found.high) == (pytest.approx(0.04 - half, abs=1e-6), pytest.approx(0.04 + half, abs=1e-6))


def test_what_cannot_be_known_is_not_said() -> None:
    one = paired({0: 0.7}, {0: 0.5, 1: 0.6})
    assert one is not None
    assert math.isnan(one.p_value)
    assert math.isnan(one.low)
    same = paired({0: 0.75, 1: 0.875}, {0: 0.5, 1: 0.625})
    assert same is not None
    assert math.isnan(same.p_value)
    assert paired({0: 0.7}, {1: 0.5}) is None


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03, math.nan]) == [
        0.03,
        pytest.approx(0.06),
        pytest.approx(0.06),
        pytest.approx(math.nan, nan_ok=True),
    ]
    assert holm([0.5, 0.6]) == [1.0, 1.0]


def row(**changes):
    return {"delta": 1e-5, "sampling": "none", "adjacency": "zero out one user", "method": "exact"} | changes


def test_each_delta_and_sampling_is_said_once() -> None:
    rows = [row(), row(), row(sampling="poisson", method="PLD")]
    assert (
        claims(rows) == "ε at δ = 1e-05; adjacency: zero out one user; sampling: none (exact); sampling: poisson (PLD)."
    )
    assert claims([row(), row(delta=1e-6)]).count("ε at δ = ") == 2
    assert claims([]) == ""
