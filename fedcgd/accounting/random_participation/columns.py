"""Columns with a geometric tail, which the accounting follows: C[i, j] = d_j·c(i − j), c(u) = A·λ^u from lag b on.

Two rounds of one user are at least b apart, so that only the tail of an earlier column meets a later one; and what a geometric
tail brings is one number, q = Σ λ^(t−s)·d_s over the earlier rounds s. C with at most b bands has no tail (A = 0), and λ-CGD,
also with unit columns, is exactly of this form. To a C with at most b bands earlier rounds bring nothing, and it is followed as
it is, also where each column is another (`BandedColumns`). Any other C ≥ 0 is replaced by a larger one of this form: δ does not
fall when an entry of the Gram matrix CᵀC grows (docs: proofs.md), so that this errs upwards. To cut C to b bands would err
downwards.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
import scipy
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.sparse import csr_array, dia_array

from fedcgd.accounting.coverage import non_negative
from fedcgd.accounting.tolerances import TOLERANCES
from fedcgd.mechanisms import LambdaCGD, Mechanism, Normalized, Toeplitz
from fedcgd.mechanisms.mechanism import Matrix, Vector, check_dense

_LARGEST_AMPLITUDE = 1e4  # of c(0): A·λ^u is taken off the head again, which loses so many digits
_SAMPLING = "a sampling of secret rounds"
_NOTHING = 1e-300  # a coefficient that no double tells from none


@dataclass(frozen=True, eq=False)
class Columns:
    """C[i, j] = `scales`[j]·c(i − j) for n rounds, c = `head` for lags below b, and `amplitude`·`ratio`^lag from b on."""

    head: Vector
    """Shape (b,), or (n,) if that is less."""
    amplitude: float
    ratio: float
    scales: Vector
    """Shape (n,)."""
    exact: bool
    """Whether this is C itself, and nothing larger."""
    rounding: ClassVar[float] = 1e-8
    """Double precision changes log S by less."""

    @property
    def rounds(self) -> int:
        """n."""
        return len(self.scales)

    @property
    def width(self) -> int:
        """How many bands C has besides the tail."""
        return len(self._band)

    @cached_property
    def entries(self) -> Vector:
        """Numbers that C follows from, the same however its unit is shared between column and scales."""
        return np.concatenate([self.column / self.column[0], self.scales * self.column[0]])

    @cached_property
    def column(self) -> Vector:
        """c, shape (n,)."""
        tail = self.amplitude * self.ratio ** np.arange(len(self.head), self.rounds, dtype=float)
        return np.concatenate([self.head, tail])

    @cached_property
    def squares(self) -> Vector:
        """‖C[:, t]‖², shape (n,)."""
        return np.asarray(self.scales**2 * np.cumsum(self.column**2)[::-1])

    @cached_property
    def tail_products(self) -> Vector:
        """⟨C[:, t], v⟩ per unit of q, where v_{t+u} = A·λ^u is what earlier columns bring; shape (n,)."""
        powers = self.ratio ** np.arange(self.rounds, dtype=float)
        return np.asarray(self.scales * self.amplitude * np.cumsum(self.column * powers)[::-1])

    def products(self, lag: int) -> Vector:
        """⟨C[:, t], C[:, t − lag]⟩ for each t, shape (n,); 0 for t < lag."""
        result = np.zeros(self.rounds)
        kept = self.rounds - lag
        if kept > 0:
            sums = np.cumsum(self.column[:kept] * self.column[lag:])[::-1]
            result[lag:] = sums * self.scales[lag:] * self.scales[:kept]
        return result

    @cached_property
    def near(self) -> Matrix:
        """⟨C[:, t], C[:, t − lag]⟩ beyond what is geometric, `tail_products`·λ^lag·`scales`; shape (`width`, n), by lag and t."""
        result, n, width = np.zeros((self.width, self.rounds)), self.rounds, self.width
        for lag in range(width):
            terms = np.zeros(n - lag)
            terms[: width - lag] = self.column[: width - lag] * self._band[lag:]
            result[lag, lag:] = np.cumsum(terms)[::-1] * self.scales[lag:] * self.scales[: n - lag]
        return result

    @cached_property
    def largest_tail(self) -> float:
        """The most that q can be in a round in which a user may take part: b rounds after the last, 2b after the one before, …"""
        if not self.amplitude:
            return 0.0
        power = self.ratio ** len(self.head)
        return float(self.scales.max()) * power / (1 - power)

    def forward(self, x: Matrix) -> Matrix:
        """C·x for x of shape (n, m)."""
        return self._product(x * self.scales[:, None], transposed=False)

    def adjoint(self, y: Matrix) -> Matrix:
        """Cᵀ·y for y of shape (n, m)."""
        result = self._product(y, transposed=True)
        result *= self.scales[:, None]
        return result

    def noise(self, generator: np.random.Generator, count: int) -> Matrix:
        """⟨C[:, t], z⟩ of standard normal z, shape (n, draws)."""
        return self.adjoint(generator.standard_normal((self.rounds, count)))

    def lifted(self, turns: NDArray[np.int32], noise: Matrix) -> tuple[Matrix, Vector, Vector]:
        """With v the sum of C1_P over the users of a tuple: ⟨C[:, t], v⟩, shape (n, tuples); ⟨v, z⟩ by the `noise`; and |v|²."""
        n, count = self.rounds, turns.shape[-1]
        places = turns * np.int64(count) + np.arange(count)
        some, size = turns < n, n * count
        often = np.asarray(np.bincount(places[some], some[some], size), dtype=float).reshape(n, count)
        lift = self.adjoint(self.forward(often))
        places[~some] = 0
        along, square = (np.einsum("abj,abj->j", of.ravel()[places], some) for of in (noise, lift))
        return lift, along, square

    @cached_property
    def _band(self) -> Vector:
        """c less its geometric part, up to the last entry that is not zero."""
        band = self.head - self.amplitude * self.ratio ** np.arange(len(self.head), dtype=float)
        band[np.abs(band) < 1e-15 * self.head.max()] = 0.0
        used = np.flatnonzero(band)
        return band[: used[-1] + 1] if len(used) else band[:0]

    def _product(self, x: Matrix, *, transposed: bool) -> Matrix:
        """With the matrix of c, or with its transpose."""
        if not self.amplitude:
            return self._banded(x, transposed=transposed)
        step = 1 if transposed else -1
        result = _geometric_sums(x[::step], self.amplitude, self.ratio)[::step]
        return result + self._banded(x, transposed=transposed) if self.width else result

    def _banded(self, x: Matrix, *, transposed: bool) -> Matrix:
        """The product with the band of c, or with its transpose."""
        width = len(self._band)
        if width <= TOLERANCES.memory.sparse:
            return np.asarray(self._matrices[transposed] @ x)
        backwards = -1 if transposed else 1
        return np.asarray(
            scipy.signal.fftconvolve(x[::backwards], self._band[:, None], axes=0)[: self.rounds][::backwards]
        )

    @cached_property
    def _matrices(self) -> tuple[csr_array, csr_array]:
        """The band as a matrix, and its transpose."""
        return _sparse(np.tile(self._band, (self.rounds, 1)))


@dataclass(frozen=True, eq=False)
class BandedColumns(Columns):
    """C[j + l, j] = `band`[j, l] with at most b bands: `head` is the largest entry by lag, and there is no tail."""

    band: Matrix
    """Shape (n, p), p ≤ b; 0 where j + l ≥ n."""

    @property
    def width(self) -> int:
        """How many bands C has."""
        return int(self.band.shape[1])

    @cached_property
    def entries(self) -> Vector:
        """Numbers that C follows from."""
        return self.band.ravel()

    @cached_property
    def squares(self) -> Vector:
        """‖C[:, t]‖², shape (n,)."""
        return np.asarray((self.band**2).sum(axis=1))

    def products(self, lag: int) -> Vector:
        """⟨C[:, t], C[:, t − lag]⟩ for each t, shape (n,); 0 for t < lag."""
        result = np.zeros(self.rounds)
        width = self.band.shape[1] - lag
        if width > 0:
            result[lag:] = (self.band[lag:, :width] * self.band[: self.rounds - lag, lag:]).sum(axis=1)
        return result

    @cached_property
    def near(self) -> Matrix:
        """⟨C[:, t], C[:, t − lag]⟩, shape (`width`, n), by lag and t."""
        return np.stack([self.products(lag) for lag in range(self.width)])

    def _banded(self, x: Matrix, *, transposed: bool) -> Matrix:
        return np.asarray(self._matrices[transposed] @ x)

    @cached_property
    def _matrices(self) -> tuple[csr_array, csr_array]:
        """C and its transpose."""
        return _sparse(self.band)


def _geometric_sums(x: Matrix, amplitude: float, ratio: float) -> Matrix:
    """Σ_s amplitude·ratio^(s − t)·x_s over s ≥ t; a few t at once, from those of the next one."""
    result = np.zeros((len(x) + 1, x.shape[1]))
    np.multiply(x, amplitude, out=result[:-1])
    some = TOLERANCES.memory.steps
    lags = np.arange(some + 1)
    powers = np.triu(ratio ** np.abs(lags - lags[:, None]))
    for end in range(len(x), 0, -some):
        start = max(0, end - some)
        result[start:end] = powers[: end - start, : end - start + 1] @ result[start : end + 1]
    return result[:-1]


def _sparse(band: Matrix) -> tuple[csr_array, csr_array]:
    """The matrix with entries `band`[j, l] at (j + l, j), and its transpose."""
    n, width = band.shape
    c = dia_array((band.T, -np.arange(width)), shape=(n, n))
    return c.tocsr(), c.T.tocsr()


@lru_cache(maxsize=8)
def columns_of(mechanism: Mechanism, rounds: int, separation: int, released: int) -> Columns:
    """The columns of C, or larger ones, for the first `released` of `rounds` rounds and rounds of a user `separation` apart.

    Raises ValueError if an entry of C is negative, by more than rounding: then the worst inputs are not known.
    """
    toeplitz = mechanism.mechanism if isinstance(mechanism, Normalized) else mechanism
    scales = np.ones(released)
    if isinstance(mechanism, Normalized):
        scales = 1 / mechanism.column_norms(rounds)[:released]
    if isinstance(toeplitz, Toeplitz):
        column = np.asarray(toeplitz.coefficients(rounds), dtype=float)[:released]
        exact = True
    elif mechanism.bandwidth(rounds) <= separation:
        band = non_negative(_band(mechanism, rounds, released), mechanism.name, _SAMPLING)
        return BandedColumns(band.max(axis=0), 0.0, 0.0, np.ones(len(band)), True, band)
    else:
        column, exact = _largest_column(mechanism, rounds, released), False
    column = non_negative(column, mechanism.name, _SAMPLING)
    if not column[0] > 0:
        raise ValueError(f"{mechanism.name}: the diagonal of C must be positive, got {column[0]:g}: C has no inverse")
    b = min(separation, released)
    if toeplitz.bandwidth(rounds) <= separation or not (column[b:] > _NOTHING).any():
        return Columns(column[:b], 0.0, 0.0, scales, exact)
    if isinstance(toeplitz, LambdaCGD):
        return Columns(column[:b], 1.0, toeplitz.lam, scales, exact)
    amplitude, ratio = _dominating_tail(column, b)
    return Columns(column[:b], amplitude, ratio, scales, False)


def _band(mechanism: Mechanism, rounds: int, released: int) -> Matrix:
    """C[j + l, j] by j and l, of the first `released` rounds."""
    width = min(mechanism.bandwidth(rounds), released)
    band = np.zeros((released, width))
    for start in range(0, released, TOLERANCES.memory.rows):
        indices = np.arange(start, min(start + TOLERANCES.memory.rows, released))
        columns = mechanism.columns(rounds, indices)[:released]
        for lag in range(width):
            inside = indices[indices + lag < released]
            band[inside, lag] = columns[inside + lag, inside - start]
    return band


def _largest_column(mechanism: Mechanism, rounds: int, released: int) -> Vector:
    """max_j C[j + u, j] for each lag u."""
    check_dense(f"the accounting of {mechanism.name} under random participation", rounds)
    largest = np.zeros(released)
    for start in range(0, released, TOLERANCES.memory.rows):
        indices = np.arange(start, min(start + TOLERANCES.memory.rows, released))
        columns = non_negative(mechanism.columns(rounds, indices)[:released], mechanism.name, _SAMPLING)
        for place, j in enumerate(indices):
            np.maximum(largest[: released - j], columns[j:, place], out=largest[: released - j])
    return largest


def _dominating_tail(column: Vector, start: int) -> tuple[float, float]:
    """(A, λ) with A·λ^u ≥ column[u] for u ≥ `start`, of about the least sum, and A not so large that it takes digits."""
    lags = np.flatnonzero(column[start:] > _NOTHING) + start
    logs = np.log(column[lags])
    fastest = float(np.max((logs - math.log(_LARGEST_AMPLITUDE * column[0])) / lags))  # the least log λ for this A

    def log_amplitude(log_ratio: float) -> float:
        return float(np.max(logs - lags * log_ratio))

    def log_sum(log_gap: float) -> float:
        log_ratio = -math.exp(log_gap)
        count = len(column) - start
        total = -math.expm1(count * log_ratio) / -math.expm1(log_ratio)
        return log_amplitude(log_ratio) + start * log_ratio + math.log(total)

    bounds = (math.log(1e-9), math.log(max(1e-8, -fastest)))
    found = minimize_scalar(log_sum, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    log_ratio = -math.exp(float(found.x))
    return math.exp(log_amplitude(log_ratio)) * (1 + 1e-12), math.exp(log_ratio)
