"""The experiment of fitted noise: each kind is tuned alike, judged by other seeds, and compared by the exact permutation test."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fedcgd.mechanisms import LambdaCGD
from fedcgd.optimisation.catalogue import MechanismSpec, read_mechanism
from fedcgd.optimisation.noise_curve import noise_curve
from fedcgd.quadratic import Quadratic, Spectrum
from fedcgd_experiments.curvature import app
from fedcgd_experiments.curvature_design import (
    ARMS,
    BAND_MF,
    DP_SGD,
    FITTED_LAMBDA,
    NOISE_CURVE,
    PRACTICAL,
    Design,
    arm_of,
    tamed,
)
from fedcgd_experiments.curvature_report import COMPARISONS, Tuned, compare, tuned
from fedcgd_experiments.point import TEST_SEEDS, CentralPoint
from fedcgd_experiments.results import Results, Row

SPECTRUM = Spectrum.from_eigenvalues(
    [4.0, 0.5, 0.01],
    [1, 5, 600],
    measured_on={"public": "held-out", "pretraining_epochs": 1, "pretraining_rate": 0.1, "seed": 0, "clip_norm": 1.0},
)


@pytest.fixture
def design(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Design:
    monkeypatch.setenv("FEDCGD_CACHE", str(tmp_path / "cache"))
    return Design(batch=140, epochs=2, bands=4, spectrum=saved(SPECTRUM, tmp_path), folder=tmp_path / "fitted")


def saved(spectrum: Spectrum, folder: Path) -> Path:
    path = folder / f"{spectrum.digest}.json"
    spectrum.save(path)
    return path


def run(design: Design, arm: str, rate: float, seed: int, accuracy: float, *, epsilon: float = 2.0) -> Row:
    point = asdict(design.point(arm, epsilon, rate, seed % TEST_SEEDS))
    split = "test" if seed >= TEST_SEEDS else "validation"
    return point | {"seed": seed, "split": split, "accuracy": accuracy}


def file_of(point: CentralPoint, design: Design) -> Path:
    path = Path(point.mechanism.removeprefix("file:"))
    assert path.parent == design.folder
    return path


def test_every_arm_has_its_noise(design: Design) -> None:
    points = {arm: design.point(arm, 2.0, 0.5, 0) for arm in ARMS}
    assert {arm: arm_of(point.mechanism) for arm, point in points.items()} == {arm: arm for arm in ARMS}
    assert points[DP_SGD].mechanism == "dp-sgd"
    assert points[BAND_MF].mechanism == "band-mf:4"
    assert points[PRACTICAL].mechanism.startswith("lambda-cgd:0.")
    fitted = read_mechanism(file_of(points[FITTED_LAMBDA], design))
    assert isinstance(fitted, LambdaCGD)
    assert MechanismSpec.parse(points[FITTED_LAMBDA].mechanism).made == fitted
    curve = MechanismSpec.parse(points[NOISE_CURVE].mechanism)
    assert (curve.row.name, curve.bands) == ("noise-curve", 4)
    # The larger the steps, the sooner noise is forgotten, and the less of it is worth cancelling.
    bolder = MechanismSpec.parse(design.point(FITTED_LAMBDA, 2.0, 2.0, 0).mechanism).made
    assert isinstance(bolder, LambdaCGD)
    assert bolder.lam < fitted.lam


def test_a_fitted_mechanism_is_never_that_of_another_design(design: Design, tmp_path: Path) -> None:
    """The folder is shared: what was fitted to other bands, epochs, batches or curvature must not be trained."""
    flatter = saved(Spectrum.from_eigenvalues([4.0, 0.05], [1, 605]), tmp_path)
    others = [{"bands": 2}, {"epochs": 1}, {"batch": 158, "epochs": 3}, {"spectrum": flatter}]
    others.append({"barrier": 5.0})
    first = design.point(NOISE_CURVE, 2.0, 0.5, 0)
    seen = {first.mechanism: read_mechanism(file_of(first, design))}
    for change in others:
        other = replace(design, **change)
        point = other.point(NOISE_CURVE, 2.0, 0.5, 0)
        made = read_mechanism(file_of(point, design))
        quadratic = Quadratic(tamed(other.fitted_to, 0.5), 0.5)
        who = point.setup.participation()
        assert made == noise_curve(other.bands, who, quadratic=quadratic, barrier=other.barrier)
        assert made not in seen.values()
        seen[point.mechanism] = made
    assert len(seen) == 1 + len(others)
    # And it is found once: a budget has no part in it.
    written = file_of(first, design).stat().st_mtime_ns
    assert design.point(NOISE_CURVE, 8.0, 0.5, 1).mechanism == first.mechanism
    assert file_of(first, design).stat().st_mtime_ns == written


@pytest.mark.parametrize("change", [{"bands": 2}, {"epochs": 1}, {"clip_norm": 2.0}, {"spectrum": [1.0]}])
def test_runs_of_two_designs_are_not_pooled(design: Design, change: dict[str, Any], tmp_path: Path) -> None:
    change = {
        name: saved(Spectrum.from_eigenvalues(value), tmp_path) if name == "spectrum" else value
        for name, value in change.items()
    }
    runs = [run(design, NOISE_CURVE, 0.5, 0, 0.7), run(replace(design, **change), NOISE_CURVE, 1.0, 0, 0.9)]
    with pytest.raises(ValueError, match="NoiseCurve at ε = 2 are of two designs"):
        tuned(runs)


def test_the_results_that_are_kept_are_of_one_design() -> None:
    """Among them files from before their names said what they were fitted to."""
    folder = Path(__file__).parents[2] / "benchmarks/results/curvature"
    for path in (folder / "digits.jsonl", folder / "fashion-mnist-6000.jsonl"):
        found = tuned(Results(path).rows())
        assert {arm for arm, _ in found} == set(ARMS)
        assert all(len(one.tests) == 10 for one in found.values())


def test_steep_directions_are_tamed_for_large_steps() -> None:
    assert tamed(SPECTRUM, 0.1) == SPECTRUM
    assert tamed(SPECTRUM, 1.0) == Spectrum.from_eigenvalues([1.0, 0.5, 0.01], [1, 5, 600])
    assert tamed(SPECTRUM, 4.0) == Spectrum.from_eigenvalues([0.25, 0.01], [6, 600])


def test_the_rate_is_chosen_by_validation_alone(design: Design) -> None:
    runs = [
        run(design, DP_SGD, 0.5, 0, 0.7), run(design, DP_SGD, 0.5, 1, 0.7),
        run(design, DP_SGD, 1.0, 0, 0.9), run(design, DP_SGD, 1.0, 1, 0.4),
        run(design, DP_SGD, 1.0, TEST_SEEDS, 1.0),
        run(design, FITTED_LAMBDA, 0.5, 0, 0.5), run(design, FITTED_LAMBDA, 1.0, 0, 0.6),
    ]  # fmt: skip
    fitted = Tuned(learning_rate=1.0, validation=0.6, tests={})
    assert tuned(runs) == {
        (DP_SGD, 2.0): Tuned(learning_rate=0.5, validation=0.7, tests={}),
        (FITTED_LAMBDA, 2.0): fitted,
    }
    runs.append(run(design, DP_SGD, 0.5, TEST_SEEDS, 0.2))
    assert tuned(runs)[DP_SGD, 2.0].tests == {TEST_SEEDS: 0.2}


def test_p_values_are_those_of_all_ways_to_deal_out_the_accuracies(design: Design) -> None:
    """Of appendix A.3: where every run of one arm is above every run of the other, p = 3!·3!/6! = 1/20."""
    values = {NOISE_CURVE: (0.80, 0.81, 0.83), BAND_MF: (0.70, 0.79, 0.75), DP_SGD: (0.70, 0.85, 0.70)}
    runs = [
        run(design, arm, 0.5, TEST_SEEDS + seed, accuracy)
        for arm, accuracies in values.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    runs += [run(design, arm, 0.5, 0, 0.5) for arm in values]
    runs.append(run(design, NOISE_CURVE, 0.5, TEST_SEEDS + 3, 0.0))  # no other arm has this seed
    rows = {(row.better, row.than): row for row in compare(runs)}
    assert set(rows) == {pair for pair in COMPARISONS if set(pair) <= set(values)}
    first = rows[NOISE_CURVE, BAND_MF]
    assert first.p_permutation == pytest.approx(1 / 20)
    assert first.difference == pytest.approx((2.44 - 2.24) / 3)
    assert first.seeds == 3
    differences = np.array([0.10, 0.02, 0.08])
    t = differences.mean() / (differences.std(ddof=1) / 3**0.5)
    assert first.p_paired == pytest.approx(0.5 - t / (2 * (t**2 + 2) ** 0.5))  # Student's t with two degrees of freedom
    assert rows[BAND_MF, DP_SGD].p_permutation > 0.5
    assert first.corrected == pytest.approx(3 / 20)


def test_the_commands_run_and_go_on_where_they_were(design: Design, tmp_path: Path) -> None:
    where = ["--spectrum", str(design.spectrum), "--folder", str(design.folder)]
    small = [*where, "--batch", "420", "--epochs", "1", "--bands", "2", "--output"]
    words = ["run", *small, str(tmp_path / "runs.jsonl"), "--epsilon", "4"]
    words += ["--learning-rate", "0.5", "--learning-rate", "0.25"]
    words += ["--arm", DP_SGD, "--arm", FITTED_LAMBDA, "--tuning-seeds", "1", "--seeds", "2"]
    assert CliRunner().invoke(app, words).exit_code == 0
    results = Results(tmp_path / "runs.jsonl")
    assert len(results.rows()) == 2 * (2 + 2)  # two rates, and two seeds of the better
    assert CliRunner().invoke(app, words).exit_code == 0
    assert len(Results(tmp_path / "runs.jsonl").records) == len(results.records)
    shown = CliRunner().invoke(app, ["compare", str(tmp_path / "runs.jsonl")], env={"COLUMNS": "160"}).stdout
    assert "λ-CGD, fitted λ" in shown
    only = [*words[:-1], "0", "--epsilon", "2"]
    only[only.index("--output") + 1] = str(tmp_path / "validation.jsonl")
    assert CliRunner().invoke(app, only).exit_code == 0
    runs = Results(tmp_path / "validation.jsonl").rows()
    assert {(row["split"], row["epsilon"]) for row in runs} == {("validation", 2.0), ("validation", 4.0)}
    chosen = CliRunner().invoke(app, ["tuned", str(tmp_path / "validation.jsonl")], env={"COLUMNS": "160"}).stdout
    assert "ε = 2" in chosen
    assert "λ-CGD, fitted λ" in chosen
    assert "nan" not in chosen
    assert "± " in shown


def test_a_certificate_is_of_public_examples_and_says_where_it_is_not(design: Design, tmp_path: Path) -> None:
    words = ["certificate", "--output", str(tmp_path / "rho.jsonl"), "--spectrum", str(design.spectrum)]
    words += ["--folder", str(design.folder), "--batch", "420", "--epochs", "1", "--arm", DP_SGD, "--examples", "12"]
    words += ["--eigenvalues", "2", "--every", "2"]
    assert CliRunner().invoke(app, words).exit_code == 0
    records = Results(tmp_path / "rho.jsonl").rows()
    assert [(record["step"], record["on"]) for record in records] == [(2, "public")]
    assert records[0]["rho"] > 0
    assert records[0]["ratio"] > 0
    assert CliRunner().invoke(app, [*words, "--also-private"]).exit_code == 0
    marks = [record["on"] for record in Results(tmp_path / "rho.jsonl").rows()]
    assert marks[1:] == ["public", "private examples, for the experiment alone: covered by no ε"]
