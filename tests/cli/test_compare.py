"""`fedcgd compare`: mechanisms side by side, those that are chosen among them, and what their noise costs on a quadratic."""

from pathlib import Path

import pytest
from command_line import figures, run, shown

from fedcgd import DPSGD, Participation, calibrate, select_lambda
from fedcgd.accounting.guarantee import ADJACENCY
from fedcgd.cli import compare
from fedcgd.curvature.stationary import optimal_error, stationary_error
from fedcgd.optimisation import catalogue, fitted
from fedcgd.quadratic import Quadratic, Spectrum
from fedcgd.quadratic.loss import final_loss, gradient_norm

TABLE_4 = ["--rounds", "3900", "--participations", "10", "--separation", "390", "--epsilon", "8", "--delta", "1e-5"]
RUN = ["--rounds", "40", "--separation", "8", "--epsilon", "4", "--delta", "1e-5"]
BUDGET = ["--epsilon", "4", "--delta", "1e-5"]
MANY = Participation(rounds=40, min_separation=8)
SPECTRUM = Spectrum.from_eigenvalues([1.0, 0.5, 0.2, 0.2, 0.05, 0.0], measured_on={"model": "a toy"})
QUADRATIC = Quadratic(SPECTRUM, 0.8)
SIGMA = calibrate(DPSGD(), Participation(rounds=1), epsilon=4, delta=1e-5).noise_multiplier

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def curvature(tmp_path: Path) -> list[str]:
    SPECTRUM.save(tmp_path / "spectrum.json")
    return ["--curvature", str(tmp_path / "spectrum.json"), "--learning-rate", "0.8"]


def compared(*names: str) -> list[str]:
    return ["compare", *(f"--mechanism={name}" for name in names)]


def test_the_best_is_first_and_what_is_missing_has_its_reason() -> None:
    rows = figures(*compared("dp-sgd", "lambda-cgd:0.9", "bisr:16", "band-mf:400"), *TABLE_4)["mechanisms"]
    assert [row["label"] for row in rows] == ["bisr:16", "lambda-cgd:0.9", "dp-sgd", "band-mf:400"]
    assert [round(row["rmse"], 2) for row in rows[:3]] == [17.94, 19.71, 83.83]
    assert set(rows[3]) == {"label", "error"}
    [row] = figures(*compared("bsr:4"), *RUN)["mechanisms"]
    assert {name: row[name] for name in ("rounds", "participations", "min_separation", "parameters")} == {
        "rounds": 40, "participations": 5, "min_separation": 8, "parameters": {"bands": 4},
    }  # fmt: skip


def test_it_fails_if_no_mechanism_could_be_calibrated() -> None:
    words = "--rounds 40 --separation 50 --epsilon 2 --delta 1e-5 --sampling cyclic-poisson"
    result = run("compare", *words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("--sampling-rate") == 1


def test_bars_are_drawn(tmp_path: Path) -> None:
    run(*compared("dp-sgd", "bsr:4"), *RUN, "--plot", tmp_path / "rmse.png")
    assert (tmp_path / "rmse.png").read_bytes()[:4] == b"\x89PNG"


def test_each_number_of_bands_is_compared_and_the_best_is_the_one_that_is_chosen() -> None:
    rows = figures(*compared("bsr"), *RUN)["mechanisms"]
    assert {row["label"] for row in rows} == {"bsr:1", "bsr:2", "bsr:4", "bsr:8"}
    assert [row["rmse"] for row in rows] == sorted(row["rmse"] for row in rows)
    assert figures("account", "--mechanism", "bsr", *RUN)["parameters"] == rows[0]["parameters"]


def test_bands_with_groups_of_their_own() -> None:
    """Under cyclic Poisson sampling p bands have p groups and q = p·k/n: p = 1 is DP-SGD with q = 1/4."""
    words = ["--rounds", "16", "--participations", "4", "--sampling", "cyclic-poisson", *BUDGET]
    rows = {row["label"]: row for row in figures(*compared("bsr"), *words)["mechanisms"]}
    assert {name: row["sampling_rate"] for name, row in rows.items()} == {"bsr:1": 0.25, "bsr:2": 0.5, "bsr:4": 1.0}
    assert figures("account", "--mechanism", "bsr:4", *words)["rmse"] == rows["bsr:4"]["rmse"]
    at_a_rate = [*words[:2], *words[4:], "--sampling-rate", "0.1", "--separation", "2"]
    assert {row["sampling_rate"] for row in figures(*compared("bsr"), *at_a_rate)["mechanisms"]} == {0.1}


@pytest.mark.parametrize("suffix", ["", ":normalized"])
def test_lambda_is_chosen_by_each_rule_that_is_named(suffix: str) -> None:
    rules = ("rmse", "max-se", "amplified-rmse", "excess")
    words = [f"--objective={rule}" for rule in rules]
    rows = {
        row["label"].partition(" →")[0]: row
        for row in figures(*compared("lambda-cgd" + suffix), *words, *RUN)["mechanisms"]
    }
    for rule in rules:
        expected = select_lambda(MANY, objective=rule, epsilon=4, delta=1e-5, normalize=bool(suffix)).lam
        assert rows[f"lambda-cgd{suffix}, {rule}"]["parameters"]["lam"] == expected
    usual = figures("account", "--mechanism", "lambda-cgd" + suffix, *RUN)["parameters"]
    assert rows[f"lambda-cgd{suffix}, excess"]["parameters"] == usual


def test_each_mechanism_is_shown_as_it_is_and_fitted(curvature: list[str]) -> None:
    names = ("dp-sgd", "lambda-cgd", "blt:1", "band-mf:8", "tree", "toeplitz", "noise-curve:2", "bsr")
    found = figures(*compared(*names), *curvature, *RUN)
    rows = {row["label"].partition(" →")[0]: row for row in found["mechanisms"]}
    bands = {f"bsr:{p}" for p in (1, 2, 4, 8)}
    once, both = {"dp-sgd", "band-mf:8", "tree", "toeplitz", "noise-curve:2, fitted"} | bands, {"lambda-cgd", "blt:1"}
    assert set(rows) == once | both | {f"{name}, fitted" for name in both}
    assert all(rows[f"{name}, fitted"]["loss"] < rows[name]["loss"] * 0.999 for name in both)
    assert all(row["fitted"] == name.endswith("fitted") for name, row in rows.items())
    losses = [row["loss"] for row in found["mechanisms"]]
    assert losses == sorted(losses)
    lam = fitted.lambda_cgd(MANY, quadratic=QUADRATIC)
    sigma = calibrate(lam, MANY, epsilon=4, delta=1e-5).noise_multiplier
    row = rows["lambda-cgd, fitted"]
    assert row["parameters"]["lam"] == pytest.approx(lam.lam, abs=1e-3)
    assert row["loss"] == pytest.approx(final_loss(lam, 40, QUADRATIC, stddev=sigma), rel=1e-5)
    assert row["gradient_norm"] == pytest.approx(gradient_norm(lam, 40, QUADRATIC, stddev=sigma), rel=1e-3)
    assert rows["dp-sgd"]["stationary"] == pytest.approx(SIGMA**2 * stationary_error(DPSGD(), QUADRATIC))
    assert (rows["tree"]["stationary"], rows["toeplitz"]["stationary"]) == (None, "inf")
    assert found["stationary_optimum"] == pytest.approx(SIGMA**2 * optimal_error(QUADRATIC))
    assert (found["dimension"], found["learning_rate"], found["measured_on"]) == (6, 0.8, {"model": "a toy"})
    assert found["adjacency"] == ADJACENCY


def test_losses_are_drawn_and_shown(curvature: list[str], tmp_path: Path) -> None:
    plot = tmp_path / "losses.svg"
    words = [*compared("dp-sgd", "noise-curve:3"), *curvature[:2], *RUN]
    row = next(row for row in figures(*words, "--plot", plot)["mechanisms"] if row["label"] == "dp-sgd")
    assert plot.stat().st_size > 5_000
    text = shown(run(*words))
    for part in ("d_eff = 1.95", "noise-curve:3, fitted", f"{row['loss']:.6g}"):
        assert part in text


def test_what_is_compared_where_nothing_is_named_is_of_the_table() -> None:
    for separation in (1, 3, 100):
        for text in compare.default_mechanisms(separation, 400, fitted=True):
            assert (catalogue.MechanismSpec.parse(text).bands or 1) <= max(separation, 4)
        for text in compare.default_mechanisms(separation, 400, fitted=False):
            assert (catalogue.MechanismSpec.parse(text).bands or 1) <= separation


def test_what_the_sampling_does_not_cover_is_listed(curvature: list[str]) -> None:
    when = ["--rounds", "40", "--sampling", "cyclic-poisson", "--participations", "5", *BUDGET]
    words = [*compared("dp-sgd", "lambda-cgd:0.5", "noise-curve:4"), *curvature, *when]
    found = {row["label"]: row for row in figures(*words)["mechanisms"]}
    assert "cyclic-poisson" in found["lambda-cgd:0.5"]["error"]
    assert found["noise-curve:4, fitted"]["loss"] > 0
