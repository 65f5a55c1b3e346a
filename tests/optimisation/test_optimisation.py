"""Optimised mechanisms against the papers' figures, gradients by differences, and what may not get worse."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from oracles_mechanisms import workload

import fedcgd.optimisation.banded as banded_module
import fedcgd.optimisation.noise_curve as noise_curve_module
import fedcgd.optimisation.toeplitz as toeplitz_module
from fedcgd import Participation, error_norms, sensitivity
from fedcgd.mechanisms import Normalized, Toeplitz, matrix
from fedcgd.mechanisms.workload import Objective, Workload
from fedcgd.optimisation import catalogue
from fedcgd.optimisation.banded import band_mf, dense, error_and_gradient
from fedcgd.optimisation.bfgs import minimise_with_kinks
from fedcgd.optimisation.catalogue import MechanismSpec
from fedcgd.optimisation.lbfgs import minimise
from fedcgd.optimisation.noise_curve import noise_curve
from fedcgd.optimisation.table import BANDS, BUFFERS, TABLE, Row
from fedcgd.optimisation.toeplitz import band_inv_mf, banded_toeplitz, blt
from fedcgd.quadratic import Quadratic, Spectrum

pytestmark = pytest.mark.usefixtures("own_cache")

CIFAR = Participation(rounds=3900, min_separation=390)  # Table 4 of arXiv:2601.22334: n = 3900, k = 10, b = 390
SIGMA = 0.600228  # noise multiplier of sensitivity 1 at ε = 8, δ = 1e-5 (exact Gaussian mechanism; see test_accounting_gaussian)


def rmse(mechanism, participation=CIFAR) -> float:
    """Per unit of σ_{ε,δ}."""
    return error_norms(mechanism, participation.rounds).rmse(sensitivity(mechanism, participation).value)


# The column "ε = 8 (w/o Amp)" of Table 4. "BandMF" there is the optimal banded Toeplitz.
@pytest.mark.parametrize(("bands", "printed"), [(2, 59.44), (4, 42.29), (16, 22.05), (64, 12.58)])
def test_banded_toeplitz_is_table_4s_band_mf(bands: int, printed: float) -> None:
    assert rmse(banded_toeplitz(bands, CIFAR)) * SIGMA == pytest.approx(printed, rel=1e-3)


# Printed 12.69, 10.27, 8.54: found with Theorem 1, which does not hold for p ≥ 4. With a valid sensitivity no worse than 0.5 %.
@pytest.mark.parametrize(("bands", "printed"), [(2, 12.69), (4, 10.27), (16, 8.54)])
def test_band_inv_mf_under_a_valid_sensitivity(bands: int, printed: float) -> None:
    assert rmse(band_inv_mf(bands, CIFAR)) * SIGMA < printed * 1.005


@pytest.mark.slow
def test_full_bandwidths_of_table_4() -> None:
    assert rmse(banded_toeplitz(390, CIFAR)) * SIGMA == pytest.approx(7.77, rel=1e-3)
    assert rmse(band_inv_mf(64, CIFAR)) * SIGMA < 8.15 * 1.005
    # Printed 7.87 is no valid figure; 7.98 is the best known under a valid sensitivity.
    assert 7.9 < rmse(band_inv_mf(390, CIFAR)) * SIGMA < 7.98 * 1.01


def test_blt_of_table_4() -> None:
    assert rmse(blt(3, CIFAR)) * SIGMA == pytest.approx(8.14, rel=1e-3)


@pytest.mark.parametrize(("rounds", "separation", "error"), [(1, 1, "rmse"), (2, 1, "rmse"), (3, 2, "max-se")])
def test_runs_of_a_few_rounds(rounds: int, separation: int, error: Objective) -> None:
    participation = Participation(rounds=rounds, min_separation=separation)
    for bands in {1, rounds}:
        assert len(banded_toeplitz(bands, participation, error=error).values) == bands
        assert len(band_inv_mf(bands, participation, error=error).values) == bands
    assert all(0 <= decay < 1 for decay in blt(3, participation, error=error).decays)
    assert matrix(dense(participation), rounds).shape == (rounds, rounds)


@pytest.mark.parametrize("separation", [1, 600, 3000])
def test_blt_of_a_long_run_starts_from_a_short_one_and_is_as_good(separation: int, monkeypatch) -> None:
    """From 10,000 rounds on; here from 1000."""
    run = Participation(rounds=3000, min_separation=separation)
    searched = rmse(blt(3, run), run)
    monkeypatch.setattr(toeplitz_module, "EFFORT", replace(toeplitz_module.EFFORT, shortened=1000))
    lengths = []
    find = toeplitz_module._least_blt
    monkeypatch.setattr(
        toeplitz_module,
        "_least_blt",
        lambda degree, run, *rest, **near: lengths.append(run.rounds) or find(degree, run, *rest, **near),
    )
    assert rmse(blt(3, run), run) == pytest.approx(searched, rel=1e-6)
    assert lengths == [1000, 3000]


FEW = Participation(rounds=23, min_separation=5)
TWICE = Participation(rounds=23, min_separation=5, max_participations=2)
QUADRATIC = Quadratic(Spectrum.from_eigenvalues(np.geomspace(1, 1e-3, 30)), 0.5)
LINEAR = Workload(momentum=0.5, learning_rates=tuple(np.linspace(1, 0.1, 23)))


@pytest.mark.parametrize(
    "find",
    [
        *(
            partial(one, degree, participation, error=error, workload=workload)
            for one, degree in ((banded_toeplitz, 4), (band_inv_mf, 4), (blt, 3))
            for participation in (FEW, TWICE)
            for error in ("rmse", "max-se")
            for workload in (Workload(), Workload(momentum=0.9), LINEAR)
        ),
        *(partial(band_mf, 4, FEW, workload=workload) for workload in (Workload(), LINEAR)),
        *(
            partial(one, 3, FEW, quadratic=QUADRATIC, normalized=normalized)
            for one in (banded_toeplitz, band_inv_mf, blt)
            for normalized in (False, True)
        ),
        partial(noise_curve, 4, FEW, quadratic=QUADRATIC),
    ],
)
def test_gradients_by_differences(find: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every objective that is minimised, beside its start; differences are off by rounding, 1e-16/1e-6, and by curvature."""
    generator, looked = np.random.default_rng(0), 0

    def look(objective, start, **_):
        nonlocal looked
        looked += 1
        x = start + 0.05 * generator.standard_normal(len(start))
        value, gradient = objective(x)
        steps = 1e-6 * np.eye(len(x))
        differences = [(objective(x + step)[0] - objective(x - step)[0]) / 2e-6 for step in steps]
        np.testing.assert_allclose(gradient, differences, rtol=0, atol=1e-5 * np.abs(gradient).max())
        return x, value

    for module in (toeplitz_module, banded_module, noise_curve_module):
        monkeypatch.setattr(module, "minimise", look)
    monkeypatch.setattr(toeplitz_module, "minimise_with_kinks", look)
    find()
    assert looked


@pytest.mark.parametrize(
    "spelling",
    [
        *("band-inv-mf:2", "band-inv-mf:4", "band-inv-mf:8", "banded-toeplitz:4", "blt:1", "blt:3", "band-mf:3"),
        *("band-inv-mf:4:normalized", "noise-curve:3"),
    ],
)
def test_what_is_found_does_not_hang_on_rounding(spelling: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor adds in another order: objectives and gradients differ in their last digits, and optima must not."""
    generator = np.random.default_rng(0)

    def rounded(minimise: Callable[..., object]) -> Callable[..., object]:
        def minimised(objective: Callable[..., object], start: np.ndarray, **options: object) -> object:
            def elsewhere(x: np.ndarray) -> tuple[float, np.ndarray]:
                value, gradient = objective(x)
                off = generator.standard_normal(1 + len(gradient))
                return value * (1 + 2e-16 * off[0]), gradient * (1 + 1e-15 * off[1:])

            return minimise(elsewhere, start, **options)

        return minimised

    curvature = QUADRATIC if spelling in ("band-inv-mf:4:normalized", "noise-curve:3") else None
    runs = [Participation(rounds=n, min_separation=b) for n, b in ((12, 3), (12, 4), (100, 10))]
    here = [matrix(catalogue.mechanism(spelling, run, curvature=curvature), run.rounds) for run in runs]
    monkeypatch.setenv("FEDCGD_CACHE", str(tmp_path / "elsewhere"))
    for module in (toeplitz_module, banded_module, noise_curve_module):
        monkeypatch.setattr(module, "minimise", rounded(minimise))
    monkeypatch.setattr(toeplitz_module, "minimise_with_kinks", rounded(minimise_with_kinks))
    for run, found in zip(runs, here, strict=True):
        there = catalogue.mechanism(spelling, run, curvature=curvature)
        np.testing.assert_allclose(matrix(there, run.rounds), found, atol=1e-5)


def test_a_minimum_at_a_kink_is_found() -> None:
    """8·|x² − y| + (1 − x)², a valley that is not smooth at its bottom and bends."""

    def valley(at: np.ndarray) -> tuple[float, np.ndarray]:
        off, side = at[0] ** 2 - at[1], np.sign(at[0] ** 2 - at[1])
        return 8 * abs(off) + (1 - at[0]) ** 2, np.array([16 * side * at[0] - 2 * (1 - at[0]), -8 * side])

    start = np.array([-1.2, 1.0])
    found, value = minimise_with_kinks(valley, start)
    np.testing.assert_allclose(found, 1, atol=1e-5)
    assert value == valley(found)[0] < 1e-10
    assert minimise_with_kinks(valley, start, iterations=3)[1] > 1e-3
    with_nothing, _ = minimise_with_kinks(lambda x: (1.0, x), np.empty(0))
    assert not len(with_nothing)


def test_a_line_search_that_fails_begins_again() -> None:
    """|x| is nowhere smooth where it is least: L-BFGS-B ends with an abnormal line search, short of it."""
    x, value = minimise(lambda x: (float(np.abs(x).sum()), np.sign(x)), np.array([3.3, -1.7, 0.4]))
    assert value < 1e-3
    assert np.abs(x).sum() == value


def test_squared_error_is_that_of_the_dense_matrices() -> None:
    mechanism = band_mf(3, Participation(rounds=9, min_separation=3))
    rates = (*np.linspace(1, 0.5, 8), 2.0)
    a = workload(9, momentum=0.5, rates=rates)
    expected = np.linalg.norm(a @ np.linalg.inv(matrix(mechanism, 9))) ** 2 / 9
    assert error_and_gradient(mechanism.band, Workload(0.5, rates))[0] == pytest.approx(expected, rel=1e-12)


def test_cache_is_read_checked_and_mended(tmp_path: Path) -> None:
    many = Participation(rounds=64, min_separation=8)
    reports: list[int] = []
    first = catalogue.mechanism("banded-toeplitz:4", many, progress=lambda done, value: reports.append(done))
    assert reports
    [path] = tmp_path.rglob("*.json")
    reports.clear()
    assert catalogue.mechanism("banded-toeplitz:4", many, progress=lambda done, value: reports.append(done)) == first
    assert not reports  # read, not found again
    content = json.loads(path.read_text())
    for damaged in (
        "",
        "{",
        path.read_text()[:-20],
        json.dumps(content | {"answer": content["answer"].replace("0.", "0.9", 1)}),
        json.dumps(content | {"question": "another"}),
    ):
        path.write_text(damaged)
        assert catalogue.mechanism("banded-toeplitz:4", many) == first
        assert json.loads(path.read_text()) == content
    assert catalogue.mechanism("banded-toeplitz:5", many) != first
    assert len(list(tmp_path.rglob("*.json"))) == 2


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("banded-toeplitz:65", {}, "65 bands, .* 64 at most"),
        ("band-mf:9", {}, "between 1 and 8, .* got 9"),
        ("band-mf:4", {"error": "max-se"}, "rmse only"),
        ("dense", {"error": "max-se"}, "rmse only"),
        ("blt:0", {}, "at least 1"),
    ],
)
def test_requests_that_make_no_sense(text: str, options, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        catalogue.mechanism(text, Participation(rounds=64, min_separation=8), **options)


VALUES = {BUFFERS: 2, BANDS: 3}  # any other number is 0.5


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_every_mechanism_can_be_made_described_and_normalised_where_it_makes_sense(row: Row) -> None:
    many = Participation(rounds=16, min_separation=4)
    spelling = MechanismSpec(row, tuple(VALUES.get(parameter, 0.5) for parameter in row.parameters))
    curvature = Quadratic(Spectrum.from_eigenvalues([1.0, 0.1]), 0.5) if row.name == "noise-curve" else None
    made = catalogue.mechanism(spelling, many, curvature=curvature)
    assert made.name == row.name
    assert isinstance(made, row.cls)
    assert np.isfinite(rmse(made, many))
    assert catalogue.spelling_of(made) == str(spelling)
    if isinstance(made, Toeplitz):
        assert catalogue.mechanism(f"{spelling}:normalized", many) == Normalized(made)
