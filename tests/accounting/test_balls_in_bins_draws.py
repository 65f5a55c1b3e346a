"""The draws of Balls-in-Bins: against enumeration and quadrature, and their bounds fail as rarely as they say."""

import math
from collections import Counter
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from oracles_b_min_sep import ONE_OF_TWO, deltas

from fedcgd.accounting import gaussian
from fedcgd.accounting.accountant import silent
from fedcgd.accounting.balls_in_bins.law import BinLaw, BinLikelihood, Bins
from fedcgd.accounting.balls_in_bins.star_proposal import StarProposal
from fedcgd.accounting.guarantee import Bound, Proof
from fedcgd.accounting.random_participation import monte_carlo
from fedcgd.accounting.random_participation.monte_carlo import Problem
from fedcgd.accounting.random_participation.remove import RemoveSampler

GRAM = np.array([[1.2, 0.5, 0.1], [0.5, 0.9, 0.3], [0.1, 0.3, 1.0]])


def weights_by_enumeration(gram: np.ndarray, order: int) -> dict[tuple[int, ...], float]:
    """exp(Σ_{a<c} G[J_a, J_c]) of every (J_1 … J_r)."""
    return {
        points: math.exp(sum(gram[points[a], points[c]] for c in range(order) for a in range(c)))
        for points in product(range(len(gram)), repeat=order)
    }


@pytest.mark.parametrize("order", [2, 3, 4])
def test_accepted_stars_have_the_weights_by_enumeration(order: int) -> None:
    weights = weights_by_enumeration(GRAM, order)
    stars, generator = StarProposal.from_gram(GRAM, 1.0, order), np.random.default_rng(1)
    points, shares = stars.draw(generator, 200_000)
    accepted = points[0][:, generator.random(len(shares)) < shares]
    total, count = sum(weights.values()), accepted.shape[1]
    found = Counter(tuple(sorted(column)) for column in accepted.T.tolist())
    for kind in {tuple(sorted(points)) for points in weights}:
        expected = sum(weight for points, weight in weights.items() if tuple(sorted(points)) == kind) / total
        assert found[kind] / count == pytest.approx(expected, abs=5 * math.sqrt(expected / count))
    moment = math.exp(stars.log_total) * shares.mean()
    error = math.exp(stars.log_total) * shares.std() / math.sqrt(len(shares))
    assert moment == pytest.approx(total / 3**order, abs=5 * error + 1e-9)


@pytest.mark.parametrize("gram", [GRAM, np.array([[1.0, 0.9999], [0.9999, 1.0]]), np.diag([1.0, 1e-11, 2.0])])
def test_noise_has_the_covariance_of_the_bins(gram: np.ndarray) -> None:
    """Also where one bin does not move."""
    bins = Bins(gram)
    np.testing.assert_allclose(bins.root @ bins.root.T, gram, rtol=1e-5, atol=1e-6)
    drawn = np.cov(bins.noise(np.random.default_rng(1), 100_000))
    np.testing.assert_allclose(drawn, gram, atol=0.05)


def sampler(bins: Bins, sigma: float, epsilon: float, order: int) -> RemoveSampler:
    law = BinLaw(bins.rounds)
    return RemoveSampler(
        bins, law.likelihood(bins, sigma), law.tuples(bins, sigma, order), sigma, epsilon, accepted=0.3
    )


@pytest.mark.parametrize("order", [2, 3, 5, 9])
@pytest.mark.parametrize(
    ("overlap", "sigma", "epsilon"), [(0.0, 0.8, 1.0), (0.6, 0.8, 1.0), (0.6, 2.0, 0.5), (0.99, 1, 2)]
)
def test_every_order_has_the_mean_by_quadrature(order, overlap, sigma, epsilon) -> None:
    """Also orders that would not be chosen, where few stars are accepted or the draws vary much."""
    gram = np.array([[1.0, overlap], [overlap, 1.0]])
    of = sampler(Bins(gram), sigma, epsilon, order)
    values, shares = of.draw(40_000, (5, order))
    scale = math.exp(of.log_scale)
    mean = scale * values.mean() * shares.mean()
    error = mean * math.sqrt(sum(x.var() / x.mean() ** 2 / len(x) for x in (values, shares)))
    truth, _ = deltas(np.linalg.cholesky(gram).T, ONE_OF_TWO, sigma, epsilon, 1601)
    assert mean >= truth - 4 * error
    assert mean <= truth * 1.002 + 4 * error or order == 9  # where what is left out may be large
    assert values.max() <= 1
    assert shares.max() <= 1


@pytest.mark.parametrize(("sigma", "epsilon"), [(0.5, 2.0), (2.0, 5.0)])
def test_a_delta_is_an_upper_bound_also_where_nothing_is_drawn(sigma: float, epsilon: float) -> None:
    """Two bins of overlap 0.6; the last is below 10⁻²⁰."""
    gram = np.array([[1.0, 0.6], [0.6, 1.0]])
    known = Bound(gaussian.delta(epsilon=epsilon, sigma=sigma), Proof("known rounds"))
    found = monte_carlo.delta(Problem(Bins(gram), BinLaw(2)), known, sigma=sigma, epsilon=epsilon, progress=silent)
    assert max(deltas(np.linalg.cholesky(gram).T, ONE_OF_TWO, sigma, epsilon, 1101)) <= found.value <= known.value


@pytest.mark.parametrize("overlap", [0.9, 0.999])
def test_single_precision_changes_log_s_by_less_than_is_added_for_it(overlap: float) -> None:
    """With losses of several hundred, beside products of the same normal numbers in double precision."""
    b, square = 200, 400.0
    gram = square * overlap ** np.abs(np.subtract.outer(np.arange(b), np.arange(b)))
    bins, z = Bins(gram), np.random.default_rng(0).standard_normal((b, 64), dtype=np.float32)
    found = bins.noise(SimpleNamespace(standard_normal=lambda *_, **__: z.T.copy()), 64)
    exact = np.linalg.cholesky(gram) @ z.astype(float)
    lift = gram[:, np.arange(64)]
    likelihood = BinLikelihood(bins.squares / 2)
    log_s = [np.log(likelihood.bounds(likelihood.weights(lift + x))[0]) for x in (found, exact)]
    assert log_s[1].max() > 200
    assert 0 < np.abs(log_s[0] - log_s[1]).max() < Bins.rounding
