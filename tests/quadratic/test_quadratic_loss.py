"""The loss that noise adds on a quadratic, against dense matrices and descent on unit vectors."""

import mechanism_table
import numpy as np
import oracles_curvature as oracle
import pytest

from fedcgd.mechanisms import BISR, BSR, Dense, LambdaCGD, Normalized, matrix
from fedcgd.quadratic import Quadratic, Spectrum
from fedcgd.quadratic.loss import final_loss, gradient_norm

N = 45
EIGENVALUES = [1.9, 1.0, 1.0, 0.3, 0.05, 0.0]
RATE = 0.8


def random_band(n: int, p: int) -> Dense:
    band = np.random.default_rng(5).uniform(-0.4, 0.5, size=(n, p))
    band[:, 0] = np.random.default_rng(6).uniform(0.6, 1.4, size=n)
    band[np.add.outer(np.arange(n), np.arange(p)) >= n] = 0
    return Dense("band-mf", band)


MECHANISMS = [
    *mechanism_table.ONE_OF_EACH.values(),
    BISR(40),
    BSR(40),
    random_band(N, 4),
    random_band(N, N),
    *mechanism_table.NORMALIZED.values(),
    Normalized(BSR(40)),
]


def name(mechanism) -> str:
    return f"{type(mechanism).__name__}-{mechanism.name}"


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=name)
def test_losses_are_those_of_descent_on_unit_vectors(mechanism) -> None:
    quadratic = Quadratic(Spectrum.from_eigenvalues(EIGENVALUES), RATE)
    c = matrix(mechanism, N)
    last = final_loss(mechanism, N, quadratic, stddev=1.5)
    assert last == pytest.approx(1.5**2 * oracle.loss(c, EIGENVALUES, RATE), rel=1e-10)
    assert gradient_norm(mechanism, N, quadratic, stddev=1.5) == pytest.approx(
        1.5**2 * oracle.mean_gradient_norm(c, EIGENVALUES, RATE), rel=1e-10
    )


def test_counts_are_directions() -> None:
    mechanism = BISR(3)
    together = Quadratic(Spectrum((1.0, 0.2), (2.0, 5.0)), 0.5)
    apart = [Quadratic(Spectrum.from_eigenvalues([mu]), 0.5) for mu in [1.0] * 2 + [0.2] * 5]
    assert final_loss(mechanism, N, together) == pytest.approx(sum(final_loss(mechanism, N, one) for one in apart))
    assert gradient_norm(mechanism, N, together) == pytest.approx(
        sum(gradient_norm(mechanism, N, one) for one in apart)
    )


def test_many_eigenvalues_are_taken_a_few_at_a_time() -> None:
    values = np.geomspace(1e-5, 1, 3000)
    quadratic = Quadratic(Spectrum.from_eigenvalues(values), 1.0)
    n = 700  # 3000 · 700 entries are more than one chunk
    a = 1 - values
    inverse = np.eye(n) - 0.5 * np.eye(n, k=-1)
    left = (a[:, None] ** np.arange(n - 1, -1, -1)) @ inverse
    expected = 0.5 * float(values @ (left**2).sum(axis=1))
    assert final_loss(LambdaCGD(0.5), n, quadratic) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0, 1.5, float("nan"), float("inf")])
def test_a_learning_rate_that_diverges_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="below 2/μ"):
        Quadratic(Spectrum.from_eigenvalues([2.0, 0.1]), rate)
