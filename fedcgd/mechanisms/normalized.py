"""Column normalisation: C̃ = C·D⁻¹ with unit columns, and so C̃⁻¹Z = D·(C⁻¹Z)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcgd.mechanisms.mechanism import Matrix, Toeplitz, Vector


@dataclass(frozen=True)
class Normalized:
    """C·D⁻¹ for a Toeplitz `mechanism`, D the norms of its columns cut at n (Appendix B of arXiv:2601.22334)."""

    mechanism: Toeplitz

    @property
    def name(self) -> str:
        return self.mechanism.name

    def column_norms(self, rounds: int) -> Vector:
        """d_j = ‖C[:, j]‖₂, shape (rounds,): column j keeps the first n − j coefficients."""
        return np.sqrt(np.cumsum(self.mechanism.coefficients(rounds) ** 2))[::-1]

    def columns(self, rounds: int, indices: NDArray[np.intp]) -> Matrix:
        return self.mechanism.columns(rounds, indices) / self.column_norms(rounds)[np.asarray(indices)]

    def inverse_row(self, round: int, rounds: int) -> Vector:
        return float(self.column_norms(rounds)[round]) * self.mechanism.inverse_row(round, rounds)
