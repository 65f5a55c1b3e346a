"""δ and ε of many independent releases from their privacy losses on a grid, for every δ that a double holds.

The loss of each release is rounded up to multiples of a step; that of all together is their convolution, by Fourier transforms,
whose rounding is about 1e-16 of the *largest* probability. So the losses are tilted first (Esscher, 1932): with
q_i ∝ p_i·exp(θ·l_i) and M(θ) = Σ p_i·exp(θ·l_i),

    δ(ε) = e^(−θε)·Π M(θ)·Σ_{l > ε} (1 − e^(ε−l))·e^(−θ(l−ε))·(convolution of all q)(l),

where θ makes Chernoff's bound on δ least, so that the convolution has its bulk where δ comes from. What rounding and the ends of
the window may take is bounded, in units of Chernoff's bound, and added. Every θ gives an upper bound.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.optimize import brentq, minimize_scalar

from fedcgd.accounting.tolerances import TOLERANCES
from fedcgd.mechanisms.mechanism import Vector

_OUTSIDE, _LONGEST = TOLERANCES.ratios.outside, TOLERANCES.memory.matrix

_UNIT = 2.0**-53
_STAGE = (
    16 * _UNIT
)  # an entry of a transform errs by less for each doubling of its length, in units of the sum of all entries
_ONE_RELEASE = 1e-9  # relative: δ of a release, from which its masses follow, is right to a tenth of it
_TILTS = math.log(1e-6), math.log(1e7)
_LEAST_LOG = -690.0  # of a δ: a double holds no less


@dataclass(frozen=True, eq=False)
class GridLoss:
    """The privacy loss of one release: probability `masses[i]` of (first + i)·step, and `infinite` of an infinite one."""

    masses: Vector
    first: int
    step: float
    infinite: float

    @staticmethod
    def from_deltas(multiples: NDArray[np.int_], deltas: Vector, step: float) -> "GridLoss":
        """The loss whose δ at each ε = `multiples`·step is that of `deltas`, and at no other ε less than δ of what has these.

        `multiples` ascend; δ is a convex function of e^ε. This is the pessimistic distribution of Doroshenko, Ghazi, Kamath,
        Kumar and Manurangsi, "Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions", 2022,
        arXiv:2207.04380.
        """
        # δ(ε_i) = S_i − e^(ε_i)·T_i with S_i = P(l > ε_i) and T_i = E[e^(−l); l > ε_i] gives S_i from two neighbours.
        above = deltas[1:] + (deltas[:-1] - deltas[1:]) / -np.expm1(-step * np.diff(multiples))
        tails = np.concatenate([[1.0], above, deltas[-1:]])
        masses = np.zeros(int(multiples[-1] - multiples[0]) + 1)
        masses[multiples - multiples[0]] = np.maximum(-np.diff(tails), 0.0)
        return GridLoss(masses, int(multiples[0]), step, float(deltas[-1]))

    @cached_property
    def losses(self) -> Vector:
        """The losses that `masses` are of."""
        return self.step * (self.first + np.arange(len(self.masses), dtype=np.float64))

    @cached_property
    def logs(self) -> Vector:
        """The logarithms of `masses`."""
        with np.errstate(divide="ignore"):
            return np.log(self.masses)

    def log_mgf(self, tilt: float) -> float:
        """log Σ p_i·exp(tilt·l_i)."""
        logs = self.logs + tilt * self.losses
        top = float(logs.max())
        return top + math.log(float(np.exp(logs - top).sum()))

    def tilted(self, tilt: float) -> Vector:
        """Masses ∝ p_i·exp(tilt·l_i) of sum 1."""
        return np.asarray(np.exp(self.logs + tilt * self.losses - self.log_mgf(tilt)))


@dataclass(frozen=True, eq=False)
class Composition:
    """Independent releases: how often each loss. All have the same step."""

    parts: Sequence[tuple[GridLoss, int]]

    @property
    def step(self) -> float:
        """The step of the grid."""
        return self.parts[0][0].step

    def log_mgf(self, tilt: float) -> float:
        """log of E exp(tilt·loss), of finite losses."""
        return sum(times * loss.log_mgf(tilt) for loss, times in self.parts)

    @property
    def infinite(self) -> float:
        """The probability of an infinite loss in some release."""
        logs = sum(times * math.log1p(-min(loss.infinite, 1 - _UNIT)) for loss, times in self.parts)
        return -math.expm1(logs)

    def delta(self, epsilon: float) -> float:
        """An upper bound on δ at `epsilon`, at most 1."""
        log_bound, tilt = _least(lambda tilt: self.log_mgf(tilt) - tilt * epsilon + _log_top(tilt))
        if log_bound < _LEAST_LOG:
            return min(1.0, math.exp(_LEAST_LOG) + self.infinite)
        return _Tail.from_composition(self, tilt, epsilon).delta(epsilon)

    def epsilon(self, delta: float) -> float:
        """An upper bound on ε at `delta`; infinite if losses that are counted as infinite are as likely as that."""
        left = delta - self.infinite
        if left <= 0:
            return math.inf
        most, tilt = _least(lambda tilt: (self.log_mgf(tilt) + _log_top(tilt) - math.log(left)) / tilt)
        if most <= 0:
            return 0.0
        tail = _Tail.from_composition(self, tilt, 0.0)
        if tail.delta(0.0) <= delta:
            return 0.0
        if tail.delta(most) > delta:
            return most
        goal = math.log(delta)
        found = brentq(lambda e: math.log(max(tail.delta(e), 1e-320)) - goal, 0.0, most, xtol=1e-12, rtol=1e-12)
        return float(found) * (1 + 1e-11) + 1e-11


def _least(objective: Callable[[float], float]) -> tuple[float, float]:
    """(value, θ) where a function of θ is about least."""
    found = minimize_scalar(
        lambda log: objective(math.exp(log)), bounds=_TILTS, method="bounded", options={"xatol": 1e-3}
    )
    return float(found.fun), math.exp(float(found.x))


def _log_top(tilt: float) -> float:
    """log of the largest (1 − e^(−x))·e^(−θx)."""
    return tilt * math.log(tilt) - (1 + tilt) * math.log1p(tilt)


@dataclass(frozen=True, eq=False)
class _Tail:
    """The tilted losses of all releases together, in a window around their bulk."""

    tilt: float
    log_mgf: float
    losses: Vector
    masses: Vector
    lost: float
    """What may be missing from all masses together."""
    relative: float
    """What rounding may take from each, and from E exp(tilt·loss): a factor."""
    infinite: float

    @staticmethod
    def from_composition(whole: Composition, tilt: float, epsilon: float) -> "_Tail":
        """For questions about `epsilon` and more. If the window would be too long it has no masses: Chernoff's bound is left."""
        log_mgf, tilted = whole.log_mgf(tilt), [(loss.tilted(tilt), times) for loss, times in whole.parts]
        start, end = _window(whole, tilt, log_mgf, tilted)
        longest = max(len(masses) for masses, _ in tilted)
        size = next_fast_len(max(end - start + 1, longest), real=True)
        number = sum(times for _, times in whole.parts)
        relative = 1 + _ONE_RELEASE * (1 + abs(log_mgf)) + 100 * _UNIT * number
        if size > _LONGEST:
            return _Tail(tilt, log_mgf, np.zeros(0), np.zeros(0), 1.0, relative, whole.infinite)
        masses, error = _convolved(tilted, size, start - sum(loss.first * times for loss, times in whole.parts))
        at = max(0, math.floor(epsilon / whole.step) - start)
        losses = whole.step * np.arange(start + at, start + size, dtype=np.float64)
        kept = np.maximum(masses[at:], 0.0)
        return _Tail(tilt, log_mgf, losses, kept, _OUTSIDE + size * error, relative, whole.infinite)

    def delta(self, epsilon: float) -> float:
        """δ, and all that may be missing; at most 1."""
        first, top = int(np.searchsorted(self.losses, epsilon, side="right")), math.exp(_log_top(self.tilt))
        x = self.losses[first:] - epsilon
        seen = float(np.dot(-np.expm1(-x) * np.exp(-self.tilt * x), self.masses[first:]))
        log_total = math.log(max(min(seen + self.lost * top, top), 1e-320) * self.relative)
        return min(1.0, math.exp(min(self.log_mgf - self.tilt * epsilon + log_total, 0.0)) + self.infinite)


def _window(whole: Composition, tilt: float, log_mgf: float, tilted: Sequence[tuple[Vector, int]]) -> tuple[int, int]:
    """Multiples of the step below and above which the tilted losses have at most `_OUTSIDE`, by Chernoff's inequality."""
    variance = 0.0
    for (loss, times), (masses, _) in zip(whole.parts, tilted, strict=True):
        mean = float(loss.losses @ masses)
        variance += times * float((loss.losses - mean) ** 2 @ masses)
    deviation, goal = math.sqrt(variance) + whole.step, -math.log(_OUTSIDE)
    low = float(sum(loss.first * times for loss, times in whole.parts))
    high = float(sum((loss.first + len(loss.masses) - 1) * times for loss, times in whole.parts))
    for by in (0.5, 1.0, 2.0, 4.0, 8.0):
        s = by / deviation
        high = min(high, (whole.log_mgf(tilt + s) - log_mgf + goal) / s / whole.step)
        low = max(low, (log_mgf - whole.log_mgf(tilt - s) - goal) / s / whole.step)
    return math.floor(low), math.ceil(high)


def _convolved(parts: Sequence[tuple[Vector, int]], size: int, start: int) -> tuple[Vector, float]:
    """`size` entries of the convolution of all `parts`, from index `start` on, and how far each may be off.

    What lies outside is added to what is inside, at equal index modulo `size`.
    """
    stage = _STAGE * math.log2(size + 1)
    # Indices count from the mean of each, so that the phases, which are multiplied by the number of releases, stay small.
    centre, logs = 0, np.zeros(size // 2 + 1, dtype=complex)
    above, lost, phases = np.zeros((3, size // 2 + 1))
    for masses, times in parts:
        mean = round(float(np.arange(len(masses)) @ masses))
        padded = np.zeros(size)
        padded[: len(masses)] = masses
        spectrum = rfft(np.roll(padded, -mean))
        one = np.log(np.where(spectrum == 0, 1e-300, spectrum))
        size_of = np.abs(spectrum) + stage
        logs, centre = logs + times * one, centre + times * mean
        above += times * np.log(size_of)  # of the product with each factor as large as it may be
        lost += times * stage / size_of
        phases += times * (np.abs(one) + 4)
    power = np.exp(logs)
    composed = np.roll(irfft(power, size), -((start - centre) % size))
    sizes = np.abs(power)
    error = (
        2 * float(np.sum(np.exp(above) * lost) + np.sum(sizes * (phases + 10)) * _UNIT + stage * np.sum(sizes)) / size
    )
    return composed, error
