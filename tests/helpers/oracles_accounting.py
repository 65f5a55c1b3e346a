"""Slow, obvious reference values for the accounting, sharing nothing with the library."""

import mpmath


def gaussian_log_delta(epsilon: float, sigma: float) -> float:
    """log δ of the Gaussian mechanism by its textbook formula, with 2000 bits."""
    with mpmath.workprec(2000):
        e, s = mpmath.mpf(epsilon), mpmath.mpf(sigma)
        phi = lambda x: mpmath.erfc(-x / mpmath.sqrt(2)) / 2  # noqa: E731
        return float(mpmath.log(phi(1 / (2 * s) - e * s) - mpmath.exp(e) * phi(-1 / (2 * s) - e * s)))
