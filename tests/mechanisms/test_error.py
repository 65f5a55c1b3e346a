"""Errors of A·C⁻¹ against dense matrices, the papers' numbers, and what the papers prove about them."""

import math

import mechanism_table
import numpy as np
import oracles_mechanisms as oracle
import pytest

from fedcgd import Participation, error_norms, sensitivity
from fedcgd.mechanisms import Dense, matrix
from fedcgd.mechanisms.workload import PREFIX_SUMS, Workload
from fedcgd.optimisation import catalogue

N = 24
BAND = np.linspace(1, 0.1, 3) * (np.arange(N)[:, None] + np.arange(3) < N) * np.linspace(1, 2, N)[:, None]
MECHANISMS = [*mechanism_table.ONE_OF_EACH.values(), Dense("band-mf", BAND), *mechanism_table.NORMALIZED.values()]
RATES = tuple(np.cos(np.linspace(0, 1.4, N)).tolist())
WORKLOADS = [PREFIX_SUMS, Workload(0.9), Workload(learning_rates=RATES), Workload(0.5, RATES)]


@pytest.mark.parametrize("workload", WORKLOADS, ids=["prefix", "momentum", "rates", "both"])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_against_dense_matrices(mechanism, workload) -> None:
    a = oracle.workload(N, workload.momentum, workload.learning_rates or None)
    b = a @ np.linalg.inv(matrix(mechanism, N))
    found = error_norms(mechanism, N, workload)
    assert found.frobenius == pytest.approx(np.linalg.norm(b), rel=1e-10)
    assert found.max_row == pytest.approx(np.linalg.norm(b, axis=1).max(), rel=1e-10)
    assert found.rmse(2.0) == pytest.approx(2 * np.linalg.norm(b) / math.sqrt(N), rel=1e-10)
    assert found.max_se(2.0) == pytest.approx(2 * np.linalg.norm(b, axis=1).max(), rel=1e-10)


def test_a_schedule_goes_on_with_its_last_rate() -> None:
    assert Workload(learning_rates=(1.0, 0.5)).rates(4).tolist() == [1.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("wrong", [{"momentum": 1.0}, {"momentum": 1.5}, {"learning_rates": (0.1, float("nan"))}])
def test_bad_workloads_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("_", " ")):
        Workload(**wrong)


# First column of Table 4 of arXiv:2601.22334 (k = 10 epochs of 390 rounds, ε = 8, δ = 1e-5, no amplification), the rows that are
# not optimised. The paper's σ is about 0.02 % too large, and it prints two decimals.
TABLE_4 = [
    ("lambda-cgd:0.975", 12.73),
    ("lambda-cgd:0.95", 14.74),
    ("lambda-cgd:0.9", 19.72),
    ("bisr:2", 48.45),
    ("bisr:4", 33.47),
    ("bisr:16", 17.95),
    ("bisr:64", 10.50),
    ("bisr:390", 8.45),
    ("bsr:2", 62.51),
    ("bsr:4", 46.80),
    ("bsr:16", 26.27),
    ("bsr:64", 14.89),
    ("bsr:390", 8.15),
    ("dp-sgd", 83.85),
]
SIGMA = 0.600228  # noise multiplier of sensitivity 1 there (exact Gaussian mechanism; see test_accounting_gaussian)


@pytest.mark.parametrize(("text", "printed"), TABLE_4)
def test_first_column_of_table_4(text: str, printed: float) -> None:
    run = Participation(rounds=3900, min_separation=390, max_participations=10)
    mechanism = catalogue.mechanism(text, run)
    bound = sensitivity(mechanism, run)
    assert bound.exact
    found = error_norms(mechanism, 3900).rmse(bound.value * SIGMA)
    assert found == pytest.approx(printed, rel=1e-3)
