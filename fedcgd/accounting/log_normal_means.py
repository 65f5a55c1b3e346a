"""The mean S of independent log-normal variables V_j = exp(μ_j·Z_j − μ_j²/2), replaced by a discrete variable that is larger in
the convex order.

S is the likelihood ratio of a user who is in one of b rounds, and nobody knows which: δ = E(S − e^ε)₊ for removing the user and
E(1 − e^ε·S)₊ for adding one, both means of convex functions of S. They do not fall when a value x of S, or of a part of it, is
replaced by two, on its two sides, of which the mean is x. So V is put on a grid, sums of two are put on a grid again, and 2, 4,
8, … are added up. The grid may be coarse where little depends on it. Below its least point is 0, and above its largest one
infinity: a vanishing probability of a huge value, of which only the mean counts.

Grids are equidistant near the mean, as far as the standard deviation, and then become geometric.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from fedcgd.accounting.losses import GridLoss
from fedcgd.accounting.tolerances import TOLERANCES
from fedcgd.mechanisms.mechanism import Vector

_COMBINATIONS = 64  # more than there are sums of two
_QUADRATURE = np.polynomial.legendre.leggauss(8)  # of one step of the grid, all terms positive
_ROUNDING = 1e-12  # a probability is off by less, relatively


@dataclass(frozen=True, eq=False)
class Ratio:
    """A variable that is `values`[i], ascending from 0 on, with probability `chances`[i]; `infinite` is the part of its mean that
    is at infinity.
    """

    values: Vector
    chances: Vector
    infinite: float

    def losses(self, step: float) -> tuple[GridLoss, GridLoss]:
        """The privacy losses of removing and of adding a user, log S and −log S, on a grid of this step."""
        first, last = (math.floor(math.log(self.values[1]) / step), math.ceil(math.log(self.values[-1]) / step) + 1)
        grid = np.exp(step * np.arange(first, last + 1))
        chances = _spread(self.values, self.chances, np.concatenate([[0.0], grid]))
        removing = GridLoss(chances[1:] * grid, first, step, self.infinite)
        return removing, GridLoss(chances[:0:-1].copy(), -last, step, float(chances[0]))


def log_normal_mean(kinds: Sequence[tuple[float, int]], least: float) -> Ratio:
    """The mean of all V_j.

    Args:
        kinds: (μ, how many V_j have it); not all μ are 0.
        least: the probability that losses beyond all grids may have.
    """
    total = sum(count for _, count in kinds)
    least = max(least, 1e-300)
    whole, variance = None, 0.0
    for mu, count in sorted(kinds, reverse=True):
        if mu:
            part = _times(_log_normal(mu, least / total), math.expm1(mu * mu), count, least / _COMBINATIONS)
        else:
            part = Ratio(np.array([0.0, count]), np.array([0.0, 1.0]), 0.0)
        variance += count * math.expm1(mu * mu)
        whole = part if whole is None else _sum(whole, part, variance, least / _COMBINATIONS)
    assert whole is not None  # noqa: S101
    return Ratio(whole.values / total, whole.chances, whole.infinite / total)


def _log_normal(mu: float, least: float) -> Ratio:
    reach = -float(ndtri(least))
    widest = mu * reach + mu * mu / 2
    grid = _nodes(math.exp(-widest), math.exp(widest), 1.0, min(math.sqrt(math.expm1(mu * mu)), 1.0))
    z = np.log(grid) / mu + mu / 2  # V = exp(μ·Z − μ²/2) is at a point of the grid where Z is at z
    at = z[:-1, None] + np.diff(z)[:, None] * (1 + _QUADRATURE[0]) / 2
    weights = np.exp(-(at**2) / 2) * _QUADRATURE[1] * np.diff(z)[:, None] / math.sqrt(8 * math.pi)
    up = np.expm1(mu * (at - z[:-1, None])) / np.expm1(mu * np.diff(z))[:, None]
    chances = np.zeros(len(grid))
    chances[1:] += (weights * up).sum(axis=1)
    chances[:-1] += (weights * (1 - up)).sum(axis=1)
    chances[0] += ndtr(z[0] - mu) / grid[0]  # what lies below is put there and on 0
    chances[-1] += ndtr(-z[-1])  # and what lies above, there and at infinity
    zero = max(float(ndtr(z[0]) - ndtr(z[0] - mu) / grid[0]), 0.0)
    infinite = max(float(ndtr(mu - z[-1]) - ndtr(-z[-1]) * grid[-1]), 0.0)
    return Ratio(np.concatenate([[0.0], grid]), np.concatenate([[zero], chances]) * (1 + _ROUNDING), infinite)


def _times(one: Ratio, variance: float, count: int, least: float) -> Ratio:
    """The sum of `count` independent copies of `one`, which has mean 1; by doubling."""
    power, done, found = one, 0, None
    for bit in range(count.bit_length()):
        if bit:
            power = _sum(power, power, 2**bit * variance, least)
        if count >> bit & 1:
            done += 2**bit
            found = power if found is None else _sum(found, power, done * variance, least)
    assert found is not None  # noqa: S101
    return found


def _sum(one: Ratio, two: Ratio, variance: float, least: float) -> Ratio:
    """The sum of two independent variables, on a grid; `least` for each unit of its mean may be lost at either end."""
    mean = float(one.values @ one.chances + two.values @ two.chances)
    grid = _nodes(
        one.values[1] + two.values[1], one.values[-1] + two.values[-1], mean, min(math.sqrt(variance) / mean, 1.0)
    )
    grid = np.concatenate([[0.0], grid])
    chances = np.zeros(len(grid))
    rows = max(1, TOLERANCES.memory.sums // len(two.values))
    for start in range(0, len(one.values), rows):
        part = slice(start, start + rows)
        values = np.add.outer(one.values[part], two.values).ravel()
        chances += _spread(values, np.multiply.outer(one.chances[part], two.chances).ravel(), grid)
    return _trimmed(Ratio(grid, chances, one.infinite + two.infinite), least * mean)


def _spread(values: Vector, chances: Vector, grid: Vector) -> Vector:
    """The chances of the points of a grid that reaches beyond all values, each of which is put on its two neighbours, so that
    its mean stays.
    """
    at = np.minimum(np.searchsorted(grid, values, side="right") - 1, len(grid) - 2)
    up = chances * np.minimum((values - grid[at]) / np.diff(grid)[at], 1.0)
    found: Vector = np.bincount(at, chances - up, len(grid)).astype(float)
    found[1:] += np.bincount(at, up, len(grid) - 1)
    return found


def _trimmed(ratio: Ratio, least: float) -> Ratio:
    """Without the ends of the grid that matter to no more than `least`: the mean of what is above, the chance of what is below.

    The one goes to the largest point that stays, and to infinity; the other to 0 and to infinity.
    """
    means = ratio.values * ratio.chances
    first = 1 + int(np.searchsorted(np.cumsum((ratio.chances + means)[1:]), least))
    last = len(means) - 1 - int(np.searchsorted(np.cumsum(means[::-1]), least))
    if first >= last:
        return ratio
    chances = np.concatenate([[ratio.chances[:first].sum()], ratio.chances[first : last + 1]])
    chances[-1] += ratio.chances[last + 1 :].sum()
    lost = means[1:first].sum() + (means[last + 1 :] - ratio.values[last] * ratio.chances[last + 1 :]).sum()
    return Ratio(np.concatenate([[0.0], ratio.values[first : last + 1]]), chances, ratio.infinite + float(lost))


def _nodes(low: float, high: float, mean: float, deviation: float) -> Vector:
    """Points from at most `low` to at least `high`; `deviation` is a part of the mean."""

    def side(length: float) -> Vector:
        points = [0.0]
        while points[-1] < length:
            points.append(
                points[-1] + min(TOLERANCES.ratios.widest, TOLERANCES.ratios.fine * max(deviation, points[-1]))
            )
        return np.array(points)

    down, up = side(math.log(mean / low)), side(math.log(high / mean))
    return np.asarray(mean * np.exp(np.concatenate([-down[:0:-1], up])))
