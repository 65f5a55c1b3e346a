"""How much one user can move the later rows of CX: for a run of which the first rows are counted elsewhere."""

import math

import numpy as np

from fedcgd.mechanisms.mechanism import DENSE_LIMIT, Mechanism
from fedcgd.mechanisms.sensitivity import Sensitivity, sensitivity
from fedcgd.mechanisms.worst_patterns import gram_bound
from fedcgd.participation import Participation


def tail_sensitivity(
    mechanism: Mechanism, participation: Participation, *, shared: int, released: int | None = None
) -> Sensitivity:
    """An upper bound on ‖(CX)_t for `shared` ≤ t < `released`‖_F over all users: never below the truth.

    The rounds of a user, also those before `shared`, are chosen by the adversary. Two runs that are one until round `shared` and
    two from there release CX once, and these rows of the second one's CX under noise of their own.

    Args:
        mechanism: C.
        participation: (n, k, b); a sampling is not used.
        shared: how many rows are counted elsewhere, in 0 … released.
        released: how many rows are published (None: all n).

    Returns:
        The bound, by the entries of the later rows' Gram matrix that patterns allow, or that of the whole matrix where this is
        smaller or n is above `DENSE_LIMIT`; exact if a pattern attains it.

    Raises:
        ValueError: for a `shared` out of range, and where `sensitivity` has no answer.
    """
    rows = participation.rounds_released(released)
    if not 0 <= shared <= rows:
        raise ValueError(f"shared must be in 0 … {rows}, the rounds released, got {shared}")
    if shared == rows:
        return Sensitivity(0.0, True, "nothing more is released", ())
    whole = sensitivity(mechanism, participation, released=rows)
    if shared == 0:
        return whole
    bound = Sensitivity(whole.value, False, f"at most that of all rows: {whole.method}", whole.pattern)
    if rows > DENSE_LIMIT:
        return bound
    n, b = participation.rounds, participation.min_separation
    k = participation.scheme.most_of(participation, rows)
    tail = mechanism.columns(n, np.arange(rows))[shared:rows]
    gram = np.abs(tail.T @ tail)
    total, pattern = (float(gram.sum()), tuple(range(rows))) if b == 1 and k == rows else gram_bound(gram, k, b)
    found = math.sqrt(total)
    if found >= whole.value:
        return bound
    attained = float(np.linalg.norm(tail[:, list(pattern)].sum(axis=1)))
    exact = found <= attained * (1 + 1e-9)
    method = "the largest |Gram| entries of the later rows that patterns allow"
    return Sensitivity(found, exact, f"bound by {method}{', attained' if exact else ''}", pattern)
