"""The draws of Balls-in-Bins: against enumeration and quadrature, and their bounds fail as rarely as they say."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from fedcgd.accounting import gaussian
from fedcgd.accounting.balls_in_bins import monte_carlo, remove
from fedcgd.accounting.balls_in_bins.add import _EXPONENTS, _log_laplace, add_bound
from fedcgd.accounting.balls_in_bins.draws import Bins, Sample, log_excess
from fedcgd.accounting.balls_in_bins.remove import remove_bound, sample_remove
from fedcgd.accounting.balls_in_bins.star_proposal import StarProposal

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
    stars, generator = StarProposal.of(GRAM, order), np.random.default_rng(1)
    points, shares = stars.draw(generator, 200_000)
    accepted = points[:, generator.random(len(shares)) < shares]
    total, count = sum(weights.values()), accepted.shape[1]
    found = Counter(tuple(sorted(column)) for column in accepted.T.tolist())
    for kind in {tuple(sorted(points)) for points in weights}:
        expected = sum(weight for points, weight in weights.items() if tuple(sorted(points)) == kind) / total
        assert found[kind] / count == pytest.approx(expected, abs=5 * math.sqrt(expected / count))
    moment = math.exp(stars.log_total) * shares.mean()
    error = math.exp(stars.log_total) * shares.std() / math.sqrt(len(shares))
    assert moment == pytest.approx(total / 3**order, abs=5 * error + 1e-9)


def delta_of_two_bins(overlap: float, sigma: float, epsilon: float) -> float:
    """δ of removing for two bins of size 1, by a sum over a grid in the plane that they span."""
    centers = np.linalg.cholesky(np.array([[1.0, overlap], [overlap, 1.0]])) / sigma
    axis = np.linspace(-8, 12, 1601)
    x, y = np.meshgrid(axis, axis, indexing="ij")
    plain, *shifted = (np.exp(-((x - u) ** 2 + (y - v) ** 2) / 2) for u, v in [(0.0, 0.0), *centers])
    excess = np.maximum(sum(shifted) / 2 - math.exp(epsilon) * plain, 0).sum()
    return float(excess) * (axis[1] - axis[0]) ** 2 / (2 * math.pi)


@pytest.mark.parametrize("gram", [GRAM, np.array([[1.0, 0.9999], [0.9999, 1.0]]), np.diag([1.0, 1e-11, 2.0])])
def test_what_all_bins_have_in_common_is_a_part_of_their_covariance(gram: np.ndarray) -> None:
    """As much as there can be but for a thousandth; also where one bin does not move, and so there is nothing."""
    bins = Bins(gram)
    np.testing.assert_allclose(bins.apart + bins.common, gram, rtol=1e-9, atol=3e-11)
    assert np.linalg.eigvalsh(gram - 0.999 * bins.common)[0] > 0
    assert np.linalg.eigvalsh(gram - 1.002 * bins.common)[0] < 0
    np.testing.assert_allclose(bins.root.T @ bins.root, bins.apart, rtol=1e-5, atol=1e-6)
    drawn = np.cov(bins.noise(np.random.default_rng(1), 100_000), rowvar=False)
    np.testing.assert_allclose(drawn, gram, atol=0.05)


@pytest.mark.parametrize("c", [1e-3, 0.06, 1.0, 4.0])
@pytest.mark.parametrize("order", [2, 11, 40])
def test_mean_over_what_all_bins_have_in_common(c: float, order: int) -> None:
    """B(x) = E (L·e^x − 1)₊ by a sum over t, and the largest of e^(−rx)·B(x) on a grid."""
    t = np.linspace(-40, 40, 400_001)
    density = np.exp(-(t**2) / 2) * (t[1] - t[0]) / math.sqrt(2 * math.pi)
    for x in (-4 * c, -c, 0.0, 0.5 * c, 3 * c):
        truth = float(density @ np.maximum(np.expm1(x + c * t - c**2 / 2), 0))
        assert math.exp(float(log_excess(np.array(x), c))) == pytest.approx(truth, rel=1e-5)
    highest = -math.log1p(-1 / order)  # beyond it the slope of log B is below r
    x = np.linspace(highest - 3 * c - 2 * order * c**2, highest, 200_001)
    values = log_excess(x, c) - order * x
    assert remove._log_top(order, c) == pytest.approx(float(values.max()), abs=1e-6)
    assert remove._log_top(order, c) >= values.max()


@pytest.mark.parametrize("order", [2, 3, 5, 9])
@pytest.mark.parametrize(
    ("overlap", "sigma", "epsilon"), [(0.0, 0.8, 1.0), (0.6, 0.8, 1.0), (0.6, 2.0, 0.5), (0.99, 1, 2)]
)
def test_every_order_has_the_mean_by_quadrature(monkeypatch, order, overlap, sigma, epsilon) -> None:
    """Also orders that would not be chosen, where few stars are accepted or the draws vary much."""
    bins = Bins(np.array([[1.0, overlap], [overlap, 1.0]]))
    monkeypatch.setattr(
        remove, "_proposal", lambda bins, sigma, _: (StarProposal.of(bins.apart / sigma**2, order), 0.3)
    )
    sample = sample_remove(bins, sigma, epsilon, 40_000, (5, order))
    assert sample.shares is not None
    mean = sample.values.mean() * sample.shares.mean()
    error = mean * math.sqrt(sum(x.var() / x.mean() ** 2 / len(x) for x in (sample.values, sample.shares)))
    truth = delta_of_two_bins(overlap, sigma, epsilon)
    assert mean >= truth - 4 * error
    assert mean <= truth * 1.001 + 4 * error or order == 9  # where what is left out may be large
    assert sample.values.max() <= sample.range
    assert sample.shares.max() <= 1


@pytest.mark.parametrize(
    ("order", "sigma", "epsilon", "single"),
    [(2, 0.5, 4.0, True), (9, 0.6, 10.0, False), (2, 0.33, 9.0, False), (2, 0.1, 100.0, False)],
)
def test_draws_are_in_single_precision_only_where_it_is_enough(monkeypatch, order, sigma, epsilon, single) -> None:
    """And then each is at least what it is in double precision, without what is added for rounding. At σ = 0.1 it overflows."""
    bins = Bins(np.eye(40))
    monkeypatch.setattr(
        remove, "_proposal", lambda bins, sigma, _: (StarProposal.of(bins.apart / sigma**2, order), 0.3)
    )

    def values() -> np.ndarray:
        return sample_remove(bins, sigma, epsilon, 2000, (5, order)).values

    found = values()
    monkeypatch.setattr(remove, "_LOWEST", 0.0)  # double precision
    assert np.array_equal(found, values()) is not single
    monkeypatch.setattr(remove, "_ROUNDING", 0.0)
    assert (found >= values()).all()


def test_confirmed_bounds_are_below_the_truth_as_rarely_as_they_say() -> None:
    """At failure 0.1, of 150 bounds on δ 15 or so may be too small; without a margin half of them are."""
    bins, sigma, epsilon = Bins(np.array([[1.0, 0.6], [0.6, 1.0]])), 0.8, 1.0
    truth = delta_of_two_bins(0.6, sigma, epsilon)
    pilot = monte_carlo._pilot(partial(sample_remove, bins, sigma, epsilon), 4096, 1, 0.1)
    for failure, most in ((0.1, 26), (1e-3, 2)):
        direction = replace(pilot, failure=failure)
        found = [direction.confirm(500, (seed, 7)) for seed in range(150)]
        assert sum(bound < truth for bound in found) <= most
    samples = [pilot.draw(500, (seed, 7)) for seed in range(150)]
    means = [sample.values.mean() * sample.shares.mean() for sample in samples if sample.shares is not None]
    assert 40 < sum(mean < truth for mean in means) < 110


@pytest.mark.parametrize("constant", ["values", "shares"])
def test_each_of_the_two_means_has_a_margin(constant: str) -> None:
    """One is known, of the other 3 of 10 draws are 1: at failure 0.2 a tenth of the bounds on that mean may be too small."""

    def draw(count: int, seed: tuple[int, int]) -> Sample:
        rare = (np.random.default_rng(seed).random(count) < 0.3).astype(float)
        values, shares = (np.ones(count), rare) if constant == "values" else (rare, np.ones(count))
        return Sample(values, 1.0, math.inf, shares)

    direction = monte_carlo._pilot(draw, 4096, 1, 0.2)
    found = [direction.confirm(1000, (seed, 7)) for seed in range(2, 302)]
    assert sum(bound < 0.3 for bound in found) <= 30 + 3 * math.sqrt(27)
    assert np.mean(found) < 0.4


def test_what_is_cut_off_is_part_of_a_bound() -> None:
    """X = 100 with probability 10⁻⁶, which 1000 draws do not see: E X² = 0.01 says how much that can be."""

    def draw(count: int, seed: tuple[int, int]) -> Sample:
        return Sample(np.zeros(count), 1e6, 0.01, None)

    found = monte_carlo._pilot(draw, 4096, 1, 0.1).confirm(1000, (1, 7))
    at = math.sqrt(0.01 * 1000 / (4 * math.log(10)))
    assert found == pytest.approx(at * math.expm1(math.log(10) / 1000) / 0.99 + 0.01 / (4 * at), rel=1e-6)


def test_what_may_fail_is_shared_out(monkeypatch) -> None:
    """Between the two means of a bound, and between all bounds of a search: together no more than β."""
    spent: list[float] = []

    def recorded(draws: np.ndarray, largest: float, bet: float, failure: float) -> float:
        spent.append(failure)
        return float(draws.mean())  # too small, so that nothing is left to a later try

    monkeypatch.setattr(monte_carlo, "upper_bound", recorded)
    bins = Bins(GRAM)
    direction = monte_carlo._pilot(partial(sample_remove, bins, 1.0, 1.0), 4096, 1, 0.1)
    direction.confirm(1000, (1, 1))
    assert spent == [0.05, 0.05]
    spent.clear()
    monte_carlo.calibrate(bins, epsilon=1.0, delta=1e-5, progress=lambda _: None)
    assert len(spent) in (2, 3)
    assert 2 * monte_carlo._TRIES * 2 * max(spent[:2]) <= monte_carlo.failure_probability(1e-5) * (1 + 1e-9)


def test_no_draw_that_the_search_has_seen_confirms_anything(monkeypatch) -> None:
    """Nor one of an earlier try, nor of the other direction: with a seed twice, chance would be picked for being low."""
    looked: list[tuple[int, int]] = []
    confirmed: list[tuple[int, int]] = []

    def recorded(kind):
        def draw(bins: Bins, sigma: float, epsilon: float, count: int, seed: tuple[int, int]) -> Sample:
            looked.append(seed)
            return kind(bins, sigma, epsilon, count, seed)

        return draw

    def confirm(direction: monte_carlo.Direction, count: int, seed: tuple[int, int]) -> float:
        confirmed.append(seed)
        return 0.0 if len(confirmed) % 2 else 1.0  # the second direction fails in every try

    monkeypatch.setattr(monte_carlo, "sample_remove", recorded(monte_carlo.sample_remove))
    monkeypatch.setattr(monte_carlo, "sample_add", recorded(monte_carlo.sample_add))
    monkeypatch.setattr(monte_carlo.Direction, "confirm", confirm)
    monkeypatch.setattr(monte_carlo, "_STEEPEST", 1e6)  # small steps, for as many tries as there may be
    monte_carlo.calibrate(Bins(GRAM), epsilon=0.1, delta=1e-2, progress=lambda _: None)
    assert len(confirmed) == 2 * monte_carlo._TRIES
    assert len({*confirmed, *looked}) == len(confirmed) + 1  # all of the search are one
    looked.clear()
    confirmed.clear()
    monte_carlo.delta(Bins(GRAM), sigma=2.0, epsilon=0.1, progress=lambda _: None)
    assert len({*confirmed, *looked}) == 3


def test_a_delta_without_a_search_is_the_larger_direction_and_what_may_fail(monkeypatch) -> None:
    shares: list[float] = []

    def confirm(direction: monte_carlo.Direction, count: int, seed: tuple[int, int]) -> float:
        shares.append(direction.failure)
        return 0.01 * len(shares)

    def found(**changed: object):
        shares.clear()
        for name, function in changed.items():
            monkeypatch.setattr(monte_carlo, name, function)
        return monte_carlo.delta(Bins(GRAM), sigma=2.0, epsilon=0.1, progress=lambda _: None)

    both = found()
    monkeypatch.setattr(monte_carlo.Direction, "confirm", confirm)
    drawn = found()
    assert drawn.failure_probability == both.failure_probability == 1e-12
    assert (len(shares), sum(shares)) == (2, pytest.approx(1e-12, rel=1e-9, abs=0))
    assert drawn.value == 0.02 + 1e-12
    # What is proven without draws, and needs none beside the other direction, counts too.
    assert both.value > 0.03
    proven = found(remove_bound=lambda gram, epsilon: math.log(0.03))
    assert (len(shares), proven.value) == (1, pytest.approx(0.03 + 1e-12, rel=1e-14))


def test_nothing_accepted_is_the_worst_there_is(monkeypatch) -> None:
    monkeypatch.setattr(remove, "_proposal", lambda bins, sigma, _: (StarProposal.of(bins.apart, 2), 1e9))
    monkeypatch.setattr(StarProposal, "draw", lambda *_: (np.zeros((2, 1), dtype=np.intp), np.zeros(1)))
    sample = sample_remove(Bins(GRAM), 1.0, 1.0, 10, (1, 1))
    assert sample.values.tolist() == [sample.range]


@pytest.mark.parametrize("overlap", [0.0, 0.4])
def test_bound_on_the_laplace_transform_of_the_sum(overlap: float) -> None:
    """ψ(h) = E e^(−hS) by quadrature over two bins: exact for independent ones but for the steps of h, above it for others."""
    gram = np.array([[1.0, overlap], [overlap, 0.7]])
    t = np.arange(-9, 9.01, 0.04)
    root, weight = np.linalg.cholesky(gram), np.exp(-(t**2) / 2) * 0.04 / math.sqrt(2 * math.pi)
    first = np.exp(root[0, 0] * t - 0.5)[:, None]
    second = np.exp(root[1, 0] * t[:, None] + root[1, 1] * t[None, :] - 0.35)
    bound = _log_laplace(gram)
    for i in range(0, 700, 50):
        truth = math.log(weight @ np.exp(-_EXPONENTS[i] * (first + second) / 2) @ weight)
        assert truth - 1e-9 <= bound[i]
        assert i > 300 or bound[i] <= truth * (0.95 if overlap == 0 else 0.6)  # h up to 5


@pytest.mark.parametrize(("overlap", "sigma", "epsilon"), [(0.0, 0.8, 1.0), (0.6, 0.8, 1.0), (0.6, 2.0, 0.5)])
def test_bounds_without_draws_are_above_quadrature(overlap: float, sigma: float, epsilon: float) -> None:
    gram = np.array([[1.0, overlap], [overlap, 1.0]]) / sigma**2
    assert math.exp(remove_bound(gram, epsilon)) > delta_of_two_bins(overlap, sigma, epsilon)
    x = np.random.default_rng(2).standard_normal((400_000, 2)) @ np.linalg.cholesky(gram).T
    adding = np.maximum(1 - math.exp(epsilon) * np.exp(x - np.diag(gram) / 2).mean(axis=1), 0)
    assert add_bound(gram, epsilon) > adding.mean() - 4 * adding.std() / math.sqrt(len(adding))


def test_moments_of_order_two_and_three_are_found_and_higher_ones_bounded(monkeypatch) -> None:
    """E[S^r] by all (J_1 … J_r) of five bins: the bound is that of the best r where r ≤ 3 is best, and else above."""
    columns = np.random.default_rng(5).uniform(0, 1, (6, 5))
    gram = columns.T @ columns / 1.2**2
    orders = range(2, 7)
    moments = []
    for r in orders:
        bins = np.array(list(itertools.product(range(5), repeat=r)))
        pairs = itertools.combinations(range(r), 2)
        moments.append(np.exp(sum(gram[bins[:, a], bins[:, c]] for a, c in pairs)).mean())
    seen = set()
    for epsilon in (0.5, 2.0, 3.0, 4.0, 6.0):
        values = [
            math.log(moment) + (r - 1) * (math.log(r - 1) - epsilon) - r * math.log(r)
            for r, moment in zip(orders, moments, strict=True)
        ]
        best, found = int(np.argmin(values)), remove_bound(gram, epsilon)
        seen.add(orders[best])
        assert found >= min(values) - 1e-12
        if orders[best] <= 3:
            assert found == pytest.approx(min(values), abs=1e-12)
            with monkeypatch.context() as few:
                few.setattr(remove, "_MOST_TRIPLES", 4)
                assert remove_bound(gram, epsilon) >= found
                if orders[best] == 3:
                    assert remove_bound(gram, epsilon) > found + 0.01
    assert {2, 3} < seen


@pytest.mark.parametrize(("sigma", "epsilon", "drawn"), [(0.5, 2.0, True), (2.0, 2.0, True), (2.0, 5.0, False)])
def test_a_delta_without_a_search_is_an_upper_bound(monkeypatch, sigma: float, epsilon: float, drawn: bool) -> None:
    """Two bins of overlap 0.6, by quadrature; the last, below 10⁻²⁰, has no more draws than a confirmation has at least."""
    counts: list[int] = []
    confirm = monte_carlo.Direction.confirm

    def counted(self: monte_carlo.Direction, count: int, seed: tuple[int, int]) -> float:
        counts.append(count)
        return confirm(self, count, seed)

    monkeypatch.setattr(monte_carlo.Direction, "confirm", counted)
    bins, heard = Bins(np.array([[1.0, 0.6], [0.6, 1.0]])), list[str]()
    found = monte_carlo.delta(bins, sigma=sigma, epsilon=epsilon, progress=heard.append)
    assert delta_of_two_bins(0.6, sigma, epsilon) <= found.value <= gaussian.delta(epsilon=epsilon, sigma=sigma)
    assert all("draws to confirm it, about" in text for text in heard)
    if drawn:
        assert len(heard) == len(counts) > 0
    else:
        assert found.value < 1e-20
        assert all(count <= monte_carlo._FEWEST for count in counts)
