"""γ-BIFR and λ-CGD twice: where C is not negative and not increasing, and figures by hand or of mechanisms that they contain."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcgd.mechanisms import BIFR, LambdaMuCGD
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.participation import Participation


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
