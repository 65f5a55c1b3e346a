"""S = Σ_P Pr(P)·exp(⟨C1_P, y⟩/σ² − |C1_P|²/2σ²), the ratio of the two densities, by a recursion backwards through the rounds.

With x_t = ⟨C[:, t], y⟩/σ² and e_t = |C[:, t]|²/2σ², and C with at most b bands (arXiv:2602.09338),

    F_t = (1 − p)·F_{t+1} + p·exp(x_t − e_t)·F_{t+b},   S = Σ_i init_i·F_i.

With a geometric tail, what earlier rounds bring to round t is one number q (`columns`), and

    F_t(q) = (1 − p)·F_{t+1}(λq) + p·exp(x_t − e_t − D_t·q/σ²)·F_{t+b}(λ^b·(q + d_t)).

F_t(q) is a positive mixture of exp(−γq), 0 ≤ γ ≤ γ_max. So G_t(q) = e^(κq)·F_t(q) is convex for every κ, and linear
interpolation of it errs upwards. How far at most follows from the two ends of [0, γ_max]; and taken off in each step that makes
a lower bound. The values of q are a geometric sequence, where it can be in steps of a root of λ, so that λq is one of them too,
and 0.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from fedcgd.accounting.b_min_sep.coins import Coins
from fedcgd.accounting.b_min_sep.recursion import Indices, Step, compiled
from fedcgd.accounting.random_participation.columns import Columns
from fedcgd.accounting.random_participation.law import LARGEST
from fedcgd.accounting.tolerances import TOLERANCES
from fedcgd.mechanisms.mechanism import Matrix, Vector

_CHAINS = TOLERANCES.chains


@dataclass(frozen=True, eq=False)
class BMinSepLikelihood:
    """S for one σ."""

    law: Coins
    chances: Vector
    """init, of the first rounds."""
    halves: Vector
    """e_t, shape (n,)."""
    grid: "Grid | None"
    """For a geometric tail."""
    gap: float = 0.0
    """About the distance of the two bounds on log S."""

    @staticmethod
    def from_columns(columns: Columns, law: Coins, sigma: float) -> "BMinSepLikelihood":
        """Of `columns` with noise `sigma`."""
        plain = BMinSepLikelihood(law, law.first_chances()[: law.rounds], columns.squares / (2 * sigma**2), None)
        return _with_grid(plain, columns, sigma) if columns.amplitude else plain

    @property
    def cost(self) -> float:
        """About the time that a draw takes, in units of one with few points or none."""
        return 1.0 if self.grid is None else 1.0 + len(self.grid.points) / _CHAINS.points_per_draw

    def weights(self, x: Matrix) -> Matrix:
        """p·exp(x_t − e_t), shape (n, draws)."""
        found = np.empty(x.shape)
        for start in range(0, len(x), 64):  # a few rounds, which the cache holds
            rounds = slice(start, start + 64)
            here = np.subtract(x[rounds], self.halves[rounds, None], out=found[rounds])
            np.exp(np.minimum(here, 700.0, out=here), out=here)
            here *= self.law.rate
        return found

    def bounds(self, weights: Matrix) -> tuple[Vector, Vector]:
        """A lower and an upper bound on S, by `weights`; without a tail they are equal.

        What is beyond `LARGEST` or below 1/`LARGEST` is set to that.
        """
        b, kept, form = self.law.separation, len(self.chances), compiled()
        with np.errstate(over="ignore", invalid="ignore"):
            if self.grid is None:
                firsts = form.without_tail(weights, b, 1 - self.law.rate, kept)
                return self._total(firsts, 0.0), self._total(firsts, LARGEST)
            grid = self.grid
            lower = self._total(form.with_tail(weights, b, grid.least_stay, grid.least_take, grid.kinds, kept), 0.0)
            upper = self._total(form.with_tail(weights, b, grid.stay, grid.take, grid.kinds, kept), LARGEST)
        return np.minimum(lower, upper), upper

    def _total(self, firsts: Matrix, unknown: float) -> Vector:
        """S, and `unknown` where numbers too large for a float left none."""
        total = self.chances @ firsts + max(0.0, 1 - self.chances.sum())  # the rest is never free to take part
        return np.asarray(np.clip(np.nan_to_num(total, nan=unknown), 1 / LARGEST, LARGEST))


@dataclass(frozen=True, eq=False)
class Grid:
    """Linear maps between the values of F_t at the points."""

    points: Vector
    """They fall to 0."""
    stay: Step
    """What is done to F_{t+1}."""
    take: Step
    """What is done to F_{t+b} before it is multiplied with p·exp(x_t − e_t); one for each kind of round."""
    least_stay: Step
    least_take: Step
    """The same for the lower bound."""
    kinds: Indices
    """The kind of each round."""


def _with_grid(plain: BMinSepLikelihood, columns: Columns, sigma: float) -> BMinSepLikelihood:
    """With about the fewest points whose bounds are near each other, as some draws of a user's rounds and the noise show."""
    generator = np.random.default_rng(0)
    law = plain.law
    rounds = generator.random((law.rounds, _CHAINS.trials)) < law.expected_rate
    y = columns.forward(rounds.astype(float)) + sigma * generator.standard_normal(rounds.shape)
    x = columns.adjoint(y) / sigma**2
    nearest, best = math.inf, None
    for count in _CHAINS.points:
        for depth in _CHAINS.depths if count > 2 else _CHAINS.depths[:1]:
            log_step = depth / max(count - 2, 1)
            roots = round(-math.log(columns.ratio) / log_step)
            step = columns.ratio ** (1 / roots) if roots else math.exp(-log_step)
            points = np.append(columns.largest_tail * step ** np.arange(count - 1), 0.0)
            found = BMinSepLikelihood(law, plain.chances, plain.halves, _grid(points, columns, law, sigma))
            lower, upper = found.bounds(found.weights(x))
            gap = float(np.mean(np.log(upper) - np.log(lower)))
            if best is None or gap < nearest:
                nearest, best = gap, replace(found, gap=gap)
        if nearest <= _CHAINS.gap[0]:
            break
    assert best is not None  # one of the grids is there, however far its bounds are from each other  # noqa: S101
    return best


def _grid(points: Vector, columns: Columns, law: Coins, sigma: float) -> Grid:
    ratio, b = columns.ratio, law.separation
    pulls = columns.tail_products / sigma**2  # D_t/σ²
    most = max(1, -(-law.rounds // b))  # rounds that are left to a user
    tilt = float(pulls.max()) * (1 - ratio ** (b * most)) / (1 - ratio**b) / 2
    kinds, kind = np.unique(np.stack([pulls, columns.scales], axis=1), axis=0, return_inverse=True)
    with np.errstate(over="ignore", invalid="ignore"):  # too few points for this tilt: infinity or no number, and 0
        stays = _interpolation(ratio * points, points, tilt)
        takes = [_interpolation(ratio**b * (points + scale), points, tilt) for _, scale in kinds]
        decays = [np.exp(-pull * points)[:, None] for pull, _ in kinds]
        rest, stay_above, take_above = 1 - law.rate, stays[0], np.stack([above for above, _, _ in takes])
        stay, least_stay = (Step(stay_above, rest * weights) for weights in stays[1:])
        take, least_take = (
            Step(take_above, np.stack([found[which] * decay for found, decay in zip(takes, decays, strict=True)]))
            for which in (1, 2)
        )
    least_stay, least_take = (
        replace(step, weights=np.nan_to_num(step.weights, nan=0.0)) for step in (least_stay, least_take)
    )
    return Grid(points, stay, take, least_stay, least_take, kind.ravel().astype(np.int64))


def _interpolation(values: Vector, points: Vector, tilt: float) -> tuple[Indices, Matrix, Matrix]:
    """From F at the points to an upper and to a lower bound on F at `values`: the point above each, and its weight and that of
    the next point, twice.
    """
    above = np.clip(np.searchsorted(-points, -values, side="right") - 1, 0, len(points) - 2)
    high, low = points[above], points[above + 1]
    values = np.minimum(values, high)  # but for rounding it never is above
    weight = (high - values) / (high - low)
    near = np.minimum(weight, 1 - weight) < 1e-12
    weight = np.where(near, np.round(weight), weight)
    upper = np.stack([(1 - weight) * np.exp(tilt * (high - values)), weight * np.exp(tilt * (low - values))], axis=1)
    error = np.zeros(len(values))
    for sign in (1, -1):  # of exp(κq) and exp(−κq), the ends of what G is a mixture of: none between has a larger error
        ends = (1 - weight) * np.exp(sign * tilt * (high - values)) + weight * np.exp(sign * tilt * (low - values))
        error = np.fmax(error, np.log(ends))
    return above.astype(np.int64), upper, upper * np.exp(-np.where(near, 1e-15, error))[:, None]
