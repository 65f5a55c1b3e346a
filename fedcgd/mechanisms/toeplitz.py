"""What all mechanisms share whose C is one sequence of coefficients: series, their inverses, and matrices made of them."""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from fedcgd.mechanisms.mechanism import Matrix, Vector


class ToeplitzMechanism(ABC):
    """C[i, j] = c[i − j]. A subclass gives c and c⁻¹; the rest follows."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def coefficients(self, rounds: int) -> Vector: ...

    @abstractmethod
    def inverse_coefficients(self, rounds: int) -> Vector: ...

    def columns(self, rounds: int, indices: NDArray[np.intp]) -> Matrix:
        c = self.coefficients(rounds)
        lags = np.arange(rounds)[:, None] - np.asarray(indices)[None, :]
        return np.where(lags >= 0, c[np.maximum(lags, 0)], 0.0)

    def inverse_row(self, round: int, rounds: int) -> Vector:
        return self.inverse_coefficients(round + 1)


def reciprocal(series: Vector, rounds: int) -> Vector:
    """The first `rounds` coefficients of 1/Σ series[i]·x^i, in O(rounds · len(series)). series[0] must not be 0."""
    return ratio(np.ones(1), series, rounds)


def ratio(numerator: Vector, denominator: Vector, rounds: int) -> Vector:
    """The first `rounds` coefficients of the power series of one polynomial divided by another."""
    impulse = np.eye(1, rounds)[0]
    return np.asarray(lfilter(numerator[:rounds], denominator[:rounds], impulse))


def root_coefficients(rounds: int, sign: int, decay: float = 1.0) -> Vector:
    """The first `rounds` coefficients of (1 − decay·x)^(sign/2), sign = ±1.

    For sign −1 they are binom(2t, t)/4^t·decay^t ~ decay^t/√(πt); for sign +1, −decay^t·t^(−3/2)/(2√π) for large t.
    """
    t = np.arange(1, rounds)
    return np.concatenate([[1.0], np.cumprod((t - 1 - sign / 2) / t * decay)])


def padded(values: Vector, rounds: int) -> Vector:
    """`values` cut or filled with zeros to length `rounds`."""
    result = np.zeros(rounds)
    result[: min(len(values), rounds)] = values[:rounds]
    return result


def check_bandwidth(bandwidth: int) -> None:
    """Raise ValueError unless `bandwidth` is at least 1."""
    if bandwidth < 1:
        raise ValueError(f"bandwidth must be at least 1, got {bandwidth}; 1 is DP-SGD")
