"""δ of removing a user, E_Q[(S − a)₊] with a = e^ε, by draws in which every value is bounded.

With density ∝ q·S^r a draw's value is (S − a)₊/S^r, at most a^(1−r)·(r − 1)^(r−1)/r^r: rare events cannot hide. For an even r,
q·S^r is a mixture of normal distributions with means Σ_a C1_{P_a}, whose rounds are drawn exactly, by rejection (`tuples`). So

    δ_remove = a^(1−r)·(r − 1)^(r−1)/r^r · N_r · E[probability to be accepted] · E[g(S/a) | accepted],   0 ≤ g ≤ 1,

where N_r ≥ E[S^r] is known. What a draw does along the mean of its normal distribution is integrated by the trapezoid rule with
a random start, whose mean is right; |t| > 6 is added as a bound. r is chosen for speed, by few draws of its own: it decides how
near a bound is, never whether it holds.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedcgd.accounting.random_participation.draws import Seed, run_in_blocks
from fedcgd.accounting.random_participation.law import LARGEST, Columns, Law, Likelihood, Tuples
from fedcgd.accounting.tolerances import TOLERANCES
from fedcgd.mechanisms.mechanism import Matrix, Vector

_ROUNDING_OF_SHARES = 1e-6  # and the probability to be accepted, relatively
_REACH, _STEP = 6.0, 1.0  # of the integral
_LEFT_OUT = 5e-9  # at least P(|t| > 6), t standard normal, and what tables of 53 bits may miss
_NOT_CAPPED = 1e-24  # times the largest that a weight can be: weights below are those of exponents below 700
_CAPPED = 1 - 1e-9  # times the same: weights above may be those of any larger exponent
_BEYOND = math.log(LARGEST) - 1e-9  # log S from here on may be anything larger


@dataclass(frozen=True, eq=False)
class RemoveSampler:
    """Draws for one (σ, ε)."""

    columns: Columns
    likelihood: Likelihood
    tuples: Tuples
    sigma: float
    epsilon: float
    accepted: float
    """About the part of tuples that are."""

    @staticmethod
    def from_law(
        columns: Columns,
        law: Law,
        likelihood: Likelihood,
        sigma: float,
        epsilon: float,
        near: int = 2,
        keep: bool = False,
    ) -> "RemoveSampler | None":
        """With the r that needs the fewest draws, about, sought from `near`; None if the noise is so small that all overflow.

        `keep`: with `near` itself, if that can be had.
        """
        tried: dict[int, tuple[float, float]] = {}
        found: dict[int, Tuples] = {}  # of the best alone: tables are large
        orders = law.orders
        at, again = orders.index(near), near != orders[0]
        while True:
            around = [at] if keep else [i for i in (at, at - 1, at + 1) if 0 <= i < len(orders)]
            for i in around:
                if i not in tried:
                    cost, tuples, accepted = _tried(columns, law, sigma, epsilon, orders[i])
                    if all(cost < other for other, _ in tried.values()):
                        found = {i: tuples}
                    tried[i] = cost, accepted
            best = min(around, key=lambda i: tried[i][0])
            if not math.isfinite(tried[best][0]) and at > 0:
                best = at - 1
            if best == at and again and tried[at][0] > 0:
                # The best of those near bounds δ by more than 1, which is of no use: once more from r = 2.
                best, again = 0, False
            elif best == at:
                break
            at, keep = best, False
        cost, accepted = tried[at]
        if not math.isfinite(cost):
            return None
        tuples = found[at] if at in found else law.tuples(columns, sigma, orders[at])
        return RemoveSampler(columns, likelihood, tuples, sigma, epsilon, accepted)

    @property
    def cost(self) -> float:
        """About the time of a draw, in units of one whose tuple took none."""
        return _cost(self.tuples, self.accepted)

    @property
    def log_scale(self) -> float:
        """log of what the product of the means of values and shares is multiplied with."""
        r = self.tuples.order
        return self.tuples.log_total + (1 - r) * self.epsilon + _largest_of_power(r)

    def mean(self, values: Vector, shares: Vector) -> float:
        """About δ, by draws."""
        return min(1.0, math.exp(min(self.log_scale, 700.0)) * float(values.mean()) * float(shares.mean()))

    def draw(self, count: int, seed: Seed, most: float = math.inf) -> tuple[Vector, Vector]:
        """About `count` values and more shares, all in [0, 1]; their means times exp(`log_scale`) multiply to
        δ, or a little more. A quarter of them if their means show a δ above `most`.
        """
        columns, sigma, n = self.columns, self.sigma, self.columns.rounds
        likely = max(self.accepted, TOLERANCES.drawing.order[1] / 4)

        def block(generator: np.random.Generator, size: int) -> tuple[Vector, Vector]:
            turns, shares = self.tuples.draw(generator, math.ceil(size / likely))
            turns = turns[..., generator.random(len(shares)) < shares]
            x = columns.noise(generator, turns.shape[-1])
            slope, along, square = columns.lifted(turns, x)
            length = np.sqrt(square)
            length[length == 0] = 1.0  # nobody took part: nothing to integrate along
            slope /= length * sigma
            x /= sigma
            highest = _REACH - _STEP * generator.random(len(length))
            x += slope * (length / sigma - along / length + highest)
            return self._integrals(x, slope, highest), shares

        def together(blocks: list[tuple[Vector, Vector]]) -> tuple[Vector, Vector]:
            values, shares = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
            if not values.size:
                values = np.ones(1)  # nothing was accepted: the worst there is
            values, shares = (np.minimum(x * (1 + _ROUNDING_OF_SHARES) + _LEFT_OUT, 1.0) for x in (values, shares))
            return values, shares

        width = max(n, int(n * self.tuples.order / likely / 6))
        return together(run_in_blocks(block, count, width, seed, lambda some: self.mean(*together(some)) > most))

    def _integrals(self, x: Matrix, slope: Matrix, t: Vector) -> Vector:
        """∫ φ(t)·g(S/a) dt from above, as S grows with t; `x` is at the highest `t`, and moves by `slope`.

        Where S is too large for a float, or an exponent was capped, S has no upper bound: there a may be beyond it, too.
        """
        total, left = np.zeros(x.shape[1]), np.arange(x.shape[1])
        likelihood, weights = self.likelihood, self.likelihood.weights(x)
        largest = likelihood.weights(np.full((len(x), 1), np.inf))
        capped = not (weights < _NOT_CAPPED * largest).all()
        slope *= -_STEP
        fall = np.exp(slope)  # of the weights from one t to the next: fewer exponentials
        for _ in range(round(2 * _REACH / _STEP)):
            lower, upper = (np.log(bound) for bound in likelihood.bounds(weights))
            upper = np.where(upper < _BEYOND, upper, np.inf)
            if capped:
                upper[(weights >= _CAPPED * largest).any(axis=0)] = np.inf
            weight = _STEP * np.exp(-(t**2) / 2) / math.sqrt(2 * math.pi)
            total[left] += weight * self._values(lower, upper)
            some = upper + self.columns.rounding > self.epsilon  # values stay 0 where they are
            if not some.any():
                break
            if some.mean() < 0.8:
                left, t, weights, fall = left[some], t[some], weights.compress(some, 1), fall.compress(some, 1)
                if capped:
                    x, slope = x[:, some], slope[:, some]
            t = t - _STEP
            if capped:
                x += slope
                weights = likelihood.weights(x)
            else:
                weights *= fall
        return total

    def _values(self, lower: Vector, upper: Vector) -> Vector:
        """The largest g(S/a) = (S/a − 1)₊/(S/a)^r·r^r/(r − 1)^(r−1) between two bounds on log S."""
        r, rounding = self.tuples.order, self.columns.rounding
        at = np.clip(-math.log1p(-1 / r), lower - self.epsilon - rounding, upper - self.epsilon + rounding)
        above = at > 0
        values = np.zeros(len(at))
        values[above] = np.exp(at[above] * (1 - r) + np.log(-np.expm1(-at[above])) - _largest_of_power(r))
        return values


def _tried(columns: Columns, law: Law, sigma: float, epsilon: float, order: int) -> tuple[float, Tuples, float]:
    """log of about how long draws of this order take for one result, the tuples, and the part of them that is accepted."""
    tuples = law.tuples(columns, sigma, order)
    log_most = tuples.log_total + (1 - order) * epsilon + _largest_of_power(order)
    if not math.isfinite(log_most):
        return math.inf, tuples, 0.0
    accepted = float(tuples.draw(np.random.default_rng(order), TOLERANCES.drawing.order[0])[1].mean())
    if accepted < TOLERANCES.drawing.order[1]:
        return (math.inf if order > law.orders[0] else 1e6), tuples, accepted
    return log_most + math.log(accepted) + math.log(_cost(tuples, accepted)), tuples, accepted


def _cost(tuples: Tuples, accepted: float) -> float:
    return 1 + tuples.cost / max(accepted, TOLERANCES.drawing.order[1])


def _largest_of_power(order: int) -> float:
    """log of the maximum of (s − 1)₊/s^r over s."""
    return (order - 1) * math.log(order - 1) - order * math.log(order)
