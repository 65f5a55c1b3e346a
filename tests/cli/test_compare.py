"""`fedcgd compare`: mechanisms side by side, those that are chosen among them, and what their noise costs on a quadratic."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from command_line import figures, run, shown

from fedcgd import Participation, calibrate
from fedcgd.accounting.guarantee import ADJACENCY
from fedcgd.cli import compare
from fedcgd.optimisation import catalogue, fitted
from fedcgd.quadratic import Quadratic, Spectrum
from fedcgd.quadratic.loss import final_loss, gradient_norm

TABLE_4 = ["--rounds", "3900", "--participations", "10", "--separation", "390", "--epsilon", "8", "--delta", "1e-5"]
RUN = ["--rounds", "40", "--separation", "8", "--epsilon", "4", "--delta", "1e-5"]
BUDGET = ["--epsilon", "4", "--delta", "1e-5"]
MANY = Participation(rounds=40, min_separation=8)
SPECTRUM = Spectrum.from_eigenvalues([1.0, 0.5, 0.2, 0.2, 0.05, 0.0], measured_on={"model": "a toy"})
QUADRATIC = Quadratic(SPECTRUM, 0.8)

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


def test_each_step_of_the_choice_and_of_the_calibration_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(compare, "status", lambda _: nullcontext(told.append))
    words = (
        "--rounds 8 --separation 4 --epsilon 4 --delta 1e-3 --sampling balls-in-bins --mechanism dp-sgd --mechanism bsr"
    )
    figures("compare", *words.split())
    assert {line.partition(":")[0] for line in told} == {"dp-sgd, 1 of 2", "bsr, 2 of 2"}
    assert sum("p = " in line for line in told) == 3
    assert sum("of about" in line for line in told) > 2


def test_bands_with_groups_of_their_own() -> None:
    """Under cyclic Poisson sampling p bands have p groups and q = p·k/n: p = 1 is DP-SGD with q = 1/4."""
    words = ["--rounds", "16", "--participations", "4", "--sampling", "cyclic-poisson", *BUDGET]
    rows = {row["label"]: row for row in figures(*compared("dp-sgd", "bsr:2", "bsr:4"), *words)["mechanisms"]}
    assert {name: row["sampling_rate"] for name, row in rows.items()} == {"dp-sgd": 0.25, "bsr:2": 0.5, "bsr:4": 1.0}


def test_each_mechanism_is_shown_as_it_is_and_fitted(curvature: list[str]) -> None:
    names = ("dp-sgd", "lambda-cgd", "blt:1", "band-mf:8", "tree", "toeplitz", "noise-curve:2", "bsr:2")
    found = figures(*compared(*names), *curvature, *RUN)
    rows = {row["label"].partition(" →")[0]: row for row in found["mechanisms"]}
    once, both = set(names) - {"noise-curve:2"} | {"noise-curve:2, fitted"}, {"lambda-cgd", "blt:1"}
    assert set(rows) == once | {f"{name}, fitted" for name in both}
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
    assert (found["dimension"], found["learning_rate"], found["measured_on"]) == (6, 0.8, {"model": "a toy"})
    assert found["adjacency"] == ADJACENCY


def test_losses_are_shown(curvature: list[str]) -> None:
    words = [*compared("dp-sgd", "noise-curve:3"), *curvature[:2], *RUN]
    row = next(row for row in figures(*words)["mechanisms"] if row["label"] == "dp-sgd")
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


def test_a_picture_has_what_the_table_has_and_another_kind_of_file_is_refused_first(tmp_path: Path) -> None:
    page = tmp_path / "bars.svg"
    assert run(*compared("dp-sgd", "bisr:4"), *RUN, "--plot", str(page)).exit_code == 0
    assert page.read_text().count("<!-- bisr:4 -->") == 1
    refused = run(*compared("dp-sgd"), *RUN, "--plot", str(tmp_path / "bars.txt"))
    assert (refused.exit_code, refused.stdout) == (2, "")
