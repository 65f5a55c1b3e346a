"""The drawing of `pairs`, by the machine code of `drawing.c`.

Each pair goes from one round in which one of the two takes part to the next. How many rounds from t on nobody does, at least one
of the two being free, is drawn by bisection: while nobody does, states follow from each other, so that the probability that it
lasts m rounds is a quotient of weights. All pairs go one such step, and then the next.
"""

import ctypes
import math
from collections.abc import Callable
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from fedcgd.accounting.b_min_sep.recursion import Indices
from fedcgd.accounting.random_participation.law import Turns
from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.native.library import array, function, library, needed


@dataclass(frozen=True, eq=False)
class Tables:
    """What the steps follow from. A state of a user is an age 1 … `limit`, for each level."""

    rounds: int
    separation: int
    limit: int
    rate: float
    ages: Indices
    """Of each state."""
    free_index: Indices
    """The place of each state in which a user may take part among those, −1 for others."""
    taken: Indices
    """The level after a round with this user, by its state before."""
    waiting: Vector
    """Weights, as in `pairs.PairChain`."""
    after: Vector
    both: Vector
    overlaps: Matrix
    """θ·K̃ that a round brings, by round and the other's state."""
    gained: Matrix
    """exp of that."""
    together: Vector
    """θ·K̃ of a round that both are in, beyond that, by round."""
    gained_together: Vector
    """exp of that."""

    @property
    def most(self) -> int:
        """Rounds that a user can have."""
        return -(-self.rounds // self.separation)

    @property
    def rests(self) -> Vector:
        """(1 − p)^k."""
        return np.asarray((1 - self.rate) ** np.arange(2 * self.rounds + 1, dtype=float))


def passed(states: Indices, rounds: Indices, ages: Indices, limit: int) -> Indices:
    """The states so many rounds later, without this user: older, until the last of their level."""
    return np.asarray(states + np.minimum(rounds, limit - ages[states]))


Draw = Callable[[np.random.Generator, Tables, Indices, Indices], tuple[Turns, Vector]]
"""From the states before round 0 of each pair's two users the rounds of each, shape (2, most, pairs), ascending and then n where
there is none; and θ·K̃ of each pair."""


@cache
def compiled() -> Draw:
    """Machine code. Raises RuntimeError where it was not built or does not work."""
    return needed(_load, _answer, _ANSWER)


_INDICES = ("ages", "free_index", "taken")
_WEIGHTS = ("waiting", "after", "both", "overlaps", "gained", "together", "gained_together", "rests")


class _Tables(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rounds", "separation", "limit", "states", "free", "levels")),
        ("rate", c_double),
        *((name, c_void_p) for name in _INDICES + _WEIGHTS),
    ]


def _load() -> Draw:
    indices, doubles, size = array(np.int64), array(np.float64), c_int64
    arguments = [c_void_p, c_void_p, ctypes.POINTER(_Tables), size, *[indices] * 3, size]
    code = function(
        library(Path(__file__).with_suffix(".c")), "draw", [*arguments, array(np.int32), indices, doubles, indices]
    )

    def draw(generator: np.random.Generator, tables: Tables, first: Indices, second: Indices) -> tuple[Turns, Vector]:
        count, most = len(first), tables.most
        turns, drawn = np.full((2, most, count), tables.rounds, dtype=np.int32), np.zeros(count)
        own = [np.ascontiguousarray(getattr(tables, name), dtype=np.int64) for name in _INDICES]
        own += [np.ascontiguousarray(getattr(tables, name), dtype=np.float64) for name in _WEIGHTS]
        _, states, free = tables.waiting.shape
        sizes = tables.rounds, tables.separation, tables.limit, states, free, tables.after.shape[1]
        given = _Tables(*sizes, tables.rate, *(each.ctypes.data for each in own))
        bits = generator.bit_generator.ctypes
        code(
            ctypes.cast(bits.next_double, c_void_p),
            bits.state,
            ctypes.byref(given),
            count,
            np.zeros(count, dtype=np.int64),
            first.astype(np.int64),
            second.astype(np.int64),
            most,
            turns,
            np.zeros((2, count), dtype=np.int64),
            drawn,
            np.empty(count, dtype=np.int64),
        )
        return turns, drawn

    return draw


_ANSWER = "454944269108b54c25ffe14e1a47edd0a0ecbfafb8b504eba0eaff35358bbdad"


def _answer(form: Draw) -> bytes:
    """The draws that it makes by some tables, of two ages that are not told apart by memory and two levels."""
    n, limit, b, levels = 31, 5, 4, 2
    ages = np.tile(np.arange(1, limit + 1), levels)
    free = np.flatnonzero(ages >= b)
    free_index = np.full(len(ages), -1)
    free_index[free] = np.arange(len(free))
    taken = np.arange(len(ages)) % 3 // 2

    def some(*shape: int) -> Vector:
        return np.asarray(1 + np.arange(math.prod(shape), dtype=float).reshape(shape) * 7919 % 1013 / 1013)

    waiting = some(n + 1, len(ages), len(free)) * 1.07 ** -np.arange(n + 1.0)[:, None, None]
    tables = Tables(
        n, b, limit, 0.25, ages, free_index, taken, waiting, some(n, levels, len(ages)), some(n, levels, levels),
        some(n, len(ages)), some(n, len(ages)) / 2, some(n), some(n) / 4,
    )  # fmt: skip
    count = 67
    states = np.arange(count) % len(ages)
    turns, drawn = form(np.random.Generator(np.random.SFC64(1)), tables, states, states[::-1] // 2)
    return turns.tobytes() + drawn.tobytes()
