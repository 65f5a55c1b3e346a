"""`fedcgd theory`, and --curvature of the other commands."""

from pathlib import Path

import pytest
from command_line import figures, run

from fedcgd import DPSGD, Participation, calibrate
from fedcgd.cli import theory
from fedcgd.curvature.stationary import optimal_error, stationary_error
from fedcgd.optimisation import catalogue, fitted
from fedcgd.quadratic import Quadratic, Spectrum
from fedcgd.quadratic.loss import final_loss, gradient_norm

SPECTRUM = Spectrum.from_eigenvalues([1.0, 0.5, 0.2, 0.2, 0.05, 0.0], measured_on={"model": "a toy"})
QUADRATIC = Quadratic(SPECTRUM, 0.8)
RUN = ["--rounds", "40", "--separation", "8", "--epsilon", "4", "--delta", "1e-5"]
MANY = Participation(rounds=40, min_separation=8)
SIGMA = calibrate(DPSGD(), Participation(rounds=1), epsilon=4, delta=1e-5).noise_multiplier


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDCGD_CACHE", str(tmp_path / "cache"))
    SPECTRUM.save(tmp_path / "spectrum.json")
    return tmp_path / "spectrum.json"


def test_theory_shows_each_mechanism_as_it_is_and_fitted(path: Path) -> None:
    texts = [
        f"--mechanism={name}"
        for name in ("dp-sgd", "lambda-cgd", "blt:1", "band-mf:8", "tree", "toeplitz", "noise-curve:2")
    ]
    found = figures("theory", "--spectrum", str(path), "--learning-rate", "0.8", *texts, *RUN)
    rows = {row["label"].partition(" →")[0]: row for row in found["mechanisms"]}
    once, both = {"dp-sgd", "band-mf:8", "tree", "toeplitz", "noise-curve:2, fitted"}, {"lambda-cgd", "blt:1"}
    assert set(rows) == once | both | {f"{name}, fitted" for name in both}
    assert all(rows[f"{name}, fitted"]["loss"] < rows[name]["loss"] * 0.999 for name in both)
    losses = [row["loss"] for row in found["mechanisms"]]
    assert losses == sorted(losses)
    lam = fitted.lambda_cgd(MANY, quadratic=QUADRATIC)
    sigma = calibrate(lam, MANY, epsilon=4, delta=1e-5).noise_multiplier
    row = rows["lambda-cgd, fitted"]
    assert row["numbers"]["λ"] == pytest.approx(lam.lam, abs=1e-3)
    assert row["loss"] == pytest.approx(final_loss(lam, 40, QUADRATIC, stddev=sigma), rel=1e-5)
    assert row["gradient_norm"] == pytest.approx(gradient_norm(lam, 40, QUADRATIC, stddev=sigma), rel=1e-3)
    assert rows["dp-sgd"]["stationary"] == pytest.approx(SIGMA**2 * stationary_error(DPSGD(), QUADRATIC))
    assert rows["tree"]["stationary"] is None
    assert rows["toeplitz"]["stationary"] == "inf"
    assert found["stationary_optimum"] == pytest.approx(SIGMA**2 * optimal_error(QUADRATIC))
    assert (found["dimension"], found["learning_rate"], found["measured_on"]) == (6, 0.8, {"model": "a toy"})
    low, high = found["stationary_bounds"]["independent"]
    assert low < rows["dp-sgd"]["stationary"] < high
    assert found["adjacency"] == "zero out one user"
    assert found["curves"] == []


def test_theory_draws_losses_against_rounds_dimensions_and_nu(path: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(theory, "_CURVES", ("dp-sgd", "lambda-cgd"))  # the others take a minute
    plot = tmp_path / "theory.svg"
    words = ["theory", "--spectrum", str(path), "--mechanism", "dp-sgd", "--mechanism", "noise-curve:3", *RUN]
    found = figures(*words, "--plot", str(plot))
    assert plot.stat().st_size > 10_000
    curves = {curve["what"]: curve for curve in found["curves"]}
    assert list(curves) == ["rounds", "dimension", "effective dimension", "ν"]
    assert curves["rounds"]["x"] == [5, 10, 20, 40, 80]
    assert curves["dimension"]["x"][-1] == 6
    assert curves["effective dimension"]["x"][-1] == pytest.approx(5)  # all equal but the flat one
    here = curves["rounds"]["losses"]["dp-sgd"][3]
    row = next(row for row in found["mechanisms"] if row["label"] == "dp-sgd")
    assert here * SIGMA**2 == pytest.approx(row["loss"])
    assert curves["dimension"]["losses"]["dp-sgd"][-1] == pytest.approx(here)
    for curve in found["curves"]:
        assert all(len(losses) == len(curve["x"]) for losses in curve["losses"].values())
    # The table for people says the same.
    shown = run(*words).stdout
    assert "d = 6, d_eff = 1.95" in shown
    assert "noise-curve:3, fitted" in shown
    assert "above the least loss of its problem" in " ".join(shown.split())
    assert "its problem" not in run(*words[:5], *RUN).stdout


def test_the_default_mechanisms_are_of_the_table() -> None:
    for separation in (1, 3, 100):
        for text in theory.default_mechanisms(separation):
            assert (catalogue.MechanismSpec.parse(text).bands or 1) <= max(separation, 4)


def test_theory_lists_what_the_sampling_does_not_cover(path: Path) -> None:
    words = ["--mechanism", "dp-sgd", "--mechanism", "lambda-cgd:0.5", "--mechanism", "noise-curve:4"]
    budget = ["--epsilon", "4", "--delta", "1e-5"]
    when = ["--rounds", "40", "--sampling", "cyclic-poisson", "--participations", "5", *budget]
    found = {row["label"]: row for row in figures("theory", "--spectrum", str(path), *words, *when)["mechanisms"]}
    assert "cyclic-poisson" in found["lambda-cgd:0.5"]["error"]
    assert found["noise-curve:4, fitted"]["loss"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning-rate", "2"], "below 2/μ = 2 for the largest"),
        (["--mechanism", "nonsense"], "unknown mechanism"),
        (["--plot", "plot.txt"], "a plot is a"),
    ],
)
def test_mistakes_are_named_before_any_work(path: Path, words: list[str], message: str) -> None:
    result = run("theory", "--spectrum", str(path), *RUN, *words)
    assert result.exit_code == 2
    assert message in result.output


def test_a_file_that_is_no_spectrum_is_named(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    result = run("theory", "--spectrum", str(tmp_path / "other.json"), *RUN)
    assert result.exit_code == 2
    assert "holds no spectrum" in result.output
    Spectrum.from_eigenvalues([0.0]).save(tmp_path / "flat.json")
    assert "no curvature" in run("theory", "--spectrum", str(tmp_path / "flat.json"), *RUN).output


def test_commands_fit_what_they_are_asked_for(path: Path) -> None:
    curvature = ["--curvature", str(path), "--learning-rate", "0.8"]
    made = catalogue.mechanism("noise-curve:4", MANY, curvature=QUADRATIC)
    found = figures("calibrate", "--mechanism", "noise-curve:4", *RUN, *curvature)
    assert found["loss"] == pytest.approx(final_loss(made, 40, QUADRATIC, stddev=found["noise_multiplier"]))
    assert "(clip norm / cohort)²" in run("calibrate", "--mechanism", "noise-curve:4", *RUN, *curvature).stdout
    compared = figures(
        "compare", "--mechanism", "dp-sgd", "--mechanism", "blt:1", "--mechanism", "lambda-cgd", *RUN, *curvature
    )
    assert [row["loss"] for row in compared] == sorted(row["loss"] for row in compared)
    assert compared[-1]["label"] == "dp-sgd"
    selected = figures("select-lambda", *RUN, *curvature)
    assert selected["objective"] == "curvature"
    assert selected["lam"] == pytest.approx(fitted.lambda_cgd(MANY, quadratic=QUADRATIC).lam, abs=1e-3)
    bands = figures("select-bands", "--mechanism", "noise-curve", *RUN, *curvature)
    losses = dict(bands["errors"])
    assert losses[bands["bands"]] == min(losses.values())
    assert losses[4] == pytest.approx(found["loss"])


def test_half_a_curvature_is_refused(path: Path) -> None:
    for half in (["--curvature", str(path)], ["--learning-rate", "0.8"]):
        result = run("calibrate", "--mechanism", "dp-sgd", *RUN, *half)
        assert result.exit_code == 2
        assert "belong together" in result.output
    result = run("calibrate", "--mechanism", "noise-curve:4", *RUN)
    assert result.exit_code == 2
    assert "fitted to a curvature, and none is given" in result.output
