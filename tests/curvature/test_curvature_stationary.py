"""The stationary loss: closed forms of one dimension, and sums over a circle."""

import math

import oracles_curvature as oracle
import pytest
from mechanism_table import ONE_OF_EACH
from scipy.special import ellipk

from fedcgd.curvature.stationary import optimal_error, stationary_error, stationary_loss, stationary_sensitivity
from fedcgd.mechanisms import DPSGD, BinaryTree, LambdaCGD, Normalized, SquareRootToeplitz
from fedcgd.mechanisms.toeplitz import Toeplitz
from fedcgd.quadratic import Quadratic, Spectrum

WIDE = [1.0, 0.4, 0.1, 0.1, 0.02]
RATE = 0.5
SERIES = [m for name, m in ONE_OF_EACH.items() if isinstance(m, Toeplitz) and name != "toeplitz"]


def mean_estimation(rate: float) -> Quadratic:
    """One dimension, H = 1; its error is E[δ²], twice the loss."""
    return Quadratic(Spectrum.from_eigenvalues([1.0]), rate)


@pytest.mark.parametrize("eta", [1e-6, 1e-3, 0.5, 1.0, 1.7])
def test_one_dimension_at_any_learning_rate(eta: float) -> None:
    one, a = mean_estimation(eta), 1 - eta
    gap = eta * (2 - eta)  # 1 − a²
    assert 2 * stationary_error(DPSGD(), one) == pytest.approx(eta**2 / gap, rel=1e-9)
    assert 2 * optimal_error(one) == pytest.approx(eta**2 * (2 / math.pi * ellipk(a**2)) ** 2, rel=1e-7)
    lam = max(0.0, (1 - math.sqrt(gap)) / a) if a else 0.0  # the best λ
    expected = eta**2 / (math.sqrt(gap) if a > 0 else gap)
    assert 2 * stationary_error(LambdaCGD(lam), one) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("mechanism", SERIES, ids=str)
def test_the_integrals_are_sums_over_a_circle(mechanism) -> None:
    quadratic = Quadratic(Spectrum.from_eigenvalues(WIDE), RATE)
    loss, square = oracle.stationary(mechanism.inverse_coefficients(400), WIDE, RATE, points=4000)
    # 400 coefficients of the inverse leave out less than 1e-4 of it.
    assert stationary_loss(mechanism, quadratic) == pytest.approx(loss, rel=1e-4)
    assert stationary_sensitivity(mechanism) ** 2 == pytest.approx(square, rel=1e-4)
    assert stationary_error(mechanism, quadratic) == pytest.approx(loss * square, rel=2e-4)


@pytest.mark.parametrize("mechanism", [BinaryTree(), Normalized(LambdaCGD(0.5))])
def test_what_is_made_for_some_rounds_has_no_stationary_loss(mechanism) -> None:
    with pytest.raises(ValueError, match="no stationary"):
        stationary_loss(mechanism, mean_estimation(0.1))


def test_what_cannot_be_answered_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing is"):
        optimal_error(Quadratic(Spectrum.from_eigenvalues([0.0]), 0.1))
    assert stationary_sensitivity(SquareRootToeplitz()) == math.inf
