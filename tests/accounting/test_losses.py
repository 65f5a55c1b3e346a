"""δ of many rounds, down to 1e-30: against exact arithmetic, quadrature with 36 digits, and the Gaussian's closed form."""

import math
from dataclasses import replace
from functools import lru_cache

import mpmath
import numpy as np
import pytest
from scipy.fft import rfft

from fedcgd import DPSGD, Participation, compute_delta, compute_epsilon
from fedcgd.accounting import calibrate, gaussian
from fedcgd.accounting.losses import _OUTSIDE, _STAGE, Composition, GridLoss, _Tail, _window
from fedcgd.accounting.poisson import METHOD

# P(loss = i/4 − 1) in 64ths, for i = 0 … 8: lopsided, with a hole.
SMALL = (5, 12, 0, 20, 10, 8, 5, 3, 1)


def exact_delta(rounds: int, epsilon: float) -> float:
    """Σ (1 − e^{ε−l})₊·P(l) of the `rounds`-fold convolution of `SMALL`, in exact arithmetic but for the exponential."""
    mpmath.mp.dps = 60
    found = mpmath.mpf(0)
    for i, p in enumerate(convolution(rounds)):
        loss = mpmath.mpf(i) / 4 - rounds
        if loss > epsilon:
            found += (1 - mpmath.exp(epsilon - loss)) * p
    return float(found / 64**rounds)


@lru_cache
def convolution(rounds: int) -> list[int]:
    """The `rounds`-fold convolution of `SMALL`, in 64^rounds-ths."""
    total = [1]
    for _ in range(rounds):
        longer = [0] * (len(total) + len(SMALL) - 1)
        for i, a in enumerate(total):
            for j, b in enumerate(SMALL):
                longer[i + j] += a * b
        total = longer
    return total


@pytest.mark.parametrize("rounds", [1, 3, 24, 60])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.99])
def test_a_small_loss_composed_is_never_below_exact_arithmetic_and_hardly_above(rounds, part) -> None:
    """At ε from the bulk to near the largest loss of all, where δ is 64^−60 ≈ 1e-108."""
    loss = GridLoss(np.array(SMALL) / 64, -4, 0.25, 0.0)
    epsilon = part * rounds + 0.005
    exact = exact_delta(rounds, epsilon)
    found = Composition([(loss, rounds)]).delta(epsilon)
    assert exact <= found <= exact * (1 + 3e-6)


@pytest.mark.parametrize("delta", [1e-3, 1e-9, 1e-15, 1e-30])
def test_epsilon_undoes_delta(delta) -> None:
    composed = Composition([(GridLoss(np.array(SMALL) / 64, -4, 0.25, 0.0), 60)])
    epsilon = composed.epsilon(delta)
    assert exact_delta(60, epsilon) <= delta
    assert exact_delta(60, epsilon * (1 - 1e-5)) > delta


def two_rounds(epsilon: float, q: float, sigma: float) -> float:
    """δ of removing under two Poisson-subsampled rounds, by quadrature with 36 digits: E over the first of δ of the second."""
    mpmath.mp.dps = 36
    q, sigma, epsilon = mpmath.mpf(q), mpmath.mpf(sigma), mpmath.mpf(epsilon)

    def loss(x):
        return mpmath.log(1 - q + q * mpmath.exp((2 * x - 1) / (2 * sigma**2)))

    def once(e):
        """H(e) = sup P(S) − e^e·Q(S): the loss grows with x, so S = {x > x(e)}."""
        inner = (mpmath.exp(e) - 1 + q) / q
        if inner <= 0:
            return 1 - mpmath.exp(e)
        x = sigma**2 * mpmath.log(inner) + mpmath.mpf(1) / 2
        above = mpmath.ncdf(-x / sigma)
        return (1 - q) * above + q * mpmath.ncdf((1 - x) / sigma) - mpmath.exp(e) * above

    def integrand(x):
        density = (1 - q) * mpmath.npdf(x, 0, sigma) + q * mpmath.npdf(x, 1, sigma)
        return density * once(epsilon - loss(x))

    return float(mpmath.quad(integrand, [mpmath.mpf(i) * sigma for i in range(-16, 19, 2)]))


@pytest.mark.parametrize(
    ("q", "sigma", "epsilon"), [(0.1, 1.0, 3.0), (0.01, 0.7, 8.0), (0.3, 1.5, 4.0), (0.01, 0.7, 14.0)]
)
def test_two_sampled_rounds_by_quadrature(q, sigma, epsilon) -> None:
    """δ of 1e-3 to 1e-22 or so."""
    run = Participation(rounds=2, sampling="poisson", sampling_rate=q)
    exact = two_rounds(epsilon, q, sigma)
    found = compute_delta(DPSGD(), run, noise_multiplier=sigma, epsilon=epsilon)
    assert exact <= found.delta <= exact * 1.01
    assert found.proof.method == METHOD
    if exact < 1e-3:
        back = compute_epsilon(DPSGD(), run, noise_multiplier=sigma, delta=found.delta).epsilon
        assert back <= epsilon * 1.001
        assert two_rounds(back, q, sigma) <= found.delta


@pytest.mark.parametrize(
    ("delta", "least", "most"), [(1e-10, 2.5903, 2.60), (1e-11, 2.7459, 2.76), (1e-15, 3.3049, 3.32)]
)
def test_amplification_is_not_lost_at_small_delta(delta, least, most) -> None:
    """n = 100,000, q = 0.001, σ = 1: ε was 2.64 at δ = 1e-10 and 52,120 at 1e-11. The least is of a grid eight times finer."""
    run = Participation(rounds=100_000, sampling="poisson", sampling_rate=0.001)
    found = compute_epsilon(DPSGD(), run, noise_multiplier=1.0, delta=delta)
    assert least < found.epsilon < most
    assert found.proof.method == METHOD
    if delta == 1e-11:
        sigma = calibrate(DPSGD(), run, epsilon=found.epsilon, delta=delta).noise_multiplier
        assert sigma == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("size", [1000, 4096, 30_030])
def test_a_transform_rounds_by_less_than_what_is_allowed_for(size) -> None:
    """Each entry, against the transform in extended precision, in units of the sum of all."""
    values = np.random.default_rng(size).random(size) ** 8
    right = rfft(values.astype(np.longdouble))
    wrong = float(np.abs((rfft(values) - right).astype(complex)).max()) / values.sum()
    assert wrong < _STAGE * math.log2(size) / 8


def test_what_rounding_may_take_is_added_at_its_full_weight() -> None:
    """Masses that are `lost` may all be where (1 − e^(ε−l))·e^(−θ(l−ε)) is largest."""
    loss, tilt, epsilon, lost = GridLoss(np.array(SMALL) / 64, -4, 0.25, 0.0), 0.8, 3.0, 1e-3
    tail = _Tail.from_composition(Composition([(loss, 24)]), tilt, epsilon)
    more = replace(tail, lost=tail.lost + lost).delta(epsilon) - tail.delta(epsilon)
    x = np.linspace(0, 10, 100_001)
    largest = float((-np.expm1(-x) * np.exp(-tilt * x)).max())
    assert more == pytest.approx(math.exp(tail.log_mgf - tilt * epsilon) * lost * largest, rel=1e-6)


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 12.0])
def test_losses_that_are_infinite_stay_so_in_the_composition(epsilon: float) -> None:
    rounds, infinite = 24, 1e-5
    loss = GridLoss(np.array(SMALL) / 64 * (1 - infinite), -4, 0.25, infinite)
    kept = (1 - infinite) ** rounds
    exact = exact_delta(rounds, epsilon) * kept + 1 - kept
    found = Composition([(loss, rounds)]).delta(epsilon)
    assert exact <= found <= exact * (1 + 1e-8)
    assert Composition([(loss, rounds)]).epsilon(rounds * infinite * 0.9) == math.inf


@pytest.mark.parametrize("tilt", [1e-6, 0.01, 0.29, 0.3, 2.0])
def test_hardly_anything_lies_outside_the_window_and_it_is_not_much_wider_than_the_losses(tilt: float) -> None:
    """By the tilted convolution itself. From multiples of a tilt of 1e-6 alone the window was a million wide, and σ took long."""
    rounds = 60
    loss = GridLoss(np.array(SMALL) / 64, -4, 0.25, 0.0)
    whole = Composition([(loss, rounds)])
    low, high = (end / 4 for end in _window(whole, tilt, whole.log_mgf(tilt), [(loss.tilted(tilt), rounds)]))
    losses = np.arange(8 * rounds + 1) / 4 - rounds
    tilted = np.array([p / 64**rounds for p in convolution(rounds)]) * np.exp(tilt * losses)
    tilted /= tilted.sum()
    assert tilted[losses < low].sum() <= _OUTSIDE
    assert tilted[losses > high].sum() <= _OUTSIDE
    assert -rounds <= low < high <= rounds


@pytest.mark.parametrize("epsilon", [2.0, 9.0, 20.0])
def test_two_kinds_of_releases_together_by_exact_arithmetic(epsilon: float) -> None:
    """Twelve of `SMALL` and seven of its double, whose losses are twice as large."""
    small = GridLoss(np.array(SMALL) / 64, -4, 0.25, 0.0)
    masses = np.zeros(17)
    masses[::2] = SMALL
    double = GridLoss(masses / 64, -8, 0.25, 0.0)
    mpmath.mp.dps, exact = 60, mpmath.mpf(0)
    for i, p in enumerate(convolution(12)):
        for j, q in enumerate(convolution(7)):
            loss = mpmath.mpf(i) / 4 - 12 + mpmath.mpf(j) / 2 - 14
            if loss > epsilon:
                exact += (1 - mpmath.exp(epsilon - loss)) * p * q
    found = Composition([(small, 12), (double, 7)]).delta(epsilon)
    assert float(exact / 64**19) <= found <= float(exact / 64**19) * (1 + 3e-6)


def test_where_a_window_would_be_too_long_chernoffs_bound_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcgd.accounting.losses._LONGEST", 8)
    whole = Composition([(GridLoss(np.array(SMALL) / 64, -4, 0.25, 0.0), 24)])
    assert exact_delta(24, 3.0) < whole.delta(3.0) < 30 * exact_delta(24, 3.0)
    assert exact_delta(24, whole.epsilon(1e-9)) <= 1e-9


def test_a_hundred_million_rounds_at_a_rate_of_one_in_a_million() -> None:
    """μ = q·√n·√(e − 1) = 0.0131, whose ε is 0.038; it was 5e7. Far losses are those of a user who takes part."""
    run = Participation(rounds=10**8, sampling="poisson", sampling_rate=1e-6)
    found = compute_epsilon(DPSGD(), run, noise_multiplier=1.0, delta=1e-5)
    limit = gaussian.epsilon(sigma=1 / (0.01 * math.sqrt(math.expm1(1.0))), delta=1e-5)
    assert limit < found.epsilon < 1.2 * limit
