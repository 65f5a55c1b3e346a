"""Column normalisation: C̃ = C·D⁻¹ with unit columns, and so C̃⁻¹Z = D·(C⁻¹Z)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcgd.mechanisms.mechanism import Matrix, Mechanism, Vector
from fedcgd.mechanisms.toeplitz import Toeplitz


@dataclass(frozen=True)
class Normalized(Mechanism):
    """C·D⁻¹ for a Toeplitz C, D the norms of its columns cut at n.

    Appendix B of Kalinin, McKenna, Pagh and Lampert, "DP-λCGD: Efficient Noise Correlation for Differentially Private Model
    Training", 2026, arXiv:2601.22334.

    Args:
        mechanism: the Toeplitz C.

    >>> from fedcgd.mechanisms import LambdaCGD, matrix
    >>> matrix(Normalized(LambdaCGD(0.75)), 2).tolist()
    [[0.8, 0.0], [0.6, 1.0]]
    """

    mechanism: Toeplitz

    @property
    def name(self) -> str:  # type: ignore[override]
        """That of the Toeplitz mechanism."""
        return self.mechanism.name

    def bandwidth(self, rounds: int) -> int:
        """That of the Toeplitz mechanism."""
        return self.mechanism.bandwidth(rounds)

    def column_norms(self, rounds: int) -> Vector:
        """d_j = ‖C[:, j]‖₂: column j keeps the first n − j coefficients.

        Args:
            rounds: n, the releases of the run.

        Returns:
            Shape (rounds,), float64, read-only.
        """
        return _column_norms(self.mechanism, rounds)

    def columns(self, rounds: int, indices: NDArray[np.intp]) -> Matrix:
        return self.mechanism.columns(rounds, indices) / self.column_norms(rounds)[np.asarray(indices)]

    def inverse_row(self, round: int, rounds: int) -> Vector:
        return float(self.column_norms(rounds)[round]) * self.mechanism.inverse_row(round, rounds)

    def num_buffers(self, rounds: int) -> int:
        return self.mechanism.num_buffers(rounds)

    def inverse_bandwidth(self, rounds: int) -> int:
        return self.mechanism.inverse_bandwidth(rounds)

    def multiply_next(self, round: int, rounds: int, z: Any, buffers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        y, buffers = self.mechanism.multiply_next(round, rounds, z, buffers)
        return y * float(self.column_norms(rounds)[round]), buffers


@lru_cache(maxsize=8)  # every round of a run asks for the same
def _column_norms(mechanism: Toeplitz, rounds: int) -> Vector:
    norms = np.sqrt(np.cumsum(mechanism.coefficients(rounds) ** 2))[::-1]
    norms.setflags(write=False)
    return norms
