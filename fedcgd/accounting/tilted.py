"""δ of many equal rounds together, also where it is far below what a double beside 1 can show.

The privacy loss of one round lies on a grid. That of k rounds is its k-fold convolution, by Fourier transforms, whose rounding is
a part of about 1e-16 of the *largest* probability: with k rounds nothing below about 1e-16·k could be told. So it is tilted
first (Esscher, 1932): with q_i ∝ p_i·exp(θ·l_i), and M(θ) = Σ p_i·exp(θ·l_i),

    P(loss = l) = M(θ)^k · exp(−θl) · q^{*k}(l),

and θ is the one for which q^{*k} has its bulk where δ comes from. Then rounding is a small part of δ itself. An upper bound on it
is added, as is one on what lies above the window of the transform, by Chernoff's inequality P(loss > t) ≤ M(s)^k·exp(−s·t). What
lies outside wraps around, and only adds to the sum.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.optimize import brentq, minimize_scalar

from fedcgd.mechanisms.mechanism import Vector

_UNIT = 2.0**-53
_TRANSFORM = (
    8.0  # an FFT of n points errs by less than this times unit·log₂ n in the 2-norm, relative; measured: below 0.5
)
_BEYOND = 1e-10  # of δ, that may lie above the window
_OUTSIDE = 1e-13  # of the tilted distribution, that may lie outside and wraps around; it only adds to δ
_LEAST_TILT = 0.3
_LARGEST_TILT = 1e7
_TILTS = 4
_WIDEST = 600.0  # of the logarithms of factors
_LONGEST = 2**25  # points of a transform: 0.8 GB in all


@dataclass(frozen=True, eq=False)
class GridLoss:
    """The privacy loss of one round: probability `masses[i]` of the loss (first + i)·step, and `infinite` of an infinite one."""

    masses: Vector
    first: int
    step: float
    infinite: float

    @staticmethod
    def of_deltas(deltas: Vector, first: int, step: float) -> "GridLoss":
        """The loss whose δ at ε = (first + i)·step is `deltas[i]`, and at any other ε not below the δ of what has these.

        That is the pessimistic distribution of Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, "Connect the Dots: Tighter
        Discrete Approximations of Privacy Loss Distributions", 2022, arXiv:2207.04380.
        """
        # δ(ε_i) = S_i − e^{ε_i}·T_i with S_i = P(l > ε_i) and T_i = E[e^{−l}; l > ε_i] gives S_i from two neighbours.
        above = deltas[1:] + (deltas[:-1] - deltas[1:]) / -math.expm1(-step)
        tails = np.concatenate([[1.0], above, deltas[-1:]])
        return GridLoss(np.maximum(-np.diff(tails), 0.0), first, step, float(deltas[-1]))

    @cached_property
    def losses(self) -> Vector:
        """The losses that `masses` are of."""
        return self.step * (self.first + np.arange(len(self.masses), dtype=np.float64))

    @cached_property
    def logs(self) -> Vector:
        """The logarithms of `masses`."""
        with np.errstate(divide="ignore"):
            return np.log(self.masses)


@dataclass(frozen=True)
class Composition:
    """k independent rounds of one loss."""

    loss: GridLoss
    rounds: int

    def log_mgf(self, tilt: float) -> float:
        """k·log M(tilt)."""
        return self.rounds * _log_mgf(self.loss, tilt)

    @property
    def infinite(self) -> float:
        """The probability of an infinite loss in some round."""
        return -math.expm1(self.rounds * math.log1p(-self.loss.infinite)) if self.loss.infinite < 1 else 1.0

    def chernoff_epsilon(self, delta: float) -> tuple[float, float]:
        """(ε, θ) with P(loss > ε) ≤ `delta` by Chernoff's inequality at θ, for finite losses; the least such ε, about."""
        goal = -math.log(delta)
        found = minimize_scalar(
            lambda log_tilt: (self.log_mgf(math.exp(log_tilt)) + goal) / math.exp(log_tilt),
            bounds=(math.log(1e-6), math.log(_LARGEST_TILT)),
            method="bounded",
            options={"xatol": 1e-3},
        )
        return float(found.fun), math.exp(float(found.x))

    def chernoff_tail(self, epsilon: float) -> tuple[float, float]:
        """(log of a bound on P(loss > ε), θ)."""
        found = minimize_scalar(
            lambda log_tilt: self.log_mgf(math.exp(log_tilt)) - math.exp(log_tilt) * epsilon,
            bounds=(math.log(1e-6), math.log(_LARGEST_TILT)),
            method="bounded",
            options={"xatol": 1e-3},
        )
        return min(0.0, float(found.fun)), math.exp(float(found.x))

    def delta(self, epsilon: float) -> float:
        """An upper bound on δ at `epsilon`, at most 1."""
        log_tail, tilt = self.chernoff_tail(epsilon)
        if log_tail < -690.0:
            return min(1.0, math.exp(log_tail) + self.infinite)
        # Any tilt gives a bound. Near 0, Chernoff's where the tail is nearly all, rounding takes more the smaller the tilt is.
        tails = [_tail(self, each, epsilon, epsilon, math.exp(log_tail)) for each in {tilt, max(tilt, _LEAST_TILT)}]
        return min((tail.delta(epsilon) for tail in tails if tail is not None), default=1.0)

    def epsilon(self, delta: float) -> float:
        """An upper bound on ε at `delta`; infinite if losses that are counted as infinite are as likely as that."""
        left = delta - self.infinite
        if left <= 0:
            return math.inf
        least, tilt = self.chernoff_epsilon(left)
        for _ in range(_TILTS):  # every answer is a bound; at the tilt of a smaller one rounding matters less
            if least <= 0:
                return 0.0
            tail = _tail(self, tilt, 0.0, least, left)
            found = least if tail is None else _root(tail, delta, least)
            enough = found > least * (1 - 1e-6)
            least = min(least, found)
            if enough:
                break
            tilt = self.chernoff_tail(least)[1]
        return max(0.0, least)


@dataclass(frozen=True, eq=False)
class _Tail:
    """P(loss = l)·exp(−`log_scale`) for the losses l of a window, and what is missing there. It answers for ε ≤ `last`."""

    first: float
    last: float
    step: float
    above: Vector
    """Σ P over the losses from the i-th on, times exp(−log_scale)."""
    shrunk: Vector
    """Σ P·exp(last − l) over the same."""
    log_scale: float
    error: float
    """Of each P·exp(−log_scale + θ(l − last)): what rounding may take from it."""
    tilt: float
    missing: float
    relative: float

    def delta(self, epsilon: float) -> float:
        """Σ_{l > ε} (1 − e^{ε−l})·P(l) and all that may be missing, or 1 for ε below the window."""
        if epsilon < self.first:
            return 1.0
        epsilon = min(epsilon, self.last)
        at = math.floor((epsilon - self.first) / self.step) + 1
        seen = float(self.above[at] - math.exp(epsilon - self.last) * self.shrunk[at])
        # Σ over l > ε of (1 − e^{ε−l})·e^{−θ(l − last)}·error, as an integral that is above it.
        lost = self.error * math.exp(self.tilt * (self.last - epsilon)) * _kernel_sum(self.tilt, self.step)
        within = max(seen, 0.0) * (1 + self.relative) + lost
        log_within = self.log_scale + math.log(within) if within > 0 else -math.inf
        return min(1.0, math.exp(min(log_within, 0.0)) + self.missing)


def _root(tail: _Tail, delta: float, highest: float) -> float:
    """The least ε in [0, `highest`] at which the tail has at most `delta`; `highest` if there is none."""
    if tail.delta(0.0) <= delta:
        return 0.0
    if tail.delta(highest) > delta:
        return highest
    goal = math.log(delta)
    found = brentq(lambda e: math.log(max(tail.delta(e), 1e-320)) - goal, 0.0, highest, xtol=1e-12, rtol=1e-12)
    return float(found) * (1 + 1e-11) + 1e-11


def _kernel_sum(tilt: float, step: float) -> float:
    """At least Σ_{j ≥ 0} (1 − e^{−x_j})·e^{−θ·x_j} over points x_j ≥ 0 that are `step` apart."""
    peak = (1 / (1 + tilt)) * math.exp(-tilt * math.log1p(1 / tilt)) if tilt > 0 else 1.0
    return 1 / (step * tilt * (1 + tilt)) + peak


def _tail(composition: Composition, tilt: float, lowest: float, last: float, delta: float) -> _Tail | None:
    """The losses above ε, for each ε from about `lowest` to `last`, where δ is about `delta`; None if they are too many."""
    loss, k = composition.loss, composition.rounds
    beyond = composition.chernoff_epsilon(delta * _BEYOND)[0]
    low, high = _ends(composition, tilt)
    bottom, highest = min(lowest, low), max(beyond, high, last + 2 * loss.step)
    size = math.ceil((highest - bottom) / loss.step) + 2
    if size > _LONGEST:
        return None
    size = next_fast_len(max(size, len(loss.masses)), real=True)
    log_mgf = _log_mgf(loss, tilt)
    tilted = np.exp(loss.logs + tilt * loss.losses - log_mgf)
    start = math.floor(bottom / loss.step)  # index of the window's first loss, on the grid of the composition
    composed, error = _power(tilted, k, size, start - k * loss.first)
    # Far below `last` the tilt is undone by factors that no double holds; nobody asks there.
    skipped = max(0, math.ceil((last - _WIDEST / (1 + tilt)) / loss.step) - start)
    offsets = loss.step * (start + np.arange(skipped, size)) - last
    masses = np.maximum(composed[skipped:], 0.0) * np.exp(-tilt * offsets)
    return _Tail(
        first=loss.step * (start + skipped),
        last=last,
        step=loss.step,
        above=np.cumsum(masses[::-1])[::-1],
        shrunk=np.cumsum((masses * np.exp(-offsets))[::-1])[::-1],
        log_scale=k * log_mgf - tilt * last,
        error=error,
        tilt=tilt,
        missing=delta * _BEYOND + composition.infinite,
        # δ of one round is right to 1e-10 of itself, and so is log M, which is a mean of them; sums and powers round on top.
        relative=1e-9 * (1 + abs(k * log_mgf)) + (k + size) * 4 * _UNIT,
    )


def _power(masses: Vector, k: int, size: int, start: int) -> tuple[Vector, float]:
    """`size` entries of the k-fold convolution of `masses`, from index `start` on, and how far each may be off.

    What lies outside is added to what is inside, at equal index modulo `size`.
    """
    # Indices count from the mean, so that the phases, which are multiplied by k, stay small.
    centre = round(float(np.arange(len(masses)) @ masses))
    padded = np.zeros(size)
    padded[: len(masses)] = masses
    spectrum = rfft(np.roll(padded, -centre))
    logs = np.log(np.where(spectrum == 0, 1e-300, spectrum))
    power = np.exp(k * logs)
    composed = np.roll(irfft(power, size), -((start - k * centre) % size))
    transform = _TRANSFORM * _UNIT * math.log2(size + 1)
    # The 2-norm of what the first transform errs by, over all frequencies; then k·|F|^(k−1) of it, by Cauchy and Schwarz.
    first = (transform + 2 * _UNIT) * math.sqrt(size) * float(np.linalg.norm(masses))
    steep = np.exp((k - 1) * np.log(np.abs(spectrum) + first))
    lost = k * first * math.sqrt(2 * float(steep @ steep)) / size
    lost += 2 * float(np.abs(power) @ (k * (np.abs(logs) + 4) + 10)) * _UNIT / size
    return composed, lost + transform * float(np.linalg.norm(composed))


def _ends(composition: Composition, tilt: float) -> tuple[float, float]:
    """Losses below and above which the tilted distribution has at most `_OUTSIDE`, by Chernoff's inequality."""
    whole, goal = composition.log_mgf(tilt), -math.log(_OUTSIDE)
    # Of a small tilt no multiple is large, and from small ones alone the window would be up to a thousand times too wide.
    more = (1.0, 3.0) if tilt <= _LEAST_TILT else ()
    below, above = (*tilt * np.geomspace(1e-3, 1.0, 10), *more), (*tilt * np.geomspace(1e-3, 10.0, 13), *more)
    low = max((whole - composition.log_mgf(tilt - by) - goal) / by for by in below)
    high = min((composition.log_mgf(tilt + by) - whole + goal) / by for by in above)
    return float(low), float(high)


def _log_mgf(loss: GridLoss, tilt: float) -> float:
    """log Σ p_i·exp(tilt·l_i)."""
    logs = loss.logs + tilt * loss.losses
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))
