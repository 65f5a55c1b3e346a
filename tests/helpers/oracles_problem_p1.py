"""Problem P1 as it is stated: the banded X = CᵀC of least loss, and the C that belongs to it.

Gu et al., "Correlating Cross-Iteration Noise for DP-SGD using Model Curvature", 2026, arXiv:2510.05416. It is convex, so that its
optimum is the optimum; `noise_curve` finds the same in fewer steps and is held to it by a test.
"""

import numpy as np
from scipy.linalg import LinAlgError, cho_solve_banded, cholesky_banded

from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.optimisation import Progress
from fedcgd.optimisation.banded import unit_columns
from fedcgd.optimisation.lbfgs import minimise
from fedcgd.optimisation.noise_curve import BARRIER

_FAR = 1e3  # above any log of an error


def problem_p1(bandwidth: int, form: Matrix, *, barrier: float = BARRIER, progress: Progress | None = None) -> Matrix:
    """The X that minimises Tr(L·Lᵀ·X⁻¹) and the barrier, positive definite with p bands and X[j, j] = 1.

    The diagonal is no free number, which is the projection onto the unit diagonal; a step beyond positive definite matrices
    counts as far away, and the line search comes back. O(n²·p) a step, for small n.

    Args:
        bandwidth: p.
        form: L, shape (n, r).
        barrier: the weight of −log det(X)/n beside the loss.
        progress: is called with how far the search is: iterations, and the objective.

    Returns:
        The band of X: X[j, j + l] at [j, l], shape (n, p).
    """
    n, p = len(form), bandwidth
    inside = np.add.outer(np.arange(n), np.arange(1, p)) < n

    def band(free: Matrix) -> Matrix:
        result = np.zeros((n, p))
        result[:, 0] = 1
        result[:, 1:][inside] = free
        return result

    def objective(free: Vector) -> tuple[float, Vector]:
        """Its derivative by X is −Y·Yᵀ/unit − barrier·X⁻¹/n, Y = X⁻¹L, in the band."""
        gram = band(free)
        try:
            total, y, factor = _trace(gram, form)
        except LinAlgError:
            return _FAR + float(free @ free), 2 * free
        inverse = cho_solve_banded((factor, True), np.eye(n), check_finite=False)
        gradient = np.zeros((n, p - 1))
        for lag in range(1, p):
            # An entry beside the diagonal is in X twice.
            both = np.einsum("ij,ij->i", y[: n - lag], y[lag:]) / unit + barrier / n * np.diagonal(inverse, lag)
            gradient[: n - lag, lag - 1] = -2 * both
        return total / unit - barrier * 2 * float(np.log(factor[0]).mean()), gradient[inside]

    bsr, start = unit_columns("noise-curve", n, p)
    first = _gram(bsr(start)[0])[:, 1:][inside]
    unit = _trace(band(first), form)[0]
    x, _ = minimise(objective, first, tolerance=1e-12, history=60, progress=progress)
    return band(x)


def _gram(columns: Matrix) -> Matrix:
    """The band of CᵀC from that of C."""
    n, p = columns.shape
    result = np.zeros((n, p))
    for lag in range(p):
        # Columns j and j + lag share the rows j + lag … j + p − 1.
        result[: n - lag, lag] = np.einsum("ij,ij->i", columns[: n - lag, lag:], columns[lag:, : p - lag])
    return result


def _trace(gram: Matrix, form: Matrix) -> tuple[float, Matrix, Matrix]:
    """Tr(L·Lᵀ·X⁻¹), X⁻¹L and the Cholesky factor of X. Raises LinAlgError if X is not positive definite."""
    factor = cholesky_banded(gram.T, lower=True, check_finite=False)
    y = cho_solve_banded((factor, True), form, check_finite=False)
    return float(np.vdot(form, y)), y, factor


def causal_factor(gram: Matrix) -> Matrix:
    """The band of the lower-triangular C with CᵀC = X.

    Cholesky's lower factor G has G·Gᵀ = X instead: taken for C, it has no unit columns, and its transpose is not causal. C is the
    factor of X read backwards, from the last round to the first, transposed and read backwards again.

    Args:
        gram: the band of X: X[j, j + l] at [j, l], shape (n, p).

    Returns:
        Shape (n, p), as `Dense` wants it.

    Raises:
        LinAlgError: if X is not positive definite.
    """
    n, p = gram.shape
    backwards = np.zeros((p, n))  # X[n − 1 − i, n − 1 − i − l], the lower band of X backwards
    for lag in range(p):
        backwards[lag, : n - lag] = gram[: n - lag, lag][::-1]
    factor = cholesky_banded(
        backwards, lower=True
    )  # factor[l, i] = F[i + l, i]; C[j + l, j] = F[n − 1 − j, n − 1 − j − l]
    result = np.zeros((n, p))
    for lag in range(p):
        result[: n - lag, lag] = factor[lag, : n - lag][::-1]
    return result
