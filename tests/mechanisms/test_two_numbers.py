"""γ-BIFR and λ-CGD twice: where C is not negative and not increasing, and figures by hand or of mechanisms that they contain."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcgd.accounting import calibrate, compute_epsilon
from fedcgd.curvature.stationary import stationary_error, stationary_sensitivity
from fedcgd.mechanisms import BIFR, BISR, DPSGD, BandInvMF, LambdaCGD, LambdaMuCGD, Normalized
from fedcgd.mechanisms.error import error_norms
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.participation import Participation
from fedcgd.quadratic import Quadratic, Spectrum

TABLE_4 = Participation(rounds=3900, min_separation=390)


def rmse(mechanism, participation):
    return error_norms(mechanism, participation.rounds).rmse(sensitivity(mechanism, participation).value)


@given(st.integers(1, 30), st.fractions(Fraction(1, 1000), 1), st.integers(1, 60))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_bifr_has_no_negative_and_no_increasing_coefficient(bands: int, gamma: Fraction, n: int) -> None:
    """What its docstring proves, in exact arithmetic; and the coefficients are those."""
    inverse = [Fraction(1)]
    for t in range(1, min(bands, n)):
        inverse.append(inverse[-1] * (t - 1 - gamma) / t)
    c = [Fraction(1)]
    for t in range(1, n):
        c.append(-sum(inverse[i] * c[t - i] for i in range(1, min(t, len(inverse) - 1) + 1)))
    assert all(a >= b >= 0 for a, b in pairwise(c))
    found = BIFR(bands, float(gamma)).coefficients(n)
    np.testing.assert_allclose(found, [float(x) for x in c], rtol=1e-11)
    assert found.min() >= 0


@given(st.floats(0, 0.999), st.floats(-1, 0.999), st.integers(2, 60))
@settings(derandomize=True, max_examples=300, deadline=None)
def test_lambda_mu_is_never_negative_and_rises_only_where_it_is_said_to(lam: float, mu: float, n: int) -> None:
    mu = max(mu, -lam)
    c = LambdaMuCGD(lam, mu).coefficients(n)
    assert c.min() >= 0
    if mu >= 0:
        monotone, falls = lam + mu <= 1, bool(c[1] <= 1)
        assert falls == monotone
        assert not monotone or np.all(np.diff(c) <= 1e-15)
        # Log-concave, up to rounding: what puts the worst columns leftmost where c rises.
        assert np.all(c[1:-1] ** 2 >= c[:-2] * c[2:] * (1 - 1e-12))
    elif mu**2 * (1 - mu) <= lam**2 * (1 - lam):
        assert np.all(np.diff(c) <= 1e-15)
    elif n > 2 and mu**2 * (1 - mu) > lam**2 * (1 - lam) + 1e-12:
        assert c[2] > c[1]


@pytest.mark.parametrize(("lam", "mu"), [(0.9, 0.7), (0.6, 0.6), (0.95, 0.06)])
def test_lambda_mu_that_rises_is_worst_leftmost(lam: float, mu: float) -> None:
    found = sensitivity(LambdaMuCGD(lam, mu), Participation(rounds=200, min_separation=20))
    assert found.exact
    assert found.pattern == tuple(range(0, 200, 20))


def test_gamma_of_a_half_is_bisr_bit_by_bit() -> None:
    for bands in (1, 2, 4, 16):
        np.testing.assert_array_equal(BIFR(bands, 0.5).coefficients(300), BISR(bands).coefficients(300))
        np.testing.assert_array_equal(BIFR(bands, 0.5).inverse_coefficients(300), BISR(bands).inverse_coefficients(300))


def test_printed_values_of_the_mechanisms_that_both_contain() -> None:
    """Table 4 of arXiv:2601.22334: BISR 4 and 16 (γ = 1/2); λ-CGD 0.95 (μ = 0, and two bands with γ = λ), at ε = 8, δ = 1e-5."""
    unit = calibrate(DPSGD(), Participation(rounds=1), epsilon=8, delta=1e-5).noise_multiplier
    for mechanism, printed in (
        (BIFR(4, 0.5), 33.47), (BIFR(16, 0.5), 17.95), (BIFR(2, 0.95), 14.74), (LambdaMuCGD(0.95, 0.0), 14.74)
    ):  # fmt: skip
        assert rmse(mechanism, TABLE_4) * unit == pytest.approx(
            printed, rel=1e-3
        )  # all are printed about 0.02 % larger


def test_lambda_twice_by_hand() -> None:
    """λ = μ: c_t = (t + 1)λ^t, whose norm is √((1 + λ²)/(1 − λ²)³), and A·C⁻¹ has rows 1, 1 − 2λ, (1 − λ)², (1 − λ)², …"""
    lam, n = 0.5, 60
    once = Participation(rounds=n, max_participations=1)
    mechanism = LambdaMuCGD(lam, lam)
    assert sensitivity(mechanism, once).value == pytest.approx(math.sqrt((1 + lam**2) / (1 - lam**2) ** 3))
    sums = [1.0, 1 - 2 * lam, *[(1 - lam) ** 2] * (n - 2)]
    squares = sum((n - t) * s**2 for t, s in enumerate(sums))
    assert error_norms(mechanism, n).frobenius == pytest.approx(math.sqrt(squares))


@pytest.mark.parametrize("sampling", ["balls-in-bins", "b-min-sep"])
@pytest.mark.parametrize(
    "mechanism",
    [BIFR(3, 0.6), BIFR(3, 1.0), LambdaMuCGD(0.6, 0.3), LambdaMuCGD(0.6, -0.6), Normalized(BIFR(2, 0.6))],
    ids=str,
)
def test_samplings_that_need_a_c_without_negative_entries_take_both(sampling: str, mechanism) -> None:
    """And a secret sampling never costs more than none."""
    known = Participation(rounds=12, min_separation=4)
    rate = {"sampling_rate": 0.3} if sampling == "b-min-sep" else {}
    secret = Participation(rounds=12, min_separation=4, sampling=sampling, **rate)
    found, without = (
        compute_epsilon(mechanism, who, noise_multiplier=6.0, delta=1e-3).epsilon for who in (secret, known)
    )
    assert 0 < found <= without
    with pytest.raises(ValueError, match="negative"):
        compute_epsilon(BandInvMF((1.0, 0.5)), secret, noise_multiplier=6.0, delta=1e-3)


def test_runs_without_end() -> None:
    """‖c‖ of γ-BIFR with two bands, and of λ-CGD twice, beside the first 10⁴ coefficients; their losses beside λ-CGD's."""
    quadratic = Quadratic(Spectrum.from_eigenvalues([1.0, 0.1]), 0.5)
    for mechanism in (BIFR(4, 0.6), LambdaMuCGD(0.8, 0.5), LambdaMuCGD(0.8, -0.5)):
        norm = np.linalg.norm(mechanism.coefficients(10_000))
        assert stationary_sensitivity(mechanism) == pytest.approx(norm, rel=1e-6)
    for same in (BIFR(2, 0.7), LambdaMuCGD(0.7, 0.0)):
        assert stationary_error(same, quadratic) == pytest.approx(stationary_error(LambdaCGD(0.7), quadratic))


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: BIFR(3, 0.0), r"gamma must be in \(0, 1\], got 0.0; 1/2 is BISR"),
        (lambda: BIFR(3, 1.01), r"gamma must be in \(0, 1\], got 1.01"),
        (lambda: BIFR(3, math.nan), "gamma must be in"),
        (lambda: BIFR(0, 0.5), "bandwidth must be at least 1, got 0"),
        (lambda: LambdaMuCGD(1.0, 0.0), r"lam must be in \[0, 1\), got 1.0"),
        (lambda: LambdaMuCGD(-0.1, 0.5), "lam must be in"),
        (lambda: LambdaMuCGD(0.2, -0.3), r"mu must be in \[-lam, 1\) = \[-0.2, 1\), got -0.3; 0 is λ-CGD"),
        (lambda: LambdaMuCGD(0.2, 1.0), r"mu must be in .* got 1.0"),
        (lambda: LambdaMuCGD(0.2, math.nan), "mu must be in"),
    ],
)
def test_numbers_out_of_range_are_refused(make_it, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_it()
