"""The theorem on the worst inputs, attacked: adaptive inputs in the plane, for two rounds, that know the first release."""

import itertools
import math

import numpy as np
import pytest

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(16)
PLANE = np.stack(np.meshgrid(NODES, NODES)).reshape(2, -1)
MASS = np.outer(WEIGHTS, WEIGHTS).ravel() / (2 * math.pi)
INPUTS = [np.zeros(2)] + [
    radius * np.array([math.cos(a), math.sin(a)])
    for radius in (0.5, 1.0)
    for a in np.linspace(0, 2 * math.pi, 8, endpoint=False)
]


def values(c: np.ndarray, law: dict[tuple[int, int], float], sigma: float, a: float, *, removing: bool):
    """δ of aligned inputs, and of the best adaptive ones: for each first release the best second inputs of those who
    took part before and of those who did not.
    """

    def log_weight(mean: np.ndarray) -> np.ndarray:
        return mean @ PLANE / sigma - mean @ mean / 2 / sigma**2

    first = np.array([1.0, 0.0])

    def delta(weights: np.ndarray, new: np.ndarray, again: np.ndarray) -> np.ndarray:
        """For each first release; `weights` are those of 00, 01, 10 and 11 after it."""
        means = [np.zeros(2), c[1, 1] * new, c[1, 0] * first, c[1, 0] * first + c[1, 1] * again]
        ratio = weights.T @ np.exp([log_weight(mean) for mean in means])
        return (np.maximum(ratio - a, 0) if removing else np.maximum(1 - a * ratio, 0)) @ MASS

    one = np.exp(log_weight(c[0, 0] * first))
    chances = [law.get(taken, 0.0) for taken in ((0, 0), (0, 1), (1, 0), (1, 1))]
    weights = np.stack([chances[0] + 0 * one, chances[1] + 0 * one, chances[2] * one, chances[3] * one])
    news = INPUTS if chances[1] else INPUTS[:1]
    best = np.max([delta(weights, new, again) for new, again in itertools.product(news, INPUTS)], axis=0)
    return float(delta(weights, first, first) @ MASS), float(best @ MASS)


@pytest.mark.parametrize("removing", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_worse_than_aligned_inputs(seed: int, removing: bool) -> None:
    """Random C ≥ 0 and laws; 2 % for the quadrature of a kink, at different angles."""
    generator = np.random.default_rng(seed)
    c = np.tril(generator.uniform(0.3, 1.2, (2, 2)))
    chances = generator.dirichlet(np.ones(4))
    law = dict(zip(itertools.product((0, 1), repeat=2), chances, strict=True))
    aligned, best = values(c, law, 1.0, 1.3, removing=removing)
    assert aligned <= best <= 1.02 * aligned + 1e-4


def test_negative_entries_can_be_much_worse() -> None:
    """C = [[1, 0], [−0.6, 1]], 00 or 11: the search finds what the theorem excludes for C ≥ 0."""
    aligned, best = values(np.array([[1.0, 0.0], [-0.6, 1.0]]), {(0, 0): 0.8, (1, 1): 0.2}, 1.0, 2.0, removing=True)
    assert aligned == pytest.approx(0.0095, rel=0.1)
    assert best > 5 * aligned
