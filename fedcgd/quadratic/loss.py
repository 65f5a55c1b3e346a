"""How much of the noise of every round is left in the loss, after any number of rounds of gradient descent on a quadratic.

In the direction of an eigenvalue μ, noise that enters with a step of length η shrinks by a = 1 − ημ in each later step.
So the noise in the model after t rounds is −η·Σ_{j<t} a^(t−1−j)·(C⁻¹Z)_j, and everything here is a weighted sum of squares of
that. Theorem 4.1 of Gu et al., "Correlating Cross-Iteration Noise for DP-SGD using Model Curvature", 2026, arXiv:2510.05416.
"""

import numpy as np

from fedcgd.mechanisms.adjoint import transposed_inverse
from fedcgd.mechanisms.mechanism import Mechanism
from fedcgd.mechanisms.streaming import inverse_rows
from fedcgd.mechanisms.toeplitz import Toeplitz
from fedcgd.quadratic.factor import thin_factor
from fedcgd.quadratic.problem import Quadratic


def final_loss(mechanism: Mechanism, rounds: int, quadratic: Quadratic, *, stddev: float = 1.0) -> float:
    """E[L(w̃_n)] − L(w_n) = η²s²/2·Tr((CᵀC)⁻¹·VᵀMV), V[i, j] = (1 − ημ_i)^(n−1−j): eq. 1 of Theorem 4.1, exact.

    The expected loss that the noise s·C⁻¹Z adds after n steps. As η²s²/2·‖C⁻ᵀL‖² with the thin factor L of VᵀMV: C is used for
    some dozens of columns, whatever the dimension, and the result has about 12 digits.

    Args:
        mechanism: the matrix C.
        rounds: n, the steps.
        quadratic: what is descended on, and how.
        stddev: s, in units of the gradient that is stepped along: ζσ divided by the planned cohort.
    """
    kept = transposed_inverse(mechanism, rounds, thin_factor(quadratic, rounds))
    return quadratic.learning_rate**2 * stddev**2 / 2 * float(np.vdot(kept, kept))


def gradient_norm(mechanism: Mechanism, rounds: int, quadratic: Quadratic, *, stddev: float = 1.0) -> float:
    """1/n·Σ_{t=1}^n (E‖∇L(w̃_t)‖² − ‖∇L(w_t)‖²): the part of the noise in the usual criterion of convergence.

    It is η²s²·Tr((CᵀC)⁻¹W) with W[j, k] = 1/n·Σ_i μ_i²·a_i^|j−k|·(1 + a_i² + … + a_i^(2(n−1−max(j, k)))), the mean over t of what
    eq. 1 of Theorem 4.1 says with M² for M and t for n. Eq. 2 of that theorem as printed, ((n − max(j, k))/n)·(VᵀM²V)[j, k] with
    V of the last round for every t, is another number: what counts after t rounds is how far t is from j, not how far n is.

    Args:
        mechanism: as in `final_loss`.
        rounds: as in `final_loss`.
        quadratic: as in `final_loss`.
        stddev: as in `final_loss`.
    """
    total = 0.0
    for a, values, counts in quadratic.contractions_in_parts(rounds):
        weights = counts * values**2
        if isinstance(mechanism, Toeplitz):
            # Noise of s rounds before the last counts the same whichever round is the last.
            powers = a[None, :] ** np.arange(rounds)[::-1, None]
            kept = transposed_inverse(mechanism, rounds, powers)[::-1]
            total += float(np.cumsum(kept**2 @ weights).sum())
            continue
        position = np.zeros((len(a), rounds))
        for t, (first, row) in enumerate(inverse_rows(mechanism, rounds)):
            position *= a[:, None]
            position[:, first : t + 1] += row
            total += float(weights @ np.einsum("ij,ij->i", position[:, : t + 1], position[:, : t + 1]))
    return quadratic.learning_rate**2 * stddev**2 * total / rounds
