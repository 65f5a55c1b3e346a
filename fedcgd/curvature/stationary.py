"""Gradient descent that has run for ever on a quadratic: what the noise adds to the loss, by one integral over frequencies.

Noise with coefficients β passes two filters: |B(ω)|², B = C⁻¹ as a power series at e^{iω}, and η²/|1 − a·e^{iω}|² for each
direction, a = 1 − ημ. One participation of a user moves CX by ∫ dω/(2π|B|²), squared. Both integrals are exact: no constant is
left out. Choquette-Choo et al., "Correlated Noise Provably Beats Independent Noise for Differentially Private Learning", 2024,
arXiv:2310.06771, where it is mean estimation (H = 1) and linear regression (H = the covariance of the inputs).
"""

import math
from collections.abc import Callable

import numpy as np

from fedcgd.mechanisms import BLT, DPSGD, LambdaCGD, LambdaMuCGD, Mechanism, NuDPFTRL, SquareRootToeplitz
from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.toeplitz import BandedInverseMechanism, BandedToeplitzMechanism
from fedcgd.quadratic import Quadratic

_OCTAVES = 60  # panels halve towards 0 and π this often, so that a peak of any width there is resolved
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)
_CONVERGED = 1e-10  # relative change of an integral when the panels are halved


def stationary_loss(mechanism: Mechanism, quadratic: Quadratic, *, stddev: float = 1.0) -> float:
    """lim E[L(w̃_t)] − L(w_t) = s²/2·∫|B(ω)|²·Σ_i μ_i·η²/|1 − a_i·e^{iω}|² dω/2π, s = `stddev` (see `final_loss`).

    Args:
        mechanism: a Toeplitz C, which is an infinite series.
        quadratic: what is descended on, and how.
        stddev: s, in units of the gradient that is stepped along.

    Returns:
        The loss, infinite where it diverges.

    Raises:
        ValueError: for a C that is not Toeplitz, and a spectrum without a positive eigenvalue.
    """
    gain = _gain(mechanism)
    _check_curved(quadratic)
    return stddev**2 * _mean(lambda w: _response(quadratic, w) / gain(w), _length(mechanism))


def stationary_sensitivity(mechanism: Mechanism) -> float:
    """√(∫ dω/(2π·|B(ω)|²)) = ‖c‖₂: how far one participation moves CX in a run without end; infinite for `toeplitz`.

    Args:
        mechanism: a Toeplitz C.

    Raises:
        ValueError: for a C that is not Toeplitz.
    """
    if isinstance(mechanism, SquareRootToeplitz) or (isinstance(mechanism, NuDPFTRL) and mechanism.nu == 0):
        return math.inf
    return math.sqrt(_mean(_gain(mechanism), _length(mechanism)))


def stationary_error(mechanism: Mechanism, quadratic: Quadratic) -> float:
    """sens²·(loss of s = 1): the stationary loss at equal privacy; times 1/2ρ it is that of ρ-zCDP.

    For a user who takes part once, clip norm 1 and cohorts of 1.

    Args:
        mechanism: a Toeplitz C.
        quadratic: what is descended on, and how.

    Raises:
        ValueError: as `stationary_loss` does.
    """
    found = stationary_sensitivity(mechanism)
    return found**2 * stationary_loss(mechanism, quadratic) if math.isfinite(found) else math.inf


def optimal_error(quadratic: Quadratic) -> float:
    """(∫√R dω/2π)², R = Σ_i μ_i·η²/(2|1 − a_i·e^{iω}|²): the least `stationary_error` of all Toeplitz mechanisms.

    By Cauchy–Schwarz, with equality where |B|² is proportional to R^(−1/2).

    Args:
        quadratic: what is descended on, and how.

    Raises:
        ValueError: for a spectrum without a positive eigenvalue.
    """
    _check_curved(quadratic)
    return _mean(lambda w: np.sqrt(_response(quadratic, w)), 1) ** 2


def _check_curved(quadratic: Quadratic) -> None:
    if quadratic.spectrum.largest == 0:
        raise ValueError("all eigenvalues of the spectrum are 0: nothing is lost on a plane, whatever the noise")


def _response(quadratic: Quadratic, frequencies: Vector) -> Vector:
    """R(ω) = Σ_i μ_i·η²/(2|1 − a_i·e^{iω}|²)."""
    rate, total = quadratic.learning_rate, np.zeros(len(frequencies))
    for a, values, counts in quadratic.contractions_in_parts(len(frequencies)):
        distance = (rate * values[:, None]) ** 2 + 4 * a[:, None] * _sines(frequencies)
        total += (counts * values) @ (1 / distance)
    return rate**2 / 2 * total


def _sines(frequencies: Vector) -> Vector:
    """sin²(ω/2), with which |1 − a·e^{iω}|² = (1 − a)² + 4a·sin²(ω/2) has all its digits."""
    return np.asarray(np.sin(frequencies / 2) ** 2)


def _gain(mechanism: Mechanism) -> Callable[[Vector], Vector]:
    """ω ↦ |C(e^{iω})|² = 1/|B(ω)|². Raises ValueError where C is no power series."""
    match mechanism:
        case DPSGD():
            return np.ones_like
        case LambdaCGD(lam=lam):
            return _geometric(lam)
        case NuDPFTRL(nu=nu):
            return lambda w: (nu**2 + 4 * (1 - nu) * _sines(w)) ** -0.5
        case SquareRootToeplitz():
            return lambda w: (4 * _sines(w)) ** -0.5
        case BLT(scales=scales, decays=decays):
            return lambda w: _exponentials(np.array(scales), np.array(decays), w)
        case BandedToeplitzMechanism():
            return _polynomial(mechanism.band, +1)
        case LambdaMuCGD(lam=lam, mu=mu):
            return lambda w: _geometric(lam)(w) * _geometric(mu)(w)
        case BandedInverseMechanism():
            return _polynomial(mechanism.inverse_band, -1)
    raise ValueError(
        f"{mechanism.name} has no stationary noise: its C is made for a number of rounds, or is a series whose |C(e^{{iω}})|² is "
        "not known here; ask for the loss after a number of rounds"
    )


def _geometric(ratio: float) -> Callable[[Vector], Vector]:
    return lambda w: 1 / ((1 - ratio) ** 2 + 4 * ratio * _sines(w))


def _polynomial(coefficients: Vector, power: int) -> Callable[[Vector], Vector]:
    lags = np.arange(len(coefficients))
    return lambda w: np.asarray(np.abs(np.exp(1j * np.outer(w, lags)) @ coefficients) ** (2 * power))


def _exponentials(scales: Vector, decays: Vector, frequencies: Vector) -> Vector:
    z = np.exp(1j * frequencies)[:, None]
    from_one = 2 * _sines(frequencies)[:, None] - 1j * np.sin(frequencies)[:, None]  # 1 − z, with all its digits
    return np.asarray(np.abs(1 + (scales * z / ((1 - decays) + decays * from_one)).sum(axis=1)) ** 2)


def _length(mechanism: Mechanism) -> int:
    """How many coefficients the gain is a polynomial of, whose ripples panels have to resolve; 1 for those without ripples."""
    match mechanism:
        case BandedToeplitzMechanism():
            return len(mechanism.band)
        case BandedInverseMechanism():
            return len(mechanism.inverse_band)
    return 1


def _mean(f: Callable[[Vector], Vector], length: int) -> float:
    """∫ f dω/2π over the circle for an even f, by Gauss–Legendre on panels that are halved until nothing changes."""
    parts, before = max(1, length), math.nan
    for _ in range(8):
        ends = np.pi / 2 * 2.0 ** -np.arange(_OCTAVES)[::-1]
        ends = np.concatenate([[0.0], ends])
        ends = np.union1d(ends, np.linspace(0, np.pi / 2, parts + 1))
        low, half = ends[:-1, None], np.diff(ends)[:, None] / 2
        nodes, weights = (low + half * (1 + _NODES)).reshape(-1), (half * _WEIGHTS).reshape(-1)
        total = float(weights @ (f(nodes) + f(np.pi - nodes))) / np.pi
        if not math.isfinite(total) or abs(total - before) <= _CONVERGED * abs(total):
            return total
        parts, before = 2 * parts, total
    raise ValueError(
        f"the integral over frequencies did not settle at {total:.6g}: a coefficient series whose zeros touch the unit circle"
    )
