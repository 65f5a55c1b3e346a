"""λ selection against dense matrices on a fine grid, the closed forms of the paper, and its Lemma 3 and Corollary 6."""

import inspect
import math
from itertools import combinations

import numpy as np
import pytest

from fedcgd import Participation, select_lambda
from fedcgd.accounting import search

BUDGET = {"epsilon": 2.0, "delta": 1e-5}


def delta_of_gaussian(epsilon: float, sigma: float) -> float:
    """δ(ε) by summing max(0, p − e^ε·q) over a fine grid."""
    x = np.linspace(-40 * sigma, 40 * sigma, 400_001)
    p = np.exp(-((x - 1) ** 2) / (2 * sigma**2))
    q = np.exp(-(x**2) / (2 * sigma**2))
    density = np.maximum(0, p - math.exp(epsilon) * q).sum() * (x[1] - x[0])
    return float(density / (sigma * math.sqrt(2 * math.pi)))


def brute_force(n: int, b: int, k: int, lam: float, normalize: bool) -> tuple[float, float]:
    """(RMSE, MaxSE)/σ_{ε,δ} from dense matrices and every pattern of participations."""
    c = np.array([[lam ** (i - j) if i >= j else 0.0 for j in range(n)] for i in range(n)])
    if normalize:
        c = c / np.linalg.norm(c, axis=0)
    b_matrix = np.tril(np.ones((n, n))) @ np.linalg.inv(c)
    patterns = (p for size in range(1, k + 1) for p in combinations(range(n), size) if all(np.diff(p, prepend=-b) >= b))
    sens = max(np.linalg.norm(c[:, list(p)].sum(axis=1)) for p in patterns)
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
        assert delta_of_gaussian(2.0, sigma) == pytest.approx(1e-5, rel=1e-3)


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


def test_amplified_search_finds_the_minimum_of_the_calibrated_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With σ(λ) made up: the search needs few calibrations, says each, and is right to 10 % on the scale 1/(1 − λ)."""
    calls: list[str] = []

    class MadeUp:
        def __init__(self, mechanism, participation) -> None:
            self.lam = mechanism.lam

        def rough_noise_multiplier(self, **_) -> float:
            return (1 / (1 - self.lam)) ** 0.7

    monkeypatch.setattr(search, "accountant", MadeUp)
    participation = Participation(rounds=400, min_separation=40, sampling="balls-in-bins")
    found = select_lambda(participation, objective="amplified-rmse", progress=calls.append, **BUDGET)
    scales = np.geomspace(1, 100, 5000)
    errors = [x**0.7 * math.sqrt(1 + 399 / (2 * x**2)) for x in scales]
    assert 1 / (1 - found.lam) == pytest.approx(scales[int(np.argmin(errors))], rel=0.1)
    assert found.value == pytest.approx(min(errors), rel=2e-3)
    assert len(calls) == len(found.lams) <= 14
    excess = select_lambda(participation, objective="excess", **BUDGET).lam
    assert excess / (1 - excess) == pytest.approx(found.lam / (1 - found.lam) / 3)
