"""Mechanisms fitted to a curvature: against dense matrices, each other, closed forms, and the best of a grid."""

import json
from pathlib import Path

import numpy as np
import oracles_curvature as oracle
import pytest

from fedcgd import Participation, Plan, calibrate, select_lambda, sensitivity
from fedcgd.curvature.stationary import optimal_error, stationary_error
from fedcgd.mechanisms import BLT, BandInvMF, Dense, LambdaCGD, Mechanism, Normalized, NuDPFTRL, matrix
from fedcgd.optimisation import catalogue, fitted
from fedcgd.optimisation.banded import unit_columns
from fedcgd.optimisation.mechanism_json import describe, from_description
from fedcgd.optimisation.noise_curve import BARRIER, noise_curve
from fedcgd.optimisation.toeplitz import band_inv_mf, banded_toeplitz, blt
from fedcgd.quadratic import Quadratic, Spectrum
from fedcgd.quadratic.loss import final_loss

pytestmark = pytest.mark.usefixtures("own_cache")

SOME = Quadratic(Spectrum.from_eigenvalues([1.0, 0.5, 0.2, 0.2, 0.05, 0.01]), 0.8)
MANY = Participation(rounds=60, min_separation=12)


def error(mechanism: Mechanism, participation: Participation = MANY, quadratic: Quadratic = SOME) -> float:
    """At equal privacy."""
    return final_loss(mechanism, participation.rounds, quadratic) * sensitivity(mechanism, participation).value ** 2


def form(quadratic: Quadratic, n: int) -> np.ndarray:
    values = np.repeat(quadratic.spectrum.eigenvalues, np.array(quadratic.spectrum.counts, int))
    v = (1 - quadratic.learning_rate * values)[:, None] ** (n - 1 - np.arange(n))
    return v.T @ np.diag(values) @ v


def objective(x: np.ndarray, quadratic: Quadratic, unit: float, barrier: float) -> float:
    n = len(x)
    return np.trace(form(quadratic, n) @ np.linalg.inv(x)) / unit - barrier / n * np.linalg.slogdet(x)[1]


@pytest.mark.parametrize(
    ("n", "p", "barrier"), [(20, 3, BARRIER), (9, 9, BARRIER), (12, 1, BARRIER), (20, 3, 0.01), (20, 3, 10.0)]
)
def test_noise_curve_is_the_optimum_of_problem_p1(n: int, p: int, barrier: float) -> None:
    """Gu et al., "Correlating Cross-Iteration Noise for DP-SGD using Model Curvature", 2026, arXiv:2510.05416: convex in CᵀC."""
    found = noise_curve(p, Participation(rounds=n, min_separation=n), quadratic=SOME, barrier=barrier)
    c = matrix(found, n)
    np.testing.assert_allclose(np.linalg.norm(c, axis=0), 1, rtol=1e-12)
    # It is a minimum of a convex problem: nothing near it is better, in any direction that keeps the band and the diagonal.
    dense = c.T @ c
    rng = np.random.default_rng(9)
    lags = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    band, bsr = unit_columns("noise-curve", n, p)
    unit = 2 / SOME.learning_rate**2 * final_loss(Dense("noise-curve", band(bsr)[0]), n, SOME)
    here = objective(dense, SOME, unit, barrier)
    for _ in range(20):
        step = np.where((lags > 0) & (lags < p), rng.normal(size=(n, n)), 0.0)
        step = (step + step.T) * 1e-3
        assert objective(dense + step, SOME, unit, barrier) > here - 1e-6
        assert objective(dense - step, SOME, unit, barrier) > here - 1e-6


@pytest.mark.parametrize("participation", [MANY, Participation(rounds=60, min_separation=60)])
def test_the_best_lambda_is_the_best_of_a_grid_of_dense_matrices(participation: Participation) -> None:
    values = [1.0, 0.5, 0.2, 0.2, 0.05, 0.01]
    found = fitted.lambda_cgd(participation, quadratic=SOME)

    def slow(lam: float) -> float:
        c = np.array([[lam ** (i - j) if i >= j else 0.0 for j in range(60)] for i in range(60)])
        b, k = participation.min_separation, participation.participations
        return oracle.loss(c, values, 0.8) * np.linalg.norm(c[:, ::b][:, :k].sum(axis=1)) ** 2

    assert error(found, participation) == pytest.approx(slow(found.lam), rel=1e-9)
    assert slow(found.lam) <= min(slow(lam) for lam in np.linspace(0, 0.99, 100)) * (1 + 1e-9)
    assert 0 < found.lam < 1


def test_long_runs_with_one_participation_have_the_stationary_optima() -> None:
    once = Participation(rounds=2000, min_separation=2000)
    quadratic = Quadratic(Spectrum.from_eigenvalues([1.0, 0.2, 0.05]), 0.5)
    for find, make in ((fitted.lambda_cgd, LambdaCGD), (fitted.nu_dp_ftrl, NuDPFTRL)):
        grid = min(
            stationary_error(make(x), quadratic)
            for x in np.concatenate([np.linspace(0, 0.99, 100), np.geomspace(1e-5, 1e-2)])
        )
        assert stationary_error(find(once, quadratic=quadratic), quadratic) <= grid * (1 + 1e-4)
    least = optimal_error(quadratic)
    for mechanism in (
        blt(2, once, quadratic=quadratic),
        banded_toeplitz(16, once, quadratic=quadratic),
        band_inv_mf(16, once, quadratic=quadratic),
    ):
        assert least * (1 - 1e-6) < error(mechanism, once, quadratic) < 1.02 * least


@pytest.mark.parametrize("text", ["lambda-cgd", "nu-dp-ftrl", "band-inv-mf:3", "banded-toeplitz:4", "blt:1"])
def test_what_is_normalised_is_fitted_as_it_is_released(text: str) -> None:
    """Other numbers are best with unit columns: those of the same mechanism without are worse, and so are all nearby."""
    found = catalogue.mechanism(f"{text}:normalized", MANY, curvature=SOME)
    assert isinstance(found, Normalized)
    assert error(found) < 0.97 * error(Normalized(catalogue.mechanism(text, MANY, curvature=SOME)))
    numbers = describe(found)
    for key, value in numbers.items():
        if key in ("name", "normalize"):
            continue
        series = isinstance(value, tuple)
        for i in range(text.startswith("band"), len(value) if series else 1):  # c_0 = 1 of those with bands is not free
            for factor in (0.99, 0.9999):
                moved = (*value[:i], value[i] * factor, *value[i + 1 :]) if series else value * factor
                other = from_description(numbers | {key: moved})
                assert error(other) >= error(found) * (1 - 1e-6)


def test_the_table_fits_what_is_left_open_and_keeps_what_is_given() -> None:
    assert catalogue.mechanism("lambda-cgd", MANY, curvature=SOME) == fitted.lambda_cgd(MANY, quadratic=SOME)
    assert catalogue.mechanism("lambda-cgd:0.9", MANY, curvature=SOME) == LambdaCGD(0.9)
    assert catalogue.mechanism("nu-dp-ftrl:0.2", MANY, curvature=SOME) == NuDPFTRL(0.2)
    assert isinstance(catalogue.mechanism("blt:1", MANY, curvature=SOME), BLT)
    assert isinstance(catalogue.mechanism("band-inv-mf:2", MANY, curvature=SOME), BandInvMF)
    curve = catalogue.mechanism("noise-curve:4", MANY, curvature=SOME)
    assert catalogue.spelling_of(curve) == "noise-curve:4"
    assert from_description(json.loads(json.dumps(describe(curve)))) == curve


def test_a_curvature_is_part_of_what_is_cached(tmp_path: Path) -> None:
    other = Quadratic(SOME.spectrum, 0.4)
    found = [catalogue.mechanism("noise-curve:3", MANY, curvature=one) for one in (SOME, other, SOME)]
    assert found[0] == found[2] != found[1]
    assert len(list(tmp_path.rglob("noise-curve-*.json"))) == 2


def test_requests_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="is fitted"):
        catalogue.mechanism("noise-curve:3", MANY)
    with pytest.raises(ValueError, match="noise-curve needs"):
        catalogue.mechanism("noise-curve", MANY, curvature=SOME)
    with pytest.raises(ValueError, match="got 13"):
        noise_curve(13, MANY, quadratic=SOME)
    with pytest.raises(ValueError, match="noise-curve cannot"):
        catalogue.mechanism("noise-curve:3:normalized", MANY, curvature=SOME)
    with pytest.raises(ValueError, match="lambda-cgd needs"):
        catalogue.mechanism("lambda-cgd", MANY)
    with pytest.raises(ValueError, match="leave the"):
        catalogue.mechanism("blt:2", MANY, curvature=SOME, error="max-se")


def test_lambda_for_a_budget_is_that_of_the_table() -> None:
    budget = {"epsilon": 4.0, "delta": 1e-5}
    plain = select_lambda(MANY, objective="curvature", curvature=SOME, **budget)
    assert plain.lam == pytest.approx(fitted.lambda_cgd(MANY, quadratic=SOME).lam, abs=1e-3)
    assert plain.value**2 == pytest.approx(
        error(LambdaCGD(plain.lam)) * calibrate(LambdaCGD(0.0), Participation(rounds=1), **budget).noise_multiplier ** 2
    )
    with pytest.raises(ValueError, match="needs a"):
        select_lambda(MANY, objective="curvature", **budget)
    with pytest.raises(ValueError, match="no other"):
        select_lambda(MANY, objective="excess", curvature=SOME, **budget)


def test_a_plan_is_fitted_and_bands_are_chosen_for_the_loss() -> None:
    options = {"clip_norm": 1.0, "epsilon": 4.0, "delta": 1e-5}
    plan = Plan.calibrated("noise-curve:4", MANY, curvature=SOME, **options)
    assert plan.mechanism == catalogue.mechanism("noise-curve:4", MANY, curvature=SOME)
    assert Plan.from_description(json.loads(json.dumps(plan.to_description()))) == plan
    assert plan.guarantee().epsilon <= 4.0 + 1e-9
    open_plan = Plan.calibrated("noise-curve", MANY, curvature=SOME, **options)
    losses = {}
    for p in (1, 2, 4, 8, 12):
        one = Plan.calibrated(f"noise-curve:{p}", MANY, curvature=SOME, **options)
        losses[p] = final_loss(one.mechanism, 60, SOME, stddev=one.noise_multiplier)
    assert catalogue.spelling_of(open_plan.mechanism) == f"noise-curve:{min(losses, key=losses.__getitem__)}"
