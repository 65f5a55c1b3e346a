"""What a run's draws say about δ of adding: log-likelihood ratios are known between two bounds, and the answer errs upwards."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import binom, norm

from fedcgd.accounting.b_min_sep.law import BMinSepLaw
from fedcgd.accounting.random_participation.add import AddDirection, LogRatios, draw_log_ratios
from fedcgd.accounting.random_participation.columns import columns_of
from fedcgd.mechanisms import DPSGD

EPSILON, FAILURE = 1.0, 1e-6
LINES = [None, (-0.8, 0.4), (-0.3, 0.3)]


def points(lower: np.ndarray, upper: np.ndarray) -> LogRatios:
    """Lines of one point each."""
    return LogRatios(np.ones((1, len(lower))), lower[None], upper[None])


@pytest.mark.parametrize("line", LINES)
def test_a_ratio_that_is_known_between_bounds_counts_as_the_worse_of_them(line: tuple[float, float] | None) -> None:
    """Whatever each ratio is between its bounds, the answer is at least what it would be if that were known."""
    generator = np.random.default_rng(0)
    truth = 0.5 * generator.standard_normal(4000) - 0.125
    lower, upper = truth - 0.1 * generator.random(4000), truth + 0.1 * generator.random(4000)
    direction = AddDirection(EPSILON, FAILURE, line, variances=(1e-3, 1e-3), mean=0.01, expected=0.01)
    said = direction.confirm(points(lower, upper))
    assert 0 < said < 1
    apart = np.where(truth < 0, lower, upper)  # many below u₁, few below u₂
    for known in (lower, truth, upper, apart, np.where(generator.random(4000) < 0.5, lower, upper)):
        assert direction.confirm(points(known, known)) <= said
    assert direction.confirm(points(truth, truth)) < said


def test_ratios_are_off_by_rounding_both_ways() -> None:
    columns = SimpleNamespace(
        rounds=3,
        rounding=1e-5,
        noise=lambda generator, size: generator.standard_normal((3, size)),
        lifted=lambda *_: (np.ones((3, 1)), None, np.ones(1)),
    )
    likelihood = SimpleNamespace(weights=lambda x: x, bounds=lambda w: (np.ones(w.shape[1]), np.ones(w.shape[1])))
    ratios = draw_log_ratios(columns, likelihood, 1.0, 10, (1, 2))  # type: ignore[arg-type]
    np.testing.assert_allclose(ratios.lower, -1e-5)
    np.testing.assert_allclose(ratios.upper[1:], 1e-5)


@pytest.mark.parametrize("at", [-4.5, -2.3, -0.4, 1.9, 2.6, 3.5])
def test_what_is_said_of_a_line_is_right_in_the_mean_and_errs_to_either_side_above_its_points(at: float) -> None:
    """Everybody in two rounds of C = I: all that log S depends on is along the line, where Q(log S ≤ u) = Φ(at)."""
    columns, law, sigma = columns_of(DPSGD(), 2, 1, 2), BMinSepLaw(2, 1, 1.0, False), 0.8
    ratios = draw_log_ratios(columns, law.likelihood(columns, sigma), sigma, 2**14, (1, 2))
    u = math.sqrt(2) * at / sigma - 1 / sigma**2
    most, least = ((ratios.chances * (bound <= u)).sum(axis=0) for bound in (ratios.lower, ratios.upper))
    assert most.max() <= 1 + 1e-12
    for said, sign in ((most, 1), (least, -1)):
        error = 5 * said.std() / 2**7 + 1e-8
        assert sign * (said.mean() - norm.cdf(at)) >= -error
        assert at > 2 or abs(said.mean() - norm.cdf(at)) <= error
    assert 0.9 < least.mean() / norm.cdf(at) < 1.1 or at < -4
    direction = AddDirection.from_pilot(ratios, 8.0, 2**14, 1e-3)
    mu = math.sqrt(2) / sigma
    truth = norm.cdf(mu / 2 - 8 / mu) - math.exp(8) * norm.cdf(-mu / 2 - 8 / mu)
    assert truth <= direction.confirm(ratios) <= direction.expected <= 3 * truth


def test_the_line_is_drawn_through_bounds_of_half_the_failure_each() -> None:
    """Φ through (u₁, p₁) and (u₂, p₂), with p₁ above and p₂ below what was seen, each wrong with probability failure/2."""
    count, line = 1000, (-0.8, 0.4)
    ratios = np.concatenate([np.full(30, line[0]), np.full(670, line[1]), np.full(300, 1.0)])

    def above(ones: int, variance: float) -> float:
        """The mean beyond which so many ones are refuted, by a wealth that is multiplied by 1 + bet·(mean − value)."""
        goal = math.log(2 / FAILURE)
        bet = min(math.sqrt(2 * goal / count / variance), 0.99)
        return brentq(lambda m: ones * math.log1p(bet * (m - 1)) + (count - ones) * math.log1p(bet * m) - goal, 0, 1)

    first, second = above(30, 0.03), 1 - above(300, 0.2)
    slope = (norm.ppf(second) - norm.ppf(first)) / (line[1] - line[0])

    def line_at(u: float) -> float:
        return norm.cdf(norm.ppf(first) + slope * (u - line[0]))

    # δ = E[(1 − S·e^ε)⁺] = ∫ Q(log S ≤ u)·e^(u + ε) du over u ≤ −ε
    expected = quad(lambda u: line_at(u) * np.exp(u + EPSILON), -60, -EPSILON, epsabs=1e-14, epsrel=1e-11)[0]
    direction = AddDirection(EPSILON, FAILURE, line, variances=(0.03, 0.2), mean=0.01, expected=0.01)
    assert direction.confirm(points(ratios, ratios)) == pytest.approx(expected, rel=1e-5)


def test_a_mean_is_bounded_from_above_but_for_the_failure_by_enumeration() -> None:
    """Draws that count as 1 or as nothing: every number of them in 40, with the probability that each has."""
    numbers, bounds = np.arange(41), []
    direction = AddDirection(EPSILON, 0.1, None, variances=(0.05, 0.05), mean=0.05, expected=0.1)
    for number in numbers:
        ratios = np.where(np.arange(40) < number, -50.0, 1.0)
        bounds.append(direction.confirm(points(ratios, ratios)))
    for chance in np.linspace(0.001, 0.999, 200):
        assert binom.pmf(numbers[np.array(bounds) < chance], 40, chance).sum() <= 0.1
    assert bounds[2] < 0.3
