"""Eigenvalues by products with vectors alone: the largest ones, and how many there are of every size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

Vector = NDArray[np.float64]
Product = Callable[[Tensor], Tensor]
"""v → A·v for a symmetric A."""


def largest_eigenvalues(product: Product, dimension: int, count: int, *, dtype: torch.dtype, seed: int = 0) -> Vector:
    """The `count` largest eigenvalues, falling.

    By implicitly restarted Lanczos (ARPACK), which keeps 2·`count` + 1 vectors, at least 20. Raises ValueError if it does not
    converge, or for a `count` that is not in 1 … `dimension` − 1.
    """
    if not 1 <= count < dimension:
        raise ValueError(f"between 1 and {dimension - 1} of the {dimension} eigenvalues can be asked for, got {count}")
    numpy_dtype = np.float64 if dtype == torch.float64 else np.float32
    start = np.random.default_rng(seed).standard_normal(dimension).astype(numpy_dtype)

    def matvec(vector: NDArray[np.floating]) -> NDArray[np.floating]:
        result: NDArray[np.floating] = (
            product(torch.from_numpy(np.ascontiguousarray(vector).reshape(-1)).to(dtype)).cpu().numpy()
        )
        return result

    operator = LinearOperator((dimension, dimension), matvec=matvec, dtype=numpy_dtype)
    # To 1e-6 of each eigenvalue: what is fitted to them, and to a learning rate, is not known more closely.
    tolerance = 1e-6 if numpy_dtype == np.float64 else 1e-4
    try:
        search: Any = eigsh  # its stubs do not know this operator
        found = search(operator, k=count, which="LA", v0=start, tol=tolerance, return_eigenvectors=False)
    except ArpackNoConvergence as error:
        raise ValueError(
            f"{len(error.eigenvalues)} of {count} eigenvalues converged; ask for fewer, or use float64"
        ) from error
    return np.sort(np.asarray(found, np.float64))[::-1]


@dataclass(frozen=True, eq=False)
class Density:
    """How a matrix' d eigenvalues are spread: `values` with `weights`, each of shape (probes, steps); a probe's weights sum to 1.

    An estimate by stochastic Lanczos quadrature: each probe alone is one, and their spread says how far to trust the mean.
    """

    dimension: int
    values: Vector
    weights: Vector

    def count_above(self, threshold: float) -> tuple[float, float]:
        """(about how many eigenvalues are at least `threshold`, the standard error of that over the probes)."""
        return self._mean((self.weights * (self.values >= threshold)).sum(axis=1))

    def sum_positive(self) -> tuple[float, float]:
        """(about the sum of the positive eigenvalues, its standard error over the probes)."""
        return self._mean((self.weights * np.maximum(self.values, 0)).sum(axis=1))

    def at(self, positions: Vector) -> Vector:
        """About the eigenvalues at `positions`, counted from 1 for the largest; the smallest one behind the last."""
        values, weights = self.values.reshape(-1), self.weights.reshape(-1)
        order = np.argsort(values)[::-1]
        reached = np.cumsum(weights[order]) * self.dimension / len(self.values)
        return values[order][np.minimum(np.searchsorted(reached, positions), len(order) - 1)]

    def _mean(self, shares: Vector) -> tuple[float, float]:
        error = float(shares.std(ddof=1)) / len(shares) ** 0.5 if len(shares) > 1 else float("inf")
        return self.dimension * float(shares.mean()), self.dimension * error


def density(
    product: Product,
    dimension: int,
    *,
    probes: int,
    steps: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Density:
    """The density of the eigenvalues, from `probes` random vectors and `steps` products each; keeps three vectors.

    Stochastic Lanczos quadrature: Chen, Trogdon and Ubaru, "Analysis of stochastic Lanczos quadrature for spectrum
    approximation", 2021, arXiv:2105.06595. Eigenvalues that are closer together than about 1/steps² of the whole range are not
    told apart.
    """
    if probes < 1 or steps < 1:
        raise ValueError(f"there must be at least one probe of one step, got {probes} probes of {steps} steps")
    generator = torch.Generator().manual_seed(seed)
    steps = min(steps, dimension)
    values, weights = np.zeros((probes, steps)), np.zeros((probes, steps))
    for probe in range(probes):
        start = torch.randn(dimension, generator=generator, dtype=torch.float64).to(device, dtype)
        diagonal, beside = tridiagonal(product, start, steps)
        ritz, vectors = eigh_tridiagonal(diagonal, beside)
        values[probe, : len(ritz)], weights[probe, : len(ritz)] = ritz, vectors[0] ** 2
    return Density(dimension, values, weights)


def tridiagonal(product: Product, start: Tensor, steps: int) -> tuple[Vector, Vector]:
    """The diagonal and the off-diagonal of T, which A acts as in the basis that `start` begins: at most `steps` products.

    The vectors are not made orthogonal to all earlier ones, which would keep them: an eigenvalue may then come twice, with its
    weight shared out, which does no harm to sums.
    """
    diagonal: list[float] = []
    beside: list[float] = []
    previous, vector = torch.zeros_like(start), start / torch.linalg.vector_norm(start)
    for _ in range(steps):
        image = product(vector)
        along = float(torch.dot(image, vector))
        image = image - along * vector - (beside[-1] if beside else 0.0) * previous
        diagonal.append(along)
        length = float(torch.linalg.vector_norm(image))
        scale = max(map(abs, diagonal)) + max(beside, default=0.0)
        if length <= 1e-6 * scale * (1e-4 if image.dtype == torch.float64 else 1):
            break  # the vectors so far span a space that A leaves: T knows all that `start` can tell
        beside.append(length)
        previous, vector = vector, image / length
    return np.array(diagonal), np.array(beside[: len(diagonal) - 1])
