"""Whether a Hessian measured once bounds the Hessians met later: the dominance certificate ρ, on public data."""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh
from torch import Tensor

from fedcgd.curvature.hessian import Hessian
from fedcgd.curvature.lanczos import largest_eigenpairs

Matrix = NDArray[np.float64]

_TOLERANCE = 1e-10  # of rounding, relative to the largest entry, for each row


class CurvatureWarning(UserWarning):
    """A Hessian is not bounded by the one that the noise was fitted to."""


def dominance(hessian: Matrix, bound: Matrix) -> float:
    """ρ(H, Ĥ) = max over v of vᵀHv / vᵀĤv with 0/0 = 0, for symmetric H and a Ĥ that has no negative eigenvalues.

    H ⪯ Ĥ exactly if ρ ≤ 1: Theorem 5.1 of Gu et al., "Correlating Cross-Iteration Noise for DP-SGD using Model Curvature", 2026,
    arXiv:2510.05416. Infinite where H curves upwards in a direction in which Ĥ is flat, as it nearly always is for a network:
    `Reference` has the measure for those. Eigenvalues of Ĥ within 1e-10 n of the largest entry count as 0.

    Args:
        hessian: H, shape (d, d).
        bound: Ĥ, shape (d, d).

    Raises:
        ValueError: if Ĥ has a negative eigenvalue.

    >>> round(dominance(np.diag([1.0, 1.0]), np.diag([2.0, 4.0])), 6)
    0.5
    """
    scale = max(float(np.abs(bound).max()), float(np.abs(hessian).max()))
    if scale == 0:
        return 0.0
    zero = _TOLERANCE * scale * len(bound)
    values, vectors = eigh(bound)
    if values[0] < -zero:
        raise ValueError(f"the bound must have no negative eigenvalues, got {values[0]:.3g}; set them to 0")
    curved = values > zero
    flat, steep = vectors[:, ~curved], vectors[:, curved]
    across = steep.T @ hessian @ flat
    along_flat = flat.T @ hessian @ flat
    inner = steep.T @ hessian @ steep
    if flat.shape[1]:
        sizes, directions = eigh(along_flat)
        level = np.abs(sizes) <= zero
        if sizes[-1] > zero:
            return float("inf")
        if np.abs(across @ directions[:, level]).max(initial=0.0) > zero:
            return float("inf")  # a little of the flat direction makes vᵀĤv as small, against vᵀHv, as one likes
        down = across @ directions[:, ~level]
        inner = inner - down @ np.diag(1 / sizes[~level]) @ down.T
    if not curved.any():
        return 0.0
    root = np.sqrt(values[curved])
    return float(eigh(inner / np.outer(root, root), eigvals_only=True)[-1])


@dataclass(frozen=True, eq=False)
class Reference:
    """The bound Ĥ = Σ_i μ_i·u_i·u_iᵀ + `damping`·I, from the largest eigenpairs of a Hessian on public data.

    Args:
        values: μ_i, the largest eigenvalues, shape (k,).
        vectors: u_i, shape (d, k).
        damping: what stands for the eigenvalues that are not known, which are all below it: the smallest of the known ones.
    """

    values: NDArray[np.float64]
    vectors: Tensor
    damping: float

    @staticmethod
    def from_hessian(hessian: Hessian, *, eigenvalues: int = 20) -> "Reference":
        """The bound from a Hessian's own largest eigenvalues; keeps k·d numbers.

        Args:
            hessian: on public data.
            eigenvalues: k, how many are found; those that are not positive are left out.

        Raises:
            ValueError: if none is positive.
        """
        values, vectors = largest_eigenpairs(
            hessian.product, hessian.dimension, eigenvalues, dtype=hessian.dtype, vectors=True
        )
        assert vectors is not None
        positive = values > 0
        if not positive.any():
            raise ValueError(f"the largest eigenvalue is {values[0]:.3g}: a Hessian that curves nowhere bounds nothing")
        columns = torch.from_numpy(np.ascontiguousarray(vectors[:, positive])).to(hessian.device)
        return Reference(values[positive], columns, float(values[positive][-1]))

    def dominance(self, hessian: Hessian, *, warn: bool = True) -> float:
        """ρ(H, Ĥ) of `hessian` against this bound: how much Ĥ would have to be scaled up to bound H. ρ ≤ 1: it does.

        Args:
            hessian: of public data too. The model may be a private run's, as soon as it is released; examples may not: a ρ of
                private data tells about them and is covered by no ε.
            warn: whether there is a `CurvatureWarning` if ρ > 1.

        Raises:
            ValueError: for a model with another number of parameters.
        """
        self._check(hessian)
        weights = torch.as_tensor((self.values + self.damping) ** -0.5 - self.damping**-0.5).to(self.vectors)

        def scaled(vector: Tensor) -> Tensor:
            vector = vector.to(self.vectors)
            result: Tensor = self.damping**-0.5 * vector + self.vectors @ (weights * (self.vectors.T @ vector))
            return result

        values, _ = largest_eigenpairs(
            lambda v: scaled(hessian.product(scaled(v))), hessian.dimension, 1, dtype=hessian.dtype
        )
        rho = max(float(values[0]), 0.0)
        if warn and rho > 1:
            warnings.warn(
                f"the Hessian is up to {rho:.3g} times what the noise was fitted to (ρ > 1): fit it to a spectrum that is scaled "
                f"by {rho:.3g}, or lower the learning rate",
                CurvatureWarning,
                stacklevel=2,
            )
        return rho

    def eigenvalue_ratio(self, hessian: Hessian) -> float:
        """The largest μ_i(H) / μ_i(Ĥ) over the eigenvalues that are known of Ĥ, without its damping, each sorted by size.

        What the choice of noise asks for: noise is the same in all directions, so that it matters little if steep ones turn, and
        the spectrum alone counts. H ⪯ Ĥ bounds it by 1, not the other way round.

        Args:
            hessian: of public data too.

        Raises:
            ValueError: for a model with another number of parameters.
        """
        self._check(hessian)
        found, _ = largest_eigenpairs(hessian.product, hessian.dimension, len(self.values), dtype=hessian.dtype)
        return float((found / self.values).max())

    def _check(self, hessian: Hessian) -> None:
        if hessian.dimension != len(self.vectors):
            raise ValueError(f"the bound is for {len(self.vectors)} parameters, and the model has {hessian.dimension}")
