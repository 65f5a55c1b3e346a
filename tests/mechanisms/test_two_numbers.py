"""λ-CGD twice: where C is not negative and where it rises."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcgd.mechanisms import LambdaMuCGD


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
