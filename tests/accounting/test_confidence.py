"""Upper bounds on means: how often they are too low, exactly, and what cutting draws off costs."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from fedcgd.accounting.confidence import radius, stake, upper_bound


@pytest.mark.parametrize("bet", [0.1, 0.6, 0.99])
@pytest.mark.parametrize("failure", [0.1, 1e-6])
def test_bounds_on_coins_fail_as_rarely_as_they_say_by_enumeration(bet: float, failure: float) -> None:
    """Every number of heads in 40 throws, with the probability that each has: no draws, so that 10⁻⁶ can be seen."""
    throws, largest = 40, 7.0
    heads = np.arange(throws + 1)
    bounds = np.array(
        [upper_bound(largest * (np.arange(throws) < k), largest, bet / largest, failure) / largest for k in heads]
    )
    assert all(np.diff(bounds) >= 0)
    for chance in np.linspace(0.001, 0.999, 400):
        assert binom.pmf(heads[bounds < chance], throws, chance).sum() <= failure


def test_bounds_are_close_where_nothing_is_seen() -> None:
    """No head in n throws has the probability (1 − p)ⁿ, so that no bound can be lower than where this is the failure."""
    for failure in (1e-3, 1e-13):
        least = -math.expm1(math.log(failure) / 5000)
        assert least <= upper_bound(np.zeros(5000), 1.0, 0.99, failure) <= 1.02 * least


@pytest.mark.parametrize("unit", [1e-12, 1e-3, 1e9])
def test_bounds_know_no_unit(unit: float) -> None:
    draws = np.random.default_rng(1).random(100)
    bound = upper_bound(draws, 2.0, 0.4, 1e-3)
    assert upper_bound(unit * draws, 2.0 * unit, 0.4 / unit, 1e-3) == pytest.approx(unit * bound, rel=1e-9, abs=0)


def test_the_stake_is_about_the_best() -> None:
    """It makes `radius` smallest, and that is what is found."""
    draws = np.random.default_rng(1).beta(2, 8, 20_000)
    variance, count = float(draws.var()), len(draws)
    best = stake(variance, 1.0, count, 1e-12)
    found = upper_bound(draws, 1.0, best, 1e-12) - draws.mean()
    assert found == pytest.approx(radius(variance, 1.0, count, 1e-12), rel=0.05)
    for other in (best / 2, best * 2):
        assert upper_bound(draws, 1.0, other, 1e-12) - draws.mean() > 1.1 * found
    assert stake(0.0, 5.0, 10, 0.1) == 0.99 / 5  # where no variance is seen
    assert stake(1e-9, 5.0, 10, 0.1) == 0.99 / 5


@pytest.mark.parametrize("bet", [0.0, -0.1, 0.26])
def test_a_bet_that_could_lose_more_than_all_is_refused(bet: float) -> None:
    with pytest.raises(ValueError, match=r"^bet"):
        upper_bound(np.zeros(3), 4.0, bet, 0.1)
    assert upper_bound(np.zeros(30), 4.0, 0.25, 0.1) < 4.0
