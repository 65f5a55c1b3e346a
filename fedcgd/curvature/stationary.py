"""Gradient descent that has run for ever on a quadratic: what the noise adds to the loss, by one integral over frequencies.

Noise with coefficients β passes two filters: |B(ω)|², B = C⁻¹ as a power series at e^{iω}, and η²/|1 − a·e^{iω}|² for each
direction, a = 1 − ημ. One participation of a user moves CX by ∫ dω/(2π|B|²), squared. Both integrals are exact: no constant is
left out. Choquette-Choo et al., "Correlated Noise Provably Beats Independent Noise for Differentially Private Learning", 2024,
arXiv:2310.06771, where it is mean estimation (H = 1) and linear regression (H = the covariance of the inputs).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import ellipk

from fedcgd.mechanisms import BLT, DPSGD, LambdaCGD, LambdaMuCGD, Mechanism, NuDPFTRL, SquareRootToeplitz
from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.toeplitz import BandedInverseMechanism, BandedToeplitzMechanism
from fedcgd.quadratic import Quadratic

_OCTAVES = 60  # panels halve towards 0 and π this often, so that a peak of any width there is resolved
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)
_CONVERGED = 1e-10  # relative change of an integral when the panels are halved
_CHUNK_ENTRIES = 2**22
_LARGEST_GRID = 2**22


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


def optimal_coefficients(quadratic: Quadratic, lags: int) -> Vector:
    """β*_1 … β*_lags, of noise Z_t − Σ β*_τ·Z_{t−τ}: the causal series with |B|² proportional to R^(−1/2), from its cepstrum.

    In one dimension it is (1 − a·x)^(1/2), so that β*_t ~ t^(−3/2)·a^t/(2√π).

    Args:
        quadratic: what is descended on, and how.
        lags: how many coefficients.

    Returns:
        Shape (lags,), float64.

    Raises:
        ValueError: where the smallest η·μ is so small that 2²² frequencies do not resolve it, and for a spectrum without a
            positive eigenvalue.
    """
    _check_curved(quadratic)
    a, _, _ = quadratic.contractions()
    slowest = float(min(np.min(1 - a), np.min(1 + a)))
    size = 2 ** math.ceil(math.log2(max(64 / slowest, 8 * lags, 1024)))
    if size > _LARGEST_GRID:
        raise ValueError(
            f"the smallest η·μ must be at least {64 / _LARGEST_GRID:.2g} for β*, got {slowest:.2g}; leave out smaller "
            "eigenvalues, or take a larger learning rate"
        )
    log_gain = -0.25 * np.log(_response(quadratic, 2 * np.pi * np.arange(size // 2 + 1) / size))
    cepstrum = np.fft.irfft(log_gain, size)
    causal = np.zeros(size)
    causal[1 : size // 2] = 2 * cepstrum[1 : size // 2]
    series = np.fft.irfft(np.exp(np.fft.rfft(causal)), size)
    return np.asarray(-series[1 : lags + 1])


def best_lambda(quadratic: Quadratic) -> LambdaCGD:
    """The λ of least `stationary_error`: (1 − √(1 − α²))/α, α the mean of a_i with weights μ_i/(1 − a_i²).

    The error of λ is η²/2·P·(1 − 2αλ + λ²)/(1 − λ²), P = Σ_i μ_i/(1 − a_i²), and so η²/2·P·√(1 − α²) at best: for small η·μ it is
    η^(3/2)/2·√(d·Tr(H)/2), the geometric mean of what independent noise and the bound for all noise scale with. With α ≤ 0
    nothing is to be cancelled.

    Args:
        quadratic: what is descended on, and how.

    Raises:
        ValueError: for a spectrum without a positive eigenvalue.
    """
    _check_curved(quadratic)
    a, values, counts = quadratic.contractions()
    weights = counts * values / ((1 - a) * (1 + a))
    total = float(weights.sum())
    alpha = float(weights @ a) / total
    # 1 − α without cancellation, where α is near 1.
    beta = float(weights @ (1 - a)) / total
    return LambdaCGD((1 - math.sqrt(beta * (1 + alpha))) / alpha if alpha > 0 else 0.0)


def best_nu(quadratic: Quadratic) -> NuDPFTRL:
    """The ν of ν-DP-FTRL of least `stationary_error`, found to about 0.1 % on a logarithmic scale.

    Args:
        quadratic: what is descended on, and how.
    """
    a, _, _ = quadratic.contractions()
    lowest = math.log(max(float(np.min(1 - a)) / 100, 1e-12))
    found = minimize_scalar(
        lambda x: math.log(stationary_error(NuDPFTRL(math.exp(x)), quadratic)),
        bounds=(lowest, math.log(1 - 1e-9)),
        method="bounded",
        options={"xatol": 1e-3},
    )
    return NuDPFTRL(math.exp(found.x))


@dataclass(frozen=True)
class Bounds:
    """What stationary errors (as `stationary_error`) can be, for η·‖H‖ ≤ 1, in d, d_eff and constants that are written out.

    K is the complete elliptic integral of the first kind, of the parameter.

    Attributes:
        independent: (dη/4, dη/2) holds DP-SGD's, which is Σ η/(2(2 − ημ_i)): it scales with the dimension.
        any_noise: η²·‖H‖·d_eff/2, below which no Toeplitz noise gets, since each direction alone needs
            η²μ/2·(2K(a²)/π)² ≥ η²μ/2.
        damped: η²·‖H‖·d_eff·(2K((1 − ν)²)/π)², above that of ν-DP-FTRL with ν = `nu`: there |1 − (1 − ν)z| ≤ 2·|1 − a_i·z| for
            every direction. 2K/π is about log(8/ν)/π.
        nu: η times the least eigenvalue.
    """

    independent: tuple[float, float]
    any_noise: float
    damped: float
    nu: float


def bounds(quadratic: Quadratic) -> Bounds:
    """The bounds in d and d_eff; d counts the directions that are not flat.

    Args:
        quadratic: what is descended on, and how.

    Raises:
        ValueError: for η·‖H‖ > 1, and a spectrum without a positive eigenvalue.
    """
    _check_curved(quadratic)
    a, values, counts = quadratic.contractions()
    rate = quadratic.learning_rate
    if rate * quadratic.spectrum.largest > 1:
        raise ValueError(
            f"the bounds need η·‖H‖ of at most 1, got {rate * quadratic.spectrum.largest:.6g}; learning rates up to "
            f"{1 / quadratic.spectrum.largest:.6g} have them"
        )
    d, energy = float(counts.sum()), float(counts @ values)
    nu = float(np.min(1 - a))
    return Bounds(
        independent=(d * rate / 4, d * rate / 2),
        any_noise=rate**2 * energy / 2,
        damped=rate**2 * energy * (2 * float(ellipk((1 - nu) ** 2)) / math.pi) ** 2,
        nu=nu,
    )


def _check_curved(quadratic: Quadratic) -> None:
    if quadratic.spectrum.largest == 0:
        raise ValueError("all eigenvalues of the spectrum are 0: nothing is lost on a plane, whatever the noise")


def _response(quadratic: Quadratic, frequencies: Vector) -> Vector:
    """R(ω) = Σ_i μ_i·η²/(2|1 − a_i·e^{iω}|²)."""
    a, values, counts = quadratic.contractions()
    rate = quadratic.learning_rate
    sines = _sines(frequencies)
    total = np.zeros(len(frequencies))
    step = max(1, _CHUNK_ENTRIES // len(frequencies))
    for start in range(0, len(a), step):
        part = slice(start, start + step)
        distance = (rate * values[part, None]) ** 2 + 4 * a[part, None] * sines
        total += (counts[part] * values[part]) @ (1 / distance)
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
