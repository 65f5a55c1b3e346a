"""The search for one number of a mechanism below 1, such as λ, by the error of what it makes for a run at a budget."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import ceil, expm1, log, log1p, sqrt

import numpy as np
from scipy.optimize import minimize_scalar

from fedcgd.accounting import gaussian
from fedcgd.accounting.by_sampling import accountant
from fedcgd.accounting.tolerances import TOLERANCES
from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.error import error_norms
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.mechanisms.workload import Objective, Workload
from fedcgd.participation import Participation
from fedcgd.participation.samplings import Law
from fedcgd.quadratic import Quadratic
from fedcgd.quadratic.loss import final_loss

_CHOICE = TOLERANCES.choice

_TIE = 1e-12  # relative; rounding makes no number better than a smaller one


@dataclass(frozen=True)
class Judge:
    """The error of mechanisms for one run, at one budget: of what is compared wherever a number is chosen."""

    participation: Participation
    epsilon: float
    delta: float
    kind: Objective
    workload: Workload
    curvature: Quadratic | None
    progress: Callable[[str], None] | None = None
    _sigmas: dict[Mechanism, float] = field(default_factory=dict)

    @property
    def sampled(self) -> bool:
        """Whether chance amplifies privacy by a part that depends on C, and errors need a calibration."""
        return self.participation.scheme.law not in (Law.KNOWN, Law.COINS)

    def sigma(self, mechanism: Mechanism) -> float:
        """About σ under the sampling."""
        if mechanism not in self._sigmas:
            rough = accountant(mechanism, self.participation)
            self._sigmas[mechanism] = rough.rough_noise_multiplier(epsilon=self.epsilon, delta=self.delta)
        return self._sigmas[mechanism]

    def error(self, mechanism: Mechanism) -> float:
        """The error under the sampling, or the root of the loss where there is a curvature."""
        return self._error(mechanism, self.sigma(mechanism)) if self.sampled else self.plain_error(mechanism)

    def plain_error(self, mechanism: Mechanism) -> float:
        """The same, whatever the sampling: a closed form."""
        return self._error(mechanism, sensitivity(mechanism, self.participation).value * self._unit)

    def curve(
        self, make: Callable[[float], Mechanism], symbol: str, least: float = 0.0, *, sampled: bool
    ) -> dict[float, float]:
        """Number → error of `make(number)`, searched from `least` to 1 on the scale 1/(1 − number); `sampled` says which error.

        Under a sampling the error without it is searched first: amplification prefers smaller numbers, and twice the best one
        leaves room for exceptions.
        """
        # With one participation the best 1/(1 − λ) is near √n, with more it is smaller; 4n leaves room for any.
        ends = scale(least) + 0.0, log(4.0 * self.participation.rounds + 4.0)
        tries = count(1)

        def plain(value: float) -> float:
            return self.plain_error(make(value))

        def amplified(value: float) -> float:
            number = next(tries)
            if self.progress is not None:
                self.progress(f"{symbol} = {value:.4f}, {number} of about {max(_CHOICE.calibrations, number + 1)}")
            return self.error(make(value))

        if not sampled:
            return _search(plain, *ends, *_CHOICE.grid)
        plainly = best(_search(plain, *ends, _CHOICE.grid[0], _CHOICE.start))
        return _search(amplified, ends[0], min(ends[1], log(2.0) + scale(plainly)), *_CHOICE.sampled)

    @cached_property
    def _unit(self) -> float:
        """σ of one release of sensitivity 1."""
        return gaussian.sigma(epsilon=self.epsilon, delta=self.delta)

    def _error(self, mechanism: Mechanism, sigma: float) -> float:
        rounds = self.participation.rounds
        if self.curvature is not None:
            return sqrt(final_loss(mechanism, rounds, self.curvature, stddev=sigma))
        norms = error_norms(mechanism, rounds, self.workload)
        return norms.max_se(sigma) if self.kind == "max-se" else norms.rmse(sigma)


def iterations(say: Callable[[str], None]) -> Callable[[int, float], None]:
    """What an optimisation calls, said in words.

    Args:
        say: is called with a line of text.
    """
    return lambda done, value: say(f"optimising, {done} iterations, log error {value:.5g}")


def _search(
    objective: Callable[[float], float], start: float, limit: float, grid: int, tolerance: float
) -> dict[float, float]:
    """Number → value: a grid of log(1/(1 − number)) over [start, limit], then a bounded search next to the best of it.

    0 is in the grid, also where there are numbers below it.
    """
    curve: dict[float, float] = {}

    def at(scale: float) -> float:
        number = -expm1(-scale)
        if number not in curve:
            curve[number] = objective(number)
        return curve[number]

    scales = np.linspace(max(start, 0.0), limit, grid)
    if start < 0:
        negative = ceil(-start / (scales[1] - scales[0]))
        scales = np.concatenate([np.linspace(start, 0.0, negative, endpoint=False), scales])
    values = [at(float(scale)) for scale in scales]
    least = int(np.argmin(values))
    low, high = scales[max(least - 1, 0)], scales[min(least + 1, len(scales) - 1)]
    minimize_scalar(at, bounds=(low, high), method="bounded", options={"xatol": tolerance})
    return curve


def scale(number: float) -> float:
    """log(1/(1 − number)): the scale on which numbers are searched.

    Args:
        number: below 1.
    """
    return -log1p(-number)


def best(curve: dict[float, float]) -> float:
    """The number of the least value; the smallest among ties.

    Args:
        curve: number → value.
    """
    least = min(curve.values())
    return min(number for number, value in curve.items() if value <= least * (1 + _TIE))
