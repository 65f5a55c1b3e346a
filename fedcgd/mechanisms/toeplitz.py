"""What all mechanisms share whose C is one sequence of coefficients: series, their inverses, and matrices made of them."""

import math
from abc import abstractmethod
from functools import lru_cache
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from fedcgd.mechanisms.mechanism import Matrix, Mechanism, Vector
from fedcgd.support.numbers import as_float, as_whole

_DIRECT = 2**24  # entries of a band up to which the plain recurrence is used, which rounds least: 128 MiB


class Toeplitz(Mechanism):
    """C[i, j] = c[i − j], and so C⁻¹[i, j] = c⁻¹[i − j]. A subclass gives c and c⁻¹, from which the matrices follow.

    Raises TypeError for a subclass with matrices of its own: its ε would be that of one C, and its noise of another.
    """

    def __init_subclass__(cls) -> None:
        follow = ("bandwidth", "columns", "inverse_row")
        if own := [name for name in follow if getattr(cls, name) is not getattr(Toeplitz, name)]:
            raise TypeError(
                f"{cls.__name__} has its own {', '.join(own)}, which follow from the coefficients of a Toeplitz C: leave "
                "them out, or inherit Mechanism"
            )

    @abstractmethod
    def coefficients(self, rounds: int) -> Vector:
        """The first column of C: c_0, c_1, …

        Args:
            rounds: n, the releases of the run.

        Returns:
            Shape (rounds,), float64.
        """

    @abstractmethod
    def inverse_coefficients(self, rounds: int) -> Vector:
        """The first column of C⁻¹, up to its last entry that is not zero.

        Args:
            rounds: n, the releases of the run.

        Returns:
            At most shape (rounds,), float64.
        """

    def bandwidth(self, rounds: int) -> int:
        return int(np.flatnonzero(self.coefficients(rounds))[-1]) + 1

    def columns(self, rounds: int, indices: NDArray[np.intp]) -> Matrix:
        c = self.coefficients(rounds)
        lags = np.arange(rounds)[:, None] - np.asarray(indices)[None, :]
        return np.where(lags >= 0, c[np.maximum(lags, 0)], 0.0)

    def inverse_row(self, round: int, rounds: int) -> Vector:
        return _inverse(self, rounds)[: round + 1]


class BandedToeplitzMechanism(Toeplitz):
    """C has the coefficients `band` and no others, and C⁻¹Z follows from its last rounds."""

    @property
    @abstractmethod
    def band(self) -> Vector:
        """c_0 … c_{p−1}, shape (p,)."""

    def coefficients(self, rounds: int) -> Vector:
        return padded(self.band, rounds)

    def inverse_coefficients(self, rounds: int) -> Vector:
        return reciprocal(self.band, rounds)

    def num_buffers(self, rounds: int) -> int:
        """The last p − 1 rounds of C⁻¹Z."""
        return min(len(self.band), rounds) - 1

    def inverse_bandwidth(self, rounds: int) -> int:
        return rounds

    def multiply_next(self, round: int, rounds: int, z: Any, buffers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return banded_next(self.band[: round + 1], z, buffers, self.num_buffers(rounds))


class BandedInverseMechanism(Toeplitz):
    """C⁻¹ has the coefficients `inverse_band` and no others: a replay makes as many noise vectors as there are of them."""

    @property
    @abstractmethod
    def inverse_band(self) -> Vector:
        """The first column of C⁻¹ up to its last entry that is not zero, shape (p,)."""

    def coefficients(self, rounds: int) -> Vector:
        return reciprocal(self.inverse_band, rounds)

    def inverse_coefficients(self, rounds: int) -> Vector:
        return np.array(self.inverse_band[:rounds])


@lru_cache(maxsize=4)  # every round of a run asks for the same
def _inverse(mechanism: Toeplitz, rounds: int) -> Vector:
    """The first column of C⁻¹ for n = `rounds`, on which C may depend; read-only."""
    inverse = np.array(mechanism.inverse_coefficients(rounds), dtype=np.float64)
    inverse.setflags(write=False)
    return inverse


def reciprocal(series: Vector, rounds: int) -> Vector:
    """The first `rounds` coefficients of 1/Σ series[i]·x^i; O(n·p) for p coefficients, or O(n log n) if less.

    Raises ValueError if series[0] is 0: there is no such series, and C has no inverse.
    """
    if series[0] == 0:
        raise ValueError(
            f"the first coefficient of a series must not be 0, got {series[:4].tolist()}…: C would have no inverse"
        )
    series = series[:rounds]
    if rounds * len(series) <= _DIRECT:
        return divided(series, np.eye(1, rounds)[0])
    inverse = np.array([1 / series[0]])
    while len(inverse) < rounds:  # Newton's iteration doubles the number of right coefficients
        room = np.zeros(min(2 * len(inverse), rounds) - len(inverse))
        correction = -convolved(series, np.concatenate([inverse, room]))
        correction[0] += 2
        inverse = convolved(inverse, correction)
    return inverse


def divided(series: Vector, x: Matrix) -> Matrix:
    """y with Σ_l series[l]·y[t − l] = x[t], the shape of `x`, whose columns are divided each: the recurrence, in O(n·p) each."""
    return solved(np.tile(series[: len(x)], (len(x), 1)), x)


def solved(band: Matrix, x: Matrix, *, transposed: bool = False) -> Matrix:
    """C⁻¹·x or C⁻ᵀ·x of the C with C[j + l, j] = band[j, l], in O(n·p) for each column; what lies outside C is not read.

    Args:
        band: shape (n, p), the first column, C's diagonal, without a 0.
        x: shape (n,) or (n, m).
        transposed: whether C is transposed.

    Raises:
        ValueError: if the diagonal has a 0.
    """
    y, failed = scipy.linalg.lapack.dtbtrs(band.T, x.reshape(len(x), -1), uplo="L", trans="T" if transposed else "N")
    if failed:
        raise ValueError(f"C has no inverse: its diagonal is 0 in row {failed - 1}")
    return np.asarray(y).reshape(x.shape)


def convolved(series: Vector, x: Matrix) -> Matrix:
    """Σ_l series[l]·x[t − l], the shape of `x`, whose columns are multiplied each: by Fourier transforms, in O(n log n) each.

    Rounding is in parts of ‖series‖·‖column‖, also where the terms of a row are few and small.
    """
    size = scipy.fft.next_fast_len(len(series) + len(x) - 1, real=True)
    columns = x.reshape(len(x), -1)
    spectrum = np.fft.rfft(series, size)[:, None] * np.fft.rfft(columns, size, axis=0)
    return np.asarray(np.fft.irfft(spectrum, size, axis=0)[: len(x)]).reshape(x.shape)


def power_coefficients(rounds: int, power: float, decay: float = 1.0) -> Vector:
    """The first `rounds` coefficients of (1 − decay·x)^power.

    For power −1/2 they are binom(2t, t)/4^t·decay^t ~ decay^t/√(πt); for +1/2, −decay^t·t^(−3/2)/(2√π) for large t.
    """
    t = np.arange(1, rounds)
    return np.concatenate([[1.0], np.cumprod((t - 1 - power) / t * decay)])


def banded_next(entries: Vector, z: Any, buffers: tuple[Any, ...], num_buffers: int) -> tuple[Any, tuple[Any, ...]]:
    """(C⁻¹Z)_t where row t of C is `entries`, newest first, and `buffers` are (C⁻¹Z)_{t−1}, (C⁻¹Z)_{t−2}, …

    The buffers of the next round, `num_buffers` at most, are returned in second place.
    """
    for entry, earlier in zip(entries[1:], buffers, strict=True):
        z = z - earlier * float(entry)
    y = z / float(entries[0])
    return y, (y, *buffers)[:num_buffers]


def padded(values: Vector, rounds: int) -> Vector:
    """`values` cut or filled with zeros to length `rounds`."""
    result = np.zeros(rounds)
    result[: min(len(values), rounds)] = values[:rounds]
    return result


def checked_bandwidth(bandwidth: int) -> int:
    """`bandwidth` as an int. Raises ValueError unless it is at least 1."""
    bandwidth = as_whole("bandwidth", bandwidth)
    if bandwidth < 1:
        raise ValueError(f"bandwidth must be at least 1, got {bandwidth}; 1 is DP-SGD")
    return bandwidth


def checked_values(what: str, values: tuple[float, ...], *, first: bool) -> tuple[float, ...]:
    """`values` as floats. Raises ValueError unless all are finite, and (if `first` is asked for) the first is positive.

    Raises TypeError for what is no tuple: a mechanism is hashed, and never changes.
    """
    if not isinstance(values, tuple):
        raise TypeError(f"{what} must be a tuple of numbers, as in (0.5, 0.25); got a {type(values).__name__}")
    values = tuple(as_float(f"each of the {what}", value) for value in values)
    if not values or not all(math.isfinite(v) for v in values) or (first and values[0] <= 0):
        raise ValueError(f"{what} must be finite numbers, the first of them positive, got {values[:4]}…")
    return values
