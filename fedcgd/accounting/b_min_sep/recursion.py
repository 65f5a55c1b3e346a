"""The recursions of `likelihood` through a few rounds, the last first: NumPy's, and the machine code of `recursion.c`.

F_t of many draws lies side by side, and F of b + 1 rounds in a ring: that of round t at t mod (b + 1).
"""

from collections.abc import Callable
from ctypes import c_double, c_int64
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcgd.machine_code import array, checked, function, library
from fedcgd.mechanisms.mechanism import Matrix, Vector

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Maps:
    """F_t at the points of a grid, from F_{t+1} and F_{t+b}: each value follows from two points that are neighbours."""

    stay_at: Indices
    """The first of the two, for each point."""
    stay: Matrix
    """(1 − p) times what the two are multiplied with, shape (2, points)."""
    kinds: Indices
    """The kind of each round."""
    take_at: Indices
    """The first of the two, for each kind of round and each point."""
    take: Vector
    """What they are multiplied with before the round's weight is, shape (kinds, 2, points)."""


class Recursion(NamedTuple):
    """Both work in place, and give the same bits."""

    bands: Callable[[Matrix, int, float, Matrix], None]
    """(weights, first, 1 − p, ring): rounds first, first + 1, …, with weights p·exp(x_t − e_t) of shape (rounds, draws)."""
    tail: Callable[[Matrix, int, Maps, Vector, Matrix], None]
    """(weights, first, maps, ring, firsts): the same with a ring of shape (b + 1, points, draws). F_t(0) of the first rounds
    is put into `firsts`.
    """


@cache
def recursion() -> Recursion:
    """The fastest."""
    return checked(_load, _answer, _ANSWER) or NUMPY


def _bands(weights: Matrix, first: int, rest: float, ring: Matrix) -> None:
    kept = len(ring)
    for i in range(len(weights) - 1, -1, -1):
        t = first + i
        taken = weights[i] * ring[(t - 1) % kept]  # t + b is as far as t − 1 in a ring of b + 1
        now = np.multiply(ring[(t + 1) % kept], rest)
        now += taken
        ring[t % kept] = now


def _tail(weights: Matrix, first: int, maps: Maps, ring: Vector, firsts: Matrix) -> None:
    kept = len(ring)
    for i in range(len(weights) - 1, -1, -1):
        t = first + i
        kind = maps.kinds[t]
        now = _combined(ring[(t + 1) % kept], maps.stay_at, maps.stay)
        taken = _combined(ring[(t - 1) % kept], maps.take_at[kind], maps.take[kind])
        taken *= weights[i]
        now += taken
        ring[t % kept] = now
        if t < len(firsts):
            firsts[t] = now[-1]


def _combined(values: Matrix, at: Indices, factors: Matrix) -> Matrix:
    found = factors[0][:, None] * values[at]
    found += factors[1][:, None] * values[at + 1]
    return np.asarray(found)


NUMPY = Recursion(_bands, _tail)


def _load() -> Recursion:
    code = library(Path(__file__).with_suffix(".c"))
    doubles, indices, size = array(np.float64), array(np.int64), c_int64
    bands = function(code, "bands", [doubles, size, size, size, size, c_double, doubles])
    tail = function(
        code,
        "tail",
        [doubles, *[size] * 5, indices, doubles, indices, indices, doubles, doubles, doubles, size],
    )

    def by_tail(weights: Matrix, first: int, maps: Maps, ring: Vector, firsts: Matrix) -> None:
        sizes = (*weights.shape, first, len(ring) - 1, ring.shape[1])
        tail(
            weights, *sizes, maps.stay_at, maps.stay, maps.kinds, maps.take_at, maps.take, ring, firsts, len(firsts)
        )  # fmt: skip

    return Recursion(
        lambda weights, first, rest, ring: bands(weights, *weights.shape, first, len(ring) - 1, rest, ring), by_tail
    )


_ANSWER = "09ecf326f8ef20663e5fc5e2fc460db7e174b240cce6ba796ecfae04441ae825"


def _answer(made: Recursion) -> bytes:
    """Seven rounds, three apart, for more draws than a tile has: by bands, and by a tail of three points."""
    rounds, draws, b, points = 7, 261, 3, 3

    def numbers(*shape: int) -> Vector:
        count = int(np.prod(shape))
        return np.asarray((np.arange(count) * 7919 % 10007 / 10007 + 0.1).reshape(shape))

    weights, ring, tails = numbers(rounds, draws), np.ones((b + 1, draws)), np.ones((b + 1, points, draws))
    firsts = np.ones((b, draws))
    kinds = np.arange(2 * rounds) % 2
    maps = Maps(np.array([0, 1, 1]), numbers(2, points), kinds, np.array([[0, 0, 1], [1, 0, 0]]), numbers(2, 2, points))
    for first in (rounds, 0):
        made.bands(weights, first, 0.9, ring)
        made.tail(weights, first, maps, tails, firsts)
    return ring.tobytes() + tails.tobytes() + firsts.tobytes()
