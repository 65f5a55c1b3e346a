"""Schedules and momentum reach what is optimised, what is chosen and what the server does."""

import math
from dataclasses import replace

import numpy as np
import oracles_mechanisms as oracle
import pytest
from command_line import figures, run
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM
from scipy.optimize import approx_fprime

from fedcgd import Participation, error_norms, sensitivity
from fedcgd.accounting.selection import excess_share, select_lambda, select_mechanism
from fedcgd.mechanisms import LambdaCGD, Mechanism, inverse_matrix, matrix
from fedcgd.mechanisms.schedule import rate_factors, scheduled_workload
from fedcgd.mechanisms.workload import PREFIX_SUMS, Workload
from fedcgd.optimisation import catalogue
from fedcgd.optimisation import scheduled as optimisation
from fedcgd.optimisation.scheduled import scheduled_error
from fedcgd.quadratic import Quadratic, Spectrum
from fedcgd_flower import scheduled

BUDGET = {"epsilon": 1.0, "delta": 1e-5}
FALLING = scheduled_workload("linear", 60, momentum=0.9)
RUN = Participation(rounds=60, min_separation=12)


def test_the_factors_of_each_schedule() -> None:
    assert rate_factors("constant", 3) == (1.0, 1.0, 1.0)
    assert rate_factors("linear", 4) == (1.0, 0.75, 0.5, 0.25)
    assert rate_factors("cosine", 4) == pytest.approx((1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)))
    assert rate_factors("linear", 4, warmup=2) == (1 / 3, 2 / 3, 1.0, 0.5)


@pytest.mark.parametrize(
    ("schedule", "rounds", "warmup", "words"),
    [("steps", 4, 0, "'steps'"), ("linear", 4, 4, "^warmup"), ("linear", 0, 0, "^rounds")],
)
def test_bad_schedules_are_refused(schedule, rounds: int, warmup: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rate_factors(schedule, rounds, warmup=warmup)


def test_a_constant_rate_is_the_workload_without_a_schedule() -> None:
    assert scheduled_workload("constant", 50) == PREFIX_SUMS
    assert scheduled_workload("constant", 50, momentum=0.9) == Workload(0.9)


@pytest.mark.parametrize("error", ["rmse", "max-se"])
@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("chunk", [20, 2**20])
def test_the_error_under_a_schedule_is_that_of_dense_matrices(error: str, n: int, chunk: int, monkeypatch) -> None:
    """And its gradient that of differences."""
    monkeypatch.setattr(optimisation, "EFFORT", replace(optimisation.EFFORT, chunk=chunk))
    generator = np.random.default_rng(n)
    t, rates = generator.normal(size=n), generator.uniform(0.1, 1, n)
    squares = ((np.tril(np.ones((n, n))) @ np.diag(rates) @ oracle.toeplitz(t, n)) ** 2).sum(axis=1)
    found, gradient = scheduled_error(t, rates, error)
    assert found == pytest.approx(squares.mean() if error == "rmse" else squares.max(), rel=1e-12)
    differences = approx_fprime(t, lambda t: scheduled_error(t, rates, error)[0], 1e-7)
    np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-5)


def private_error(mechanism: Mechanism, workload: Workload, objective: str = "rmse") -> float:
    """sens·‖A·C⁻¹‖ from dense matrices: of all, or of the largest row."""
    a = oracle.workload(60, workload.momentum, workload.learning_rates or None)
    rows = np.linalg.norm(a @ np.linalg.inv(matrix(mechanism, 60)), axis=1)
    return float(np.linalg.norm(rows) if objective == "rmse" else rows.max()) * sensitivity(mechanism, RUN).value


@pytest.mark.parametrize("spelling", ["banded-toeplitz:6", "band-inv-mf:4", "blt:2", "band-mf:6"])
def test_what_is_optimised_for_a_schedule_is_better_under_it(spelling: str) -> None:
    constant = catalogue.mechanism(spelling, RUN)
    falling = catalogue.mechanism(spelling, RUN, workload=FALLING)
    assert private_error(falling, FALLING) < 0.995 * private_error(constant, FALLING)
    assert private_error(constant, PREFIX_SUMS) < 0.995 * private_error(falling, PREFIX_SUMS)


@pytest.mark.parametrize("workload", [FALLING, Workload(0.9), Workload(learning_rates=FALLING.learning_rates)])
@pytest.mark.parametrize("objective", ["rmse", "max-se"])
def test_lambda_is_the_best_of_a_grid_under_the_workload(workload: Workload, objective: str) -> None:
    found = select_lambda(RUN, objective=objective, workload=workload, **BUDGET).lam
    grid = [private_error(LambdaCGD(lam), workload, objective) for lam in np.linspace(0, 0.995, 200)]
    assert private_error(LambdaCGD(found), workload, objective) <= min(grid) * (1 + 1e-9)


def test_the_share_grows_from_a_third_to_all() -> None:
    assert excess_share(PREFIX_SUMS) == pytest.approx(1 / 3)
    assert excess_share(Workload(0.9)) == pytest.approx(2.8 / 3)
    assert excess_share(FALLING) == 1
    assert excess_share(Workload(learning_rates=(0.5, 0.5))) == pytest.approx(1 / 3)  # a rate that does not change


def test_unit_columns_take_the_whole_of_it_and_leave_less_in_the_last_model() -> None:
    """The last rounds of a run have less noise with unit columns, so that λ need not be small at a constant rate."""
    run = Participation(rounds=210, min_separation=21)
    plain, unit = (select_mechanism(spelling, run, **BUDGET) for spelling in ("lambda-cgd", "lambda-cgd:normalized"))
    assert unit.mechanism.lam == select_lambda(run, objective="rmse", normalize=True, **BUDGET).lam
    last = [float(np.linalg.norm(inverse_matrix(m, 210).sum(0))) * sensitivity(m, run).value for m in (plain, unit)]
    assert last[1] == pytest.approx(0.66 * last[0], rel=0.01)


def test_a_curvature_knows_no_schedule() -> None:
    one = Quadratic(Spectrum.from_eigenvalues([1.0]), 0.1)
    with pytest.raises(ValueError, match="constant rate"):
        select_lambda(RUN, objective="curvature", curvature=one, workload=FALLING, **BUDGET)


def test_the_command_line_chooses_for_the_schedule_and_reports_its_error() -> None:
    run_words = ("--rounds", "60", "--separation", "12", "--epsilon", "1", "--delta", "1e-5")
    words = (*run_words, "--momentum", "0.9", "--schedule", "linear")
    expected = select_lambda(RUN, objective="excess", workload=FALLING, **BUDGET)
    found = figures("account", *words)
    assert found["parameters"]["lam"] == expected.lam
    assert found["rmse"] == error_norms(LambdaCGD(expected.lam), 60, FALLING).rmse(found["noise_multiplier"])
    [row] = figures("compare", "--mechanism", "lambda-cgd", *words)["mechanisms"]
    assert row["rmse"] == found["rmse"]
    assert run("compare", *words, "--warmup", "60").exit_code == 2  # longer than the run may be


@pytest.mark.parametrize(("base", "name"), [(FedAvgM, "server_learning_rate"), (FedAdam, "eta")])
def test_the_server_s_rate_follows_the_schedule_and_stays_a_setting(base, name, monkeypatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(base, "aggregate_train", lambda self, *_: seen.append(getattr(self, name)) or (None, None))
    strategy = scheduled(base, "linear", rounds=4, warmup=1)(**{name: 0.8})
    for server_round in range(1, 7):
        strategy.aggregate_train(server_round, [])
    assert seen == pytest.approx([0.4, 0.8, 0.8 * 2 / 3, 0.8 / 3, 0.8 / 3, 0.8 / 3])
    assert getattr(strategy, name) == 0.8


def test_a_strategy_without_a_server_rate_is_refused_and_a_constant_one_stays_as_it_is() -> None:
    assert scheduled(FedAvgM, "constant", rounds=9) is FedAvgM
    with pytest.raises(ValueError, match="learning rate"):
        scheduled(FedAvg, "linear", rounds=9)
