"""The mean of private inputs within a budget: what it says, and that both parts cost the whole."""

import numpy as np
import pytest
from oracles_accounting import gaussian_epsilon

from fedcgd import NoiseKey
from fedcgd.planning import private_mean


def rows(users: int, features: int, seed: int) -> np.ndarray:
    """Of different norms, with much in common."""
    generator = np.random.default_rng(seed)
    return (1 + generator.normal(size=(users, features))) * generator.uniform(0.1, 50, (users, 1))


@pytest.mark.parametrize(("epsilon", "part"), [(1.0, 0.05), (8.0, 0.5), (0.1, 0.01)])
def test_both_parts_together_cost_what_was_given(epsilon: float, part: float) -> None:
    """μ² adds up: of the whole it is that of the mean over its part, and what is left has the rest."""
    found = private_mean(rows(50, 4, 1), epsilon=epsilon, delta=1e-5, key=NoiseKey.generate(), part=part)
    whole = 1 / found.plan.noise_multiplier / part**0.5
    assert epsilon * (1 - 1e-6) < gaussian_epsilon(whole) <= epsilon * (1 + 1e-9)
    left = gaussian_epsilon(whole * (1 - part) ** 0.5)
    assert left * (1 - 1e-6) < found.epsilon_left <= left * (1 + 1e-9)


def test_it_is_the_mean_of_rows_of_norm_one_with_the_noise_of_the_plan() -> None:
    inputs = rows(2000, 30, 2)
    unit = inputs / np.linalg.norm(inputs, axis=1, keepdims=True)
    found = [private_mean(inputs, epsilon=1.0, delta=1e-5, key=NoiseKey.generate()) for _ in range(40)]
    errors = np.array([one.mean for one in found]) - unit.mean(0)
    expected = found[0].plan.noise_multiplier / 2000
    assert errors.std() == pytest.approx(expected, rel=0.1)  # 1200 numbers: a standard error of 2 %
    assert abs(errors.mean()) < 5 * expected / np.sqrt(1200)
    shares = [one.share for one in found]
    true = float((unit.mean(0) ** 2).sum())
    assert true > 0.3
    assert np.mean(shares) == pytest.approx(true, abs=4 * np.std(shares) / np.sqrt(40))


def test_no_row_counts_more_than_norm_one() -> None:
    """Whatever a row is: the mean of one user is its row, and of others it moves by no more than 1/users."""
    noiseless = {"epsilon": 1e6, "delta": 0.5, "part": 0.999, "key": NoiseKey.simulation(1)}
    for row in ([1e300, 1e300], [1e-300, 0], [3.0, 4.0], [np.inf, 1], [np.nan, 1], [0, 0]):
        mean = private_mean(np.array([row]), **noiseless).mean
        assert np.linalg.norm(mean) < 1.05
        finite = np.isfinite(row).all() and any(row)
        assert (np.linalg.norm(mean) > 0.9) == finite


def test_two_sums_under_one_key_do_not_share_their_noise() -> None:
    key, inputs = NoiseKey.generate(), rows(20, 8, 3)
    one, other = (private_mean(some, epsilon=1.0, delta=1e-5, key=key) for some in (inputs, inputs[:, ::-1]))
    scale = one.plan.noise_multiplier / 20
    assert np.linalg.norm(one.mean - other.mean[::-1]) > scale  # the noise, not the rows, is what differs


@pytest.mark.parametrize(
    ("inputs", "part", "words"),
    [(np.ones(3), 0.1, "a row for each user"), (np.ones((0, 3)), 0.1, "a row for each user"),
     (np.ones((3, 2)), 0.0, "part must be between 0 and 1"), (np.ones((3, 2)), 1.0, "part must be between 0 and 1")],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(inputs: np.ndarray, part: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        private_mean(inputs, epsilon=1.0, delta=1e-5, key=NoiseKey.generate(), part=part)
