"""Noised sums that were made and not released: what ε is if whoever saw one kept it.

The inner strategy sees a round's noised mean before the release is on record. If the server is killed then, the round is tried
again, with other noise for the vector Z of that round. A copy that was kept is then one more output of the run.

Let the copy be of round t. It is y = x' + ζσ·(C⁻¹Z)_t with a fresh Z_t and the Z_s of the earlier releases. Given those releases
it has the same information as Σ_{s<t} C[t, s]·x_s + C[t, t]·x' + ζσ·Z_t: one more row of CX, with noise of its own. So releases
and copies together are one Gaussian mechanism, whose matrix is lower-triangular in the order in which they were made (so that
updates may depend on what came before), and whose squared sensitivity is that of C and, for each copy, the square of the most
that one user moves row t of CX: Σ_j |C[t, p_j]| over rounds p_j ≤ t that are at least b apart, at most k of them. Also a user who
is not in that sum is in the row.
"""

import math
import sqlite3
from collections.abc import Sequence

import numpy as np

from fedcgd.accounting import gaussian
from fedcgd.mechanisms.mechanism import Mechanism, Toeplitz, Vector
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.participation import Participation
from fedcgd.plan import Plan

_BLOCK = 64  # columns of C that are made at once
_ROUNDING = 1e-9


def unreleased_sums(connection: sqlite3.Connection) -> tuple[int, ...]:
    """The round of every attempt whose sum got noise from the server and is no release: of those that failed after that."""
    rows = connection.execute(
        "SELECT round FROM attempts WHERE state = 'aggregated' OR (state = 'abandoned' AND nonce IS NOT NULL) ORDER BY id"
    )
    return tuple(round for (round,) in rows)


def epsilon_if_kept(plan: Plan, rounds: Sequence[int]) -> float:
    """ε at the plan's δ of the whole run and one noised sum more for each of `rounds`, whatever the plan's sampling hides.

    Adjacency: zero out one user. ∞ without noise. Secret rounds count as known.
    """
    if plan.noiseless:
        return math.inf
    reach = sensitivity(plan.mechanism, plan.participation).value
    squares = reach**2 + sum(row_reach(plan.mechanism, plan.participation, round) ** 2 for round in rounds)
    together = math.sqrt(squares) * (1 + _ROUNDING)
    return max(plan.guarantee().epsilon, gaussian.epsilon(sigma=plan.noise_multiplier / together, delta=plan.delta))


def row_reach(mechanism: Mechanism, participation: Participation, round: int) -> float:
    """max Σ_j |C[t, p_j]| over rounds p_j ≤ t = `round` that one user may take part in, or an upper bound of it.

    Exact where |C[t, s]| does not fall with s; else for the least such row above it.
    """
    k, b = participation.participations, participation.min_separation
    rising = np.maximum.accumulate(_row(mechanism, round, participation.rounds))
    return float(np.sum(rising[::-1][::b][:k]))


def _row(mechanism: Mechanism, round: int, rounds: int) -> Vector:
    """|C[t, 0 … t]|."""
    if isinstance(mechanism, Toeplitz):
        row = np.asarray(mechanism.coefficients(rounds), np.float64)[: round + 1][::-1]
    else:
        starts = range(0, round + 1, _BLOCK)
        blocks = (mechanism.columns(rounds, np.arange(i, min(i + _BLOCK, round + 1)))[round] for i in starts)
        row = np.concatenate(list(blocks))
    size: Vector = np.abs(row)
    return size
