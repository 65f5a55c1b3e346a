"""Toeplitz mechanisms whose coefficients were found by optimisation: the value is the numbers, so that what ran is on record."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.toeplitz import ToeplitzMechanism, banded_next, padded, ratio, reciprocal


def _check(what: str, values: tuple[float, ...], *, first: bool) -> None:
    if not values or not all(math.isfinite(v) for v in values) or (first and values[0] <= 0):
        raise ValueError(f"{what} must be finite numbers, the first of them positive, got {values[:4]}…")


@dataclass(frozen=True)
class BandedToeplitz(ToeplitzMechanism):
    """C with the given first p coefficients (003, Section 3.2)."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        _check("coefficients", self.values, first=True)

    @property
    def name(self) -> str:
        return "banded-toeplitz"

    def coefficients(self, rounds: int) -> Vector:
        return padded(np.array(self.values), rounds)

    def inverse_coefficients(self, rounds: int) -> Vector:
        return reciprocal(np.array(self.values), rounds)

    def buffers(self, rounds: int) -> int:
        """The last p − 1 rounds of C⁻¹Z."""
        return min(len(self.values), rounds) - 1

    def next(self, round: int, rounds: int, z: Any, buffers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return banded_next(np.array(self.values[: round + 1]), z, buffers, self.buffers(rounds))


@dataclass(frozen=True)
class BandInvMF(ToeplitzMechanism):
    """C⁻¹ with the given first p coefficients (Kalinin et al., 2025)."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        _check("inverse coefficients", self.values, first=True)

    @property
    def name(self) -> str:
        return "band-inv-mf"

    def coefficients(self, rounds: int) -> Vector:
        return reciprocal(np.array(self.values), rounds)

    def inverse_coefficients(self, rounds: int) -> Vector:
        return np.array(self.values[:rounds])


@dataclass(frozen=True)
class BLT(ToeplitzMechanism):
    """Buffered linear Toeplitz: c_0 = 1 and c_t = Σ_i scales[i]·decays[i]^(t−1) (002, part 2).

    Its power series is the ratio of two polynomials of degree d, and so is its inverse: each needs only d buffers.
    """

    scales: tuple[float, ...]
    decays: tuple[float, ...]

    def __post_init__(self) -> None:
        _check("scales", self.scales, first=False)
        if len(self.scales) != len(self.decays) or not all(0 <= decay < 1 for decay in self.decays):
            raise ValueError(f"BLT needs as many decays in [0, 1) as scales, got {self.decays} for {self.scales}")

    @property
    def name(self) -> str:
        return "blt"

    def polynomials(self) -> tuple[Vector, Vector]:
        """(P, Q) with Σ c_t x^t = P(x)/Q(x), ascending powers, d + 1 coefficients each; the series of C⁻¹ is Q/P."""
        q = np.ones(1)
        for decay in self.decays:
            q = np.convolve(q, [1.0, -decay])
        p = q.copy()
        for i, scale in enumerate(self.scales):
            others = np.ones(1)
            for j, decay in enumerate(self.decays):
                if j != i:
                    others = np.convolve(others, [1.0, -decay])
            p[1:] += scale * others
        return p, q

    def coefficients(self, rounds: int) -> Vector:
        powers = np.power(np.array(self.decays)[:, None], np.arange(rounds - 1)[None, :])
        return np.concatenate([[1.0], np.array(self.scales) @ powers])

    def inverse_coefficients(self, rounds: int) -> Vector:
        p, q = self.polynomials()
        return ratio(q, p, rounds)

    def buffers(self, rounds: int) -> int:
        """Σ_{j<t} decays[i]^(t−1−j)·(C⁻¹Z)_j for each i."""
        return len(self.scales)

    def next(self, round: int, rounds: int, z: Any, buffers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        if round == 0:
            return z, (z,) * len(self.scales)
        y = z
        for scale, buffer in zip(self.scales, buffers, strict=True):
            y = y - buffer * scale
        return y, tuple(buffer * decay + y for decay, buffer in zip(self.decays, buffers, strict=True))
