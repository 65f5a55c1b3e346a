"""What a run's draws say about δ of adding: log-likelihood ratios are known between two bounds, and the answer errs upwards."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedcgd.accounting.random_participation.add import AddDirection, LogRatios, draw_log_ratios

EPSILON, FAILURE = 1.0, 1e-6
LINES = [None, (-0.8, 0.4), (-0.3, 0.3)]


@pytest.mark.parametrize("line", LINES)
def test_a_ratio_that_is_known_between_bounds_counts_as_the_worse_of_them(line: tuple[float, float] | None) -> None:
    """Whatever each ratio is between its bounds, the answer is at least what it would be if that were known."""
    generator = np.random.default_rng(0)
    truth = 0.5 * generator.standard_normal(4000) - 0.125
    lower, upper = truth - 0.1 * generator.random(4000), truth + 0.1 * generator.random(4000)
    direction = AddDirection(EPSILON, FAILURE, line, variance=1e-3, mean=0.01, expected=0.01)
    said = direction.confirm(LogRatios(lower, upper))
    assert 0 < said < 1
    apart = np.where(truth < 0, lower, upper)  # many below u₁, few below u₂
    for known in (lower, truth, upper, apart, np.where(generator.random(4000) < 0.5, lower, upper)):
        assert direction.confirm(LogRatios(known, known)) <= said
    assert direction.confirm(LogRatios(truth, truth)) < said


def test_ratios_are_off_by_rounding_both_ways() -> None:
    columns = SimpleNamespace(
        rounds=3, rounding=1e-5, noise=lambda generator, size: generator.standard_normal((3, size))
    )
    likelihood = SimpleNamespace(weights=lambda x: x, bounds=lambda w: (np.ones(w.shape[1]), np.ones(w.shape[1])))
    ratios = draw_log_ratios(columns, likelihood, 1.0, 10, (1, 2))  # type: ignore[arg-type]
    np.testing.assert_allclose(ratios.lower, -1e-5)
    np.testing.assert_allclose(ratios.upper, 1e-5)


def test_the_line_is_drawn_through_bounds_of_half_the_failure_each() -> None:
    """Φ through (u₁, p₁) and (u₂, p₂), with p₁ above and p₂ below what was seen, each wrong with probability failure/2."""
    from scipy import stats
    from scipy.integrate import quad

    count, line = 1000, (-0.8, 0.4)
    ratios = np.concatenate([np.full(30, -1.0), np.full(670, 0.0), np.full(300, 1.0)])
    first = stats.beta.ppf(1 - FAILURE / 2, 31, count - 30)
    second = stats.beta.ppf(FAILURE / 2, 700, count - 700 + 1)
    slope = (stats.norm.ppf(second) - stats.norm.ppf(first)) / (line[1] - line[0])

    def line_at(u: float) -> float:
        return stats.norm.cdf(stats.norm.ppf(first) + slope * (u - line[0]))

    # δ = E[(1 − S·e^ε)⁺] = ∫ Q(log S ≤ u)·e^(u + ε) du over u ≤ −ε
    expected = quad(lambda u: line_at(u) * np.exp(u + EPSILON), -60, -EPSILON, epsabs=1e-14, epsrel=1e-11)[0]
    direction = AddDirection(EPSILON, FAILURE, line, variance=1e-3, mean=0.01, expected=0.01)
    assert direction.confirm(LogRatios(ratios, ratios)) == pytest.approx(expected, rel=1e-6)


def test_a_mean_is_bounded_from_above_but_for_the_failure_by_enumeration() -> None:
    """Draws that count as 1 or as nothing: every number of them in 40, with the probability that each has."""
    from scipy.stats import binom

    numbers, bounds = np.arange(41), []
    direction = AddDirection(EPSILON, 0.1, None, variance=0.05, mean=0.05, expected=0.1)
    for number in numbers:
        ratios = np.where(np.arange(40) < number, -50.0, 1.0)
        bounds.append(direction.confirm(LogRatios(ratios, ratios)))
    for chance in np.linspace(0.001, 0.999, 200):
        assert binom.pmf(numbers[np.array(bounds) < chance], 40, chance).sum() <= 0.1
    assert bounds[2] < 0.3
