"""λ selection against dense matrices on a fine grid, and Corollary 6 of arXiv:2601.22334."""

import inspect
import math

import numpy as np
import oracles_mechanisms as oracle
import pytest
from oracles_accounting import gaussian_log_delta

from fedcgd import Participation, select_lambda

BUDGET = {"epsilon": 2.0, "delta": 1e-5}


def brute_force(n: int, b: int, k: int, lam: float, normalize: bool) -> tuple[float, float]:
    """(RMSE, MaxSE)/σ_{ε,δ} from dense matrices and every pattern of participations."""
    c = oracle.toeplitz(lam ** np.arange(n), n)
    c = oracle.normalized(c) if normalize else c
    b_matrix, sens = np.tril(np.ones((n, n))) @ np.linalg.inv(c), oracle.sensitivity(c, k, b)
    return sens * np.linalg.norm(b_matrix) / math.sqrt(n), sens * np.linalg.norm(b_matrix, axis=1).max()


GRID = np.linspace(0, 0.99, 100)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("n", "b", "k"), [(8, 8, 1), (8, 4, 2), (9, 4, 2), (9, 4, 3), (8, 2, 2), (10, 1, 3)])
def test_the_minimum_is_the_best_of_all_lambdas_by_brute_force(n: int, b: int, k: int, normalize: bool) -> None:
    participation = Participation(rounds=n, min_separation=b, max_participations=k)
    errors = np.array([brute_force(n, b, k, lam, normalize) for lam in GRID])
    for column, objective in enumerate(("rmse", "max-se")):
        found = select_lambda(participation, objective=objective, normalize=normalize, **BUDGET)
        here = brute_force(n, b, k, found.lam, normalize)[column]
        assert here <= errors[:, column].min() * (1 + 1e-9)
        assert found.lam == pytest.approx(GRID[errors[:, column].argmin()], abs=0.011)
        sigma = found.value / here
        assert gaussian_log_delta(2.0, sigma) == pytest.approx(math.log(1e-5), abs=1e-3)


@pytest.mark.parametrize("n", [1, 2, 10, 1000])
@pytest.mark.parametrize("objective", ["rmse", "max-se", "amplified-rmse", "excess"])
def test_full_batches_need_no_correlation(n: int, objective: str) -> None:
    """Corollary 6: for b = 1, k = n the minimum is at λ = 0 exactly."""
    assert select_lambda(Participation(rounds=n), objective=objective, **BUDGET).lam == 0


@pytest.mark.parametrize(("n", "b"), [(12, 3), (3900, 390)])
def test_without_a_sampling_amplified_is_plain_and_the_excess_over_one_is_a_third(n: int, b: int) -> None:
    plain, amplified, excess = (
        select_lambda(Participation(rounds=n, min_separation=b), objective=o, **BUDGET)
        for o in ("rmse", "amplified-rmse", "excess")
    )
    assert amplified.lam == plain.lam
    assert excess.lam / (1 - excess.lam) == pytest.approx(plain.lam / (1 - plain.lam) / 3)
    assert excess.value == dict(zip(excess.lams, excess.values, strict=True))[excess.lam] > plain.value


@pytest.mark.parametrize("objective", ["rmse", "excess"])
def test_the_curve_is_sorted_and_holds_the_choice(objective: str) -> None:
    found = select_lambda(Participation(rounds=100, min_separation=20), objective=objective, **BUDGET)
    assert found.lams[0] == 0
    assert list(found.lams) == sorted(set(found.lams))
    assert dict(zip(found.lams, found.values, strict=True))[found.lam] == found.value
    if objective == "rmse":
        assert found.value == pytest.approx(min(found.values), rel=1e-11)


def test_no_argument_is_data() -> None:
    """λ may depend on public numbers only, or ε would not hold. A curvature is one of them: a spectrum of public data."""
    assert set(inspect.signature(select_lambda).parameters) == {
        "participation", "objective", "epsilon", "delta", "normalize", "workload", "curvature", "progress",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("participation", "options", "words"),
    [
        (Participation(rounds=4), {"objective": "accuracy"}, "objective must be one of rmse, max-se"),
        (
            Participation(rounds=4, sampling="poisson", sampling_rate=0.5),
            {},
            "no λ of lambda-cgd to choose under poisson",
        ),
        (Participation(rounds=4), {"epsilon": 0.0}, "epsilon must be"),
        (Participation(rounds=4), {"delta": 1.0}, "delta must be in"),
    ],
)
def test_bad_input_is_refused_with_the_reason(participation: Participation, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        select_lambda(participation, **{"objective": "rmse", **BUDGET, **options})
