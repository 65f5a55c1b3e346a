"""BLT: coefficients that are a sum of exponentials, so that C⁻¹Z needs only as many buffers as there are of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.toeplitz import Toeplitz, checked_values


@dataclass(frozen=True)
class BLT(Toeplitz):
    """Buffered linear Toeplitz: c_0 = 1 and c_t = Σ_i scales[i]·decays[i]^(t−1).

    Dvijotham et al., "Efficient and Near-Optimal Noise Generation for Streaming Differential Privacy", 2024, arXiv:2404.16706.

    Its inverse is of the same kind, and C⁻¹Z needs only d buffers.

    Args:
        scales: d numbers, none negative.
        decays: as many numbers in [0, 1).

    Raises:
        ValueError: for other numbers.
        TypeError: for a list in place of a tuple.

    >>> BLT((0.5, 0.1), (0.9, 0.5)).coefficients(3).round(3).tolist()
    [1.0, 0.6, 0.5]
    """

    name = "blt"
    scales: tuple[float, ...]
    decays: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "scales", checked_values("scales", self.scales, first=False))
        object.__setattr__(self, "decays", checked_values("decays", self.decays, first=False))
        if min(self.scales) < 0:
            raise ValueError(f"scales must not be negative, got {self.scales}")
        if len(self.scales) != len(self.decays) or not all(0 <= decay < 1 for decay in self.decays):
            raise ValueError(f"BLT needs as many decays in [0, 1) as scales, got {self.decays} for {self.scales}")

    def coefficients(self, rounds: int) -> Vector:
        return _exponentials(np.array(self.scales), np.array(self.decays), rounds)

    def inverse_coefficients(self, rounds: int) -> Vector:
        # With v = √scales, c_t = vᵀ·diag(decays)^(t−1)·v and c⁻¹_t = −vᵀ·(diag(decays) − v·vᵀ)^(t−1)·v. The roots of polynomials
        # would tell less: for decays near 1 they lose half of the digits.
        root = np.sqrt(self.scales)
        decays, directions = np.linalg.eigh(np.diag(self.decays) - np.outer(root, root))
        return _exponentials(-((root @ directions) ** 2), decays, rounds)

    def num_buffers(self, rounds: int) -> int:
        """Σ_{j<t} decays[i]^(t−1−j)·(C⁻¹Z)_j for each i."""
        return len(self.scales)

    def inverse_bandwidth(self, rounds: int) -> int:
        return rounds

    def multiply_next(self, round: int, rounds: int, z: Any, buffers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        if round == 0:
            return z, (z,) * len(self.scales)
        y = z
        for scale, buffer in zip(self.scales, buffers, strict=True):
            y = y - buffer * scale
        return y, tuple(buffer * decay + y for decay, buffer in zip(self.decays, buffers, strict=True))


def _exponentials(scales: Vector, decays: Vector, rounds: int) -> Vector:
    """1, then Σ_i scales[i]·decays[i]^(t−1) for t = 1 … rounds − 1."""
    result = np.ones(rounds)
    result[1:] = 0
    for scale, decay in zip(scales, decays, strict=True):
        result[1:] += scale * np.power(decay, np.arange(rounds - 1))
    return result
