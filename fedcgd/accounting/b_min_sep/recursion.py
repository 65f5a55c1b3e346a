"""The recursions of `likelihood` through the rounds: machine code of `recursion.c`, which holds no lock of the interpreter."""

from collections.abc import Callable
from ctypes import c_double, c_int64
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcgd.mechanisms.mechanism import Matrix
from fedcgd.native.library import array, function, library, needed

_LANES = 32  # as in recursion.c

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Step:
    """Linear maps from values at the points to values at the points, each of two neighbours: `weights`[…, i, k] times what is at
    point `above`[…, i] + k.
    """

    above: Indices
    weights: Matrix


class Recursions(NamedTuple):
    """Both. `weights`[t] = p·exp(x_t − e_t), shape (n, draws); the result is F of the first `kept` rounds."""

    without_tail: Callable[[Matrix, int, float, int], Matrix]
    """(weights, b, 1 − p, kept): F_t = (1 − p)·F_{t+1} + weights_t·F_{t+b}; shape (kept, draws)."""
    with_tail: Callable[[Matrix, int, Step, Step, Indices, int], Matrix]
    """(weights, b, stay, take, kinds, kept): F_t = stay·F_{t+1} + weights_t·(take[kinds[t]]·F_{t+b}), at the last point."""


@cache
def compiled() -> Recursions:
    """Machine code. Raises RuntimeError where it was not built or does not work."""
    return needed(_load, _answer, _ANSWER)


def _load() -> Recursions:
    code = library(Path(__file__).with_suffix(".c"))
    size, doubles, indices = c_int64, array(np.float64), array(np.int64)
    plain = function(code, "without_tail", [doubles, size, size, size, c_double, doubles, size, doubles])
    tail = [doubles, size, size, size, size, indices, doubles, indices, doubles, indices, doubles, size, doubles]
    of_tail = function(code, "with_tail", tail)

    def without_tail(weights: Matrix, b: int, rest: float, kept: int) -> Matrix:
        firsts = np.empty((kept, weights.shape[1]))
        plain(weights, *weights.shape, b, rest, np.empty((b + 1, _LANES)), kept, firsts)
        return firsts

    def with_tail(weights: Matrix, b: int, stay: Step, take: Step, kinds: Indices, kept: int) -> Matrix:
        points, firsts = len(stay.above), np.empty((kept, weights.shape[1]))
        maps: list[Any] = [stay.above, stay.weights, take.above, take.weights, kinds]
        of_tail(weights, *weights.shape, b, points, *maps, np.empty((b + 1, points, _LANES)), kept, firsts)
        return firsts

    return Recursions(without_tail, with_tail)


_ANSWER = "9168aa031b3a4361a791eb369d394a10408dd2f0c4c41cc9beb382e451ab2d3d"


def _answer(form: Recursions) -> bytes:
    """What each makes of some numbers."""
    n, draws, b = 23, 2 * _LANES + 3, 5
    weights = np.arange(n * draws, dtype=float).reshape(n, draws) * 7919 % 1013 / 1013
    found = form.without_tail(weights, b, 0.9, b).tobytes() + form.without_tail(weights[:3], b, 0.9, 3).tobytes()
    above = np.array([0, 1, 1], dtype=np.int64)
    pairs = np.array([[0.3, 0.6], [0.1, 0.8], [0.2, 0.7]])
    take = Step(np.stack([above[::-1], above]), np.stack([pairs[::-1] * 0.7, pairs]))
    kinds = (np.arange(n) % 3 // 2).astype(np.int64)
    return found + form.with_tail(weights, b, Step(above, pairs), take, kinds, b).tobytes()
