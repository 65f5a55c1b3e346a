"""⟨C1_P, C1_P′⟩ for all pairs of tuples of users, from their rounds alone: no vector of n numbers is made.

⟨C[:, t], C[:, s]⟩ for s ≤ t is a geometric part, `tail_products`[t]·λ^(t−s)·d_s, and for t − s below the bands of C what `near`
has. So a tuple's rounds are gone through in their order: of each user's earlier ones the geometric part is one number. That is
the machine code of `overlaps.c`.
"""

from collections.abc import Callable
from ctypes import c_int32, c_int64
from functools import cache
from pathlib import Path

import numpy as np

from fedcgd.accounting.random_participation.columns import Columns
from fedcgd.accounting.random_participation.law import Turns
from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.native.library import array, function, library, needed

# (turns, users, near, tail, scales, powers) → what each of a user's rounds adds with each user's rounds before it; shape
# (tuples, users, users). `turns`: shape (tuples, most), each row ascending, t·users + user, from n·users on none.
Overlaps = Callable[[Turns, int, Matrix, Vector, Vector, Vector], Vector]


def overlaps(columns: Columns, turns: Turns) -> Vector:
    """⟨C1_P, C1_P′⟩ of all users of each tuple, and 0 of a user with itself; shape (tuples, users, users).

    `turns`: shape (most, users, tuples).
    """
    most, users, count = turns.shape
    ordered = turns * np.int32(users) + np.arange(users, dtype=np.int32)[:, None]
    ordered = np.sort(np.ascontiguousarray(ordered.reshape(most * users, count).T), axis=1)
    powers = columns.ratio ** np.arange(columns.rounds, dtype=float)
    given = columns.near, columns.tail_products, columns.scales, powers
    found = compiled()(ordered, users, *given)
    found += found.transpose(0, 2, 1)
    found[:, np.arange(users), np.arange(users)] = 0.0
    return found


@cache
def compiled() -> Overlaps:
    """Machine code. Raises RuntimeError where it was not built or does not work."""
    return needed(_load, _answer, _ANSWER)


def _load() -> Overlaps:
    doubles, size = array(np.float64), c_int64
    arguments = [array(np.int32), size, size, c_int32, size, doubles, size, *[doubles] * 5]
    code = function(library(Path(__file__).with_suffix(".c")), "overlaps", arguments)

    def found(turns: Turns, users: int, near: Matrix, tail: Vector, scales: Vector, powers: Vector) -> Vector:
        result = np.empty((len(turns), users, users))
        width, n = near.shape
        code(turns, *turns.shape, users, n, near, width, tail, scales, powers, np.empty(users), result)
        return result

    return found


_ANSWER = "d62d6c26111613167c28b833e541455a06ca565e61fa766329819b6e19f552b9"


def _answer(form: Overlaps) -> bytes:
    """What it makes of some numbers."""
    n, users, count, most = 29, 4, 5, 9
    turns = np.sort((np.arange(count * most).reshape(count, most) * 7919 % 131).astype(np.int32), axis=1)
    table = np.arange(9.0 * n).reshape(9, n) * 7919 % 1013 / 1013
    return form(turns, users, table[:6], *table[6:]).tobytes()
