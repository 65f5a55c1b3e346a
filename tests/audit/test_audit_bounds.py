"""Lower bounds on ε: hand calculation, and that they hold as often as they say on mechanisms whose ε is known."""

import math

import numpy as np
import pytest
from oracles_accounting import gaussian_log_delta

from fedcgd.audit.bounds import _refuted_by_guesses, gaussian_bound, one_run_bound, threshold_bound

ALL_BOUNDS = [one_run_bound, threshold_bound, gaussian_bound]


def randomized_response(rng: np.random.Generator, epsilon: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores ±1 that tell membership rightly with probability e^ε/(1 + e^ε), and a fair coin for each membership."""
    member = rng.random(count) < 0.5
    right = rng.random(count) < 1 / (1 + math.exp(-epsilon))
    scores = np.where(member == right, 1.0, -1.0)
    return scores[member], scores[~member]


def test_one_run_bound_with_all_guesses_right_by_hand() -> None:
    """100 of 100 right has probability q^100 at q = e^ε/(1 + e^ε); it is refuted at (1 − 0.95)/4, for four numbers of guesses."""
    q = 0.0125 ** (1 / 100)
    bound = one_run_bound(np.arange(50) + 1000.0, np.arange(50) + 0.0, 0.0, 0.95)
    assert bound == pytest.approx(math.log(q / (1 - q)), abs=1e-4)


def test_one_run_bound_pays_for_delta_by_hand() -> None:
    """Two canaries, both guessed right: the theorem's probability is q² + 2·2·δ·max((1 − q)·q·2, (1 − q²)/2)."""
    found = _refuted_by_guesses(2, 2, 2, 0.05, 0.5)
    q = 1 / (1 + math.exp(-found))
    assert q * q + 4 * 0.05 * max(2 * q * (1 - q), (1 - q * q) / 2) == pytest.approx(0.5, abs=1e-5)
    assert 0 < found < _refuted_by_guesses(2, 2, 2, 0.0, 0.5)


@pytest.mark.parametrize("bound", ALL_BOUNDS)
def test_equal_scores_say_nothing(bound) -> None:
    """Also when one kind comes first: ties may not be broken by membership."""
    assert bound(np.zeros(300), np.zeros(300), 1e-5, 0.95) == 0


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
@pytest.mark.parametrize("bound", [one_run_bound, threshold_bound])
def test_bound_exceeds_the_epsilon_of_randomized_response_as_rarely_as_it_says(bound, epsilon: float) -> None:
    rng = np.random.default_rng(1)
    found = np.array([bound(*randomized_response(rng, epsilon, 1500), 0.0, 0.9) for _ in range(40)])
    assert (found > epsilon).mean() <= 0.1 + 2 * math.sqrt(0.1 * 0.9 / 40)
    assert np.median(found) > 0.5 * epsilon


@pytest.mark.parametrize(("users", "count", "least"), [(1, 4000, 0.75), (4, 4000, 0.88), (1, 100, 0.3)])
def test_gaussian_bound_exceeds_the_epsilon_as_rarely_as_it_says_and_is_close(
    users: int, count: int, least: float
) -> None:
    rng = np.random.default_rng(2)
    # δ of the (1, δ)-pair of μ = 1.
    delta = math.exp(gaussian_log_delta(1.0, 1.0))
    scores = rng.normal(size=(100, 2, 4000))
    found = np.array([gaussian_bound(users + one[:count], other, delta, 0.9, users=users) for one, other in scores])
    assert (found > 1.0).mean() <= 0.1 + 2 * math.sqrt(0.1 * 0.9 / 100)
    assert np.median(found) > least


def test_the_threshold_is_not_chosen_on_the_scores_that_are_counted() -> None:
    """Where nothing is to be found, ε > 0 is reported as rarely as the confidence says."""
    rng = np.random.default_rng(5)
    found = [threshold_bound(rng.normal(size=200), rng.normal(size=200), 0.0, 0.9) for _ in range(100)]
    assert np.mean(np.array(found) > 0) <= 0.1


def test_ties_are_broken_by_chance() -> None:
    """A quarter of each kind stands out by the same score; 2 % of the guesses then are right as often as not."""
    scores = np.repeat([1.0, 0.0], [250, 750])
    informative = np.concatenate([np.full(500, 2.0), scores])
    assert one_run_bound(informative, scores, 0.0, 0.95) > 0.5
    assert one_run_bound(scores, np.concatenate([np.full(500, -1.0), scores]), 0.0, 0.95) > 0.5


def test_threshold_bound_by_clopper_and_pearson() -> None:
    """No error in 1000 and 1000 counted: α, β ≤ 1 − 0.05^(1/1000) = 0.0029912, and ε ≥ log((1 − β)/α)."""
    found = threshold_bound(np.ones(2000), np.zeros(2000), 0.0, 0.9)
    assert found == pytest.approx(math.log((1 - 0.0029912) / 0.0029912), abs=1e-3)


def test_noise_that_vanishes_gives_a_finite_bound() -> None:
    assert 1e6 < gaussian_bound(np.ones(100), np.zeros(100), 1e-5, 0.99) < math.inf


@pytest.mark.parametrize("bound", ALL_BOUNDS)
def test_a_few_canaries_are_too_few_but_no_error(bound) -> None:
    assert bound(np.ones(1), np.zeros(1), 1e-5, 0.99) == 0
