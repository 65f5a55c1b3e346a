"""Random b-min-separation against enumeration, quadrature, an independent Monte Carlo, and the exact Poisson accountant."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from oracles_b_min_sep import deltas, independent_monte_carlo, indicators, patterns, ratio

from fedcgd import Participation, calibrate, compute_delta, compute_epsilon
from fedcgd.accounting import amplified
from fedcgd.accounting.accountant import silent
from fedcgd.accounting.b_min_sep import pairs
from fedcgd.accounting.b_min_sep.law import BMinSepLaw
from fedcgd.accounting.b_min_sep.likelihood import BMinSepLikelihood
from fedcgd.accounting.b_min_sep.pairs import PairChain, States
from fedcgd.accounting.coverage import NegativeEntryError
from fedcgd.accounting.random_participation import monte_carlo, overlaps, remove
from fedcgd.accounting.random_participation.add import AddDirection, draw_log_ratios
from fedcgd.accounting.random_participation.columns import BandedColumns, Columns, columns_of
from fedcgd.accounting.random_participation.remove import RemoveSampler
from fedcgd.mechanisms import (
    BISR,
    BSR,
    DPSGD,
    BandedToeplitz,
    BinaryTree,
    Dense,
    LambdaCGD,
    Mechanism,
    Normalized,
    matrix,
)
from fedcgd.optimisation import catalogue


def b_min_sep(rounds: int, b: int, rate: float, **rest) -> Participation:
    return Participation(rounds=rounds, min_separation=b, sampling="b-min-sep", sampling_rate=rate, **rest)


def uneven(n: int, bands: int) -> Mechanism:
    """Columns of which none is a multiple of another."""
    band = np.random.default_rng(n).uniform(0.3, 1.5, (n, bands))
    return Dense("band-mf", np.where(np.add.outer(np.arange(n), np.arange(bands)) < n, band, 0.0))


SMALL = [
    (BSR(3), 6, 3),
    (DPSGD(), 5, 2),
    (LambdaCGD(0.6), 6, 2),
    (Normalized(LambdaCGD(0.6)), 6, 2),
    (LambdaCGD(0.5), 5, 1),
    (BISR(2), 6, 2),
    (Normalized(BISR(2)), 6, 3),
    (BSR(2), 3, 5),
    (BSR(3), 6, 2),  # one band too many
    (uneven(6, 3), 6, 3),
    (uneven(6, 2), 6, 3),
    (uneven(6, 3), 6, 2),  # one band too many
    (uneven(3, 2), 3, 5),
]


def dense(columns: Columns) -> np.ndarray:
    n = columns.rounds
    if isinstance(columns, BandedColumns):
        bands = columns.band.T
        return sum((np.diag(band[: n - lag], -lag) for lag, band in enumerate(bands)), np.zeros((n, n)))
    lags = np.subtract.outer(np.arange(n), np.arange(n))
    return np.where(lags >= 0, columns.column[np.abs(lags)], 0.0) * columns.scales


def sampler_of(columns: Columns, law: BMinSepLaw, sigma: float, epsilon: float) -> RemoveSampler:
    found = RemoveSampler.from_law(columns, law, law.likelihood(columns, sigma), sigma, epsilon)
    assert found is not None
    return found


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(("mechanism", "n", "b"), SMALL)
def test_likelihood_ratio_by_enumeration(mechanism, n: int, b: int, warm: bool) -> None:
    """And columns are those of C, or none is smaller."""
    columns, law = columns_of(mechanism, n, b, n), BMinSepLaw(n, b, 0.4, warm)
    c = dense(columns)
    assert np.all(c >= matrix(mechanism, n) - 1e-12)
    if columns.exact:
        np.testing.assert_allclose(c, matrix(mechanism, n), atol=1e-12)
    y = 1.3 * np.random.default_rng(1).standard_normal((n, 40)) + c[:, [0]]
    np.testing.assert_allclose(columns.adjoint(y), c.T @ y)
    np.testing.assert_allclose(columns.forward(y), c @ y)
    truth = ratio(c, patterns(n, b, 0.4, warm=warm), y, 1.3)
    likelihood = BMinSepLikelihood.from_columns(columns, law, 1.3)
    lower, upper = likelihood.bounds(likelihood.weights(columns.adjoint(y) / 1.3**2))
    assert np.all(lower <= truth * (1 + 1e-12))
    assert np.all(truth <= upper * (1 + 1e-12))
    assert np.all(upper <= lower * 1.006)


@pytest.mark.parametrize("b", [1, 2, 7, 31])
@pytest.mark.parametrize(
    "mechanism",
    [
        BSR(3),
        BSR(8),
        BSR(40),
        BandedToeplitz((1.0, 1.0, 1.0, 1.0)),
        BandedToeplitz((1.0, 0.5, 1e-9)),
        BISR(8),
        BinaryTree(),
    ],
    ids=str,
)
def test_columns_dominate_and_products_keep_their_digits(mechanism, b: int) -> None:
    """Also where a tail ends at once, after more than b bands, which a geometric sequence follows badly."""
    n = 60
    columns = columns_of(mechanism, n, b, n)
    c, x = dense(columns), np.random.default_rng(7).standard_normal((n, 3))
    assert np.all(c >= matrix(mechanism, n) * (1 - 1e-12) - 1e-13)
    np.testing.assert_allclose(columns.forward(x), c @ x, atol=1e-10)
    np.testing.assert_allclose(columns.adjoint(x), c.T @ x, atol=1e-10)


@pytest.mark.parametrize(("lam", "sigma"), [(0.99, 0.05), (0.999, 0.2), (0.9, 0.1)])
def test_bounds_hold_where_numbers_overflow(lam: float, sigma: float) -> None:
    """Little noise and rounds close together: bounds may be far from each other, and S is between them."""
    n, b = 10, 1
    columns, law = columns_of(LambdaCGD(lam), n, b, n), BMinSepLaw(n, b, 0.02, True)
    y = sigma * np.random.default_rng(6).standard_normal((n, 40))
    truth = ratio(dense(columns), patterns(n, b, 0.02, warm=True), y, sigma)
    likelihood = BMinSepLikelihood.from_columns(columns, law, sigma)
    lower, upper = likelihood.bounds(likelihood.weights(columns.adjoint(y) / sigma**2))
    assert np.all(lower <= truth * (1 + 1e-12))
    assert np.all(truth <= upper * (1 + 1e-12))


@pytest.mark.parametrize("entries", [40 * 4, 40 * 4 * 5, 40 * 4 * 12])
def test_states_of_a_tail_fit_into_the_table_that_there_is(entries: int, monkeypatch) -> None:
    """Fewer ages and levels, down to one of each beyond the separation: a looser bound, and not one that is never found."""
    monkeypatch.setattr(
        pairs, "TOLERANCES", replace(pairs.TOLERANCES, memory=replace(pairs.TOLERANCES.memory, table=entries))
    )
    states = States.from_columns(columns_of(LambdaCGD(0.9), 40, 4, 40), BMinSepLaw(40, 4, 0.3, True))
    assert states.limit >= 4
    assert 40 * len(states.levels) ** 2 * states.limit * (states.limit - 3) <= entries


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(("mechanism", "n", "b"), SMALL)
def test_pairs_by_enumeration(mechanism, n: int, b: int, warm: bool) -> None:
    """Their weights add up, exactly where C is banded; and each pair is drawn as often as its weight says."""
    columns, law, scale = columns_of(mechanism, n, b, n), BMinSepLaw(n, b, 0.4, warm), 0.7
    c, rounds = dense(columns), patterns(n, b, 0.4, warm=warm)
    weights = {
        (one, two): p * q * math.exp(scale * c[:, list(one)].sum(axis=1) @ c[:, list(two)].sum(axis=1))
        for one, p in rounds.items()
        for two, q in rounds.items()
    }
    total, count = sum(weights.values()), 100_000
    chain = PairChain.from_columns(columns, law, scale)
    if not columns.amplitude:
        assert chain.log_total == pytest.approx(math.log(total), abs=1e-9)
    assert chain.log_total >= math.log(total) - 1e-9
    *turns, drawn = chain.draw(np.random.default_rng(2), count)
    one, two = (indicators(each, n) for each in turns)
    means = columns.forward(one.astype(float)), columns.forward(two.astype(float))
    truth = scale * (means[0] * means[1]).sum(axis=0)
    assert np.all(truth <= drawn + 1e-9)
    kept = np.exp(truth - drawn)
    assert math.exp(chain.log_total) * kept.mean() == pytest.approx(total, rel=5 * kept.std() / 300 + 1e-9)
    powers = 1 << np.arange(n)
    found = np.bincount(powers @ one * 2**n + powers @ two, weights=kept, minlength=4**n) / kept.sum()
    expected = np.zeros(4**n)
    for (a, d), weight in weights.items():
        expected[int(powers[list(a)].sum()) * 2**n + int(powers[list(d)].sum())] = weight / total
    error = np.sqrt(expected / count) + 1e-6
    assert np.abs((found - expected) / error).max() < 6


@pytest.mark.parametrize("order", [2, 4, 6])
@pytest.mark.parametrize("mechanism", [BSR(2), LambdaCGD(0.5)])
def test_moments_by_enumeration(mechanism, order: int) -> None:
    """E[S^r] = N·E[accepted], and what is accepted has the mean that the tilted mixture has."""
    n, b, sigma = 3, 2, 2.5
    columns, law = columns_of(mechanism, n, b, n), BMinSepLaw(n, b, 0.5, True)
    c = dense(columns)
    rounds = list(patterns(n, b, 0.5, warm=True).items())
    means = np.array([c[:, list(taken)].sum(axis=1) for taken, _ in rounds])
    gram, chances = means @ means.T / sigma**2, np.array([p for _, p in rounds])
    indices = np.stack(np.meshgrid(*[np.arange(len(rounds))] * order)).reshape(order, -1)
    weight = np.prod(chances[indices], axis=0)
    for a in range(order):
        for d in range(a):
            weight = weight * np.exp(gram[indices[a], indices[d]])
    tuples = law.tuples(columns, sigma, order)
    turns, shares = tuples.draw(np.random.default_rng(3), 40_000)
    moved = c @ sum(indicators(turns[:, a], n) for a in range(order))
    error = shares.std() / 200 / shares.mean()
    assert math.exp(tuples.log_total) * shares.mean() == pytest.approx(weight.sum(), rel=5 * error + 1e-4)
    mean = (weight * means[indices].sum(axis=0).T).sum(axis=1) / weight.sum()
    np.testing.assert_allclose((moved * shares).mean(axis=1) / shares.mean(), mean, atol=0.05)
    assert tuples.log_total >= math.log(weight.sum()) - 1e-9


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(
    ("mechanism", "n", "b", "sigma"),
    [
        (BSR(2), 3, 2, 1.5),
        (BSR(3), 3, 2, 1.5),
        (LambdaCGD(0.6), 3, 1, 2.5),
        (DPSGD(), 3, 2, 0.8),
        (uneven(3, 2), 3, 2, 1.5),
    ],
)
def test_small_cases_by_quadrature(mechanism, n: int, b: int, sigma: float, warm: bool) -> None:
    removing, adding = deltas(matrix(mechanism, n), patterns(n, b, 0.3, warm=warm), sigma, 0.7, 101)
    larger = max(removing, adding)
    found = compute_delta(mechanism, b_min_sep(n, b, 0.3, warm_start=warm), noise_multiplier=sigma, epsilon=0.7)
    assert larger <= found.delta <= larger * 1.12
    assert found.proof.failure_probability == 1e-12
    columns, law = columns_of(mechanism, n, b, n), BMinSepLaw(n, b, 0.3, warm)
    likelihood = BMinSepLikelihood.from_columns(columns, law, sigma)
    sampler = sampler_of(columns, law, sigma, 0.7)
    values, shares = sampler.draw(40_000, (1, 2))
    estimate = math.exp(sampler.log_scale) * values.mean() * shares.mean()
    scatter = math.hypot(values.std() / values.mean(), shares.std() / shares.mean()) / math.sqrt(len(values))
    assert removing * (1 - 5 * scatter) <= estimate <= removing * (1.01 + 5 * scatter)
    ratios = draw_log_ratios(columns, likelihood, sigma, 2**17, (1, 3))
    plain = (-np.expm1(np.minimum(ratios.lower + 0.7, 0.0)) * ratios.chances).sum(axis=0)
    assert plain.mean() == pytest.approx(adding, abs=5 * plain.std() / 2**8.5 + 2e-4)


@pytest.mark.parametrize("name", ["bsr:4", "band-mf:4"])
def test_against_an_independent_monte_carlo(name: str) -> None:
    """4 bands, n = 60, p = .1, σ = 2.5 columns, ε = 1.5: draws from P and from Q; and with a tenth less noise δ is larger."""
    mechanism = catalogue.mechanism(name, Participation(rounds=60, min_separation=10))
    c = matrix(mechanism, 60)
    sigma = 1.7 * np.linalg.norm(c[:, 0])
    (removing, error), (adding, other) = independent_monte_carlo(c, 6, 0.1, sigma, 1.5, draws=100_000, seed=4)
    found = compute_delta(mechanism, b_min_sep(60, 6, 0.1), noise_multiplier=sigma, epsilon=1.5).delta
    truth = max(removing, adding)
    assert truth - 4 * max(error, other) <= found <= truth * 1.12 + 4 * max(error, other)
    less, _ = independent_monte_carlo(c, 6, 0.1, sigma * 0.9, 1.5, draws=100_000, seed=4)
    assert less[0] > found + 4 * less[1]


def test_the_largest_value_between_two_bounds_counts() -> None:
    """g(S/a) rises up to S/a = r/(r − 1) and falls after it: what is between may be larger than at both bounds."""
    columns, law = columns_of(BSR(2), 3, 2, 3), BMinSepLaw(3, 2, 0.3, True)
    sampler = sampler_of(columns, law, 1.5, 0.7)
    r = sampler.tuples.order
    top = r / (r - 1)

    def g(ratio: float) -> float:
        return max(0.0, ratio - 1) / ratio**r / (top - 1) * top**r

    bounds = np.array([(0.3, 0.9), (0.5, 1.1), (1.2, 5.0), (top * 0.99, top * 1.01), (3.0, 4.0), (5.0, 5.0)])

    lower, upper = np.log(bounds.T) + 0.7
    found = sampler._values(lower, upper)
    largest = [max(g(ratio) for ratio in np.linspace(low, high, 10_001)) for low, high in bounds]
    np.testing.assert_allclose(found, largest, rtol=1e-6, atol=1e-12)
    assert found[3] == pytest.approx(1.0)


def test_confidence_bounds_on_removing_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a failure probability of 20 %, at most that many of 200 bounds are below δ by quadrature; each is a product of two."""
    columns, law = columns_of(BSR(2), 3, 2, 3), BMinSepLaw(3, 2, 0.3, True)
    truth, _ = deltas(matrix(BSR(2), 3), patterns(3, 2, 0.3, warm=True), 1.5, 0.7, 101)
    pilot = monte_carlo.Problem(columns, law).at(1.5, 0.7).pilot(1, 0.4)  # half of it is for adding
    assert pilot is not None
    monkeypatch.setattr(AddDirection, "confirm", lambda *_: 0.0)
    monkeypatch.setattr(monte_carlo, "draw_log_ratios", lambda *_: None)  # draws of adding, at which nobody looks
    bounds = [pilot.confirm(math.inf, 1, attempt) for attempt in range(200)]
    below = sum(bound < truth for bound in bounds)
    assert below <= 0.2 * 200 + 3 * math.sqrt(0.16 * 200)
    assert np.median(bounds) < 1.2 * truth
    assert sum(bound < 1.05 * truth for bound in bounds) > below  # what is tried binds


def test_a_confirmation_is_of_both_directions_and_of_draws_that_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that the pilot was chosen by, nor those of another confirmation."""
    seeds = []
    removing, adding = RemoveSampler.draw, monte_carlo.draw_log_ratios

    def seen_removing(sampler: RemoveSampler, count: int, seed: tuple[int, int], *most: float):
        seeds.append(seed)
        return removing(sampler, count, seed, *most)

    def seen_adding(*arguments):
        seeds.append(arguments[4])
        return adding(*arguments)

    monkeypatch.setattr(RemoveSampler, "draw", seen_removing)
    monkeypatch.setattr(monte_carlo, "draw_log_ratios", seen_adding)
    problem = monte_carlo.Problem(columns_of(BSR(2), 6, 2, 6), BMinSepLaw(6, 2, 0.3, True))
    pilot = problem.at(2.0, 0.7).pilot(5, 1e-6)
    assert pilot is not None
    found = [pilot.confirm(math.inf, 5, attempt) for attempt in range(2)]
    assert len(seeds) == 6
    assert len(set(seeds)) == 6
    monkeypatch.setattr(AddDirection, "confirm", lambda *_: 0.77)
    assert max(found) < 0.77
    assert pilot.confirm(math.inf, 5, 2) == 0.77


def test_all_tries_together_take_no_more_of_delta_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is confirmed, and the failure probabilities of all confirmations of one answer, add up to δ at most.

    An ε is looked for twice here: by its own search, and as the budget below it, however far away that is.
    """
    tried: list[tuple[float, float]] = []
    searches: set[int] = set()

    def refuse(pilot: monte_carlo.PilotEstimate, goal: float, seed: int, attempt: int) -> float:
        tried.append((goal, pilot.failure))
        searches.add(seed)
        return goal * 1.01

    near = replace(amplified.TOLERANCES, answers=replace(amplified.TOLERANCES.answers, near_budget=2.0))
    monkeypatch.setattr(amplified, "TOLERANCES", near)

    monkeypatch.setattr(monte_carlo.PilotEstimate, "confirm", refuse)
    participation, delta = b_min_sep(12, 3, 0.3), 1e-3
    for count, ask in (
        (1, lambda: calibrate(BSR(2), participation, epsilon=2, delta=delta)),
        (2, lambda: compute_epsilon(BSR(2), participation, noise_multiplier=1.6, delta=delta)),
    ):
        tried.clear()
        searches.clear()
        ask()
        assert len(searches) == count
        assert len(tried) > 2  # every confirmation was refused, so that there were several
        goals, failures = np.transpose(tried)
        said = monte_carlo.failure_probability(delta)
        assert failures.sum() <= said * (1 + 1e-12)
        assert goals.max() + said <= delta * (1 + 1e-15)


@pytest.mark.parametrize(("lam", "sigma"), [(0.9, 0.5), (0.999, 20.0)])
def test_rounding_changes_log_s_by_less_than_is_added_for_it(lam: float, sigma: float) -> None:
    """Where log S is several hundred; beside sums in extended precision. Single precision of x alone is not enough."""
    n, b = 600, 20
    columns, law = columns_of(LambdaCGD(lam), n, b, n), BMinSepLaw(n, b, 0.1, True)
    generator = np.random.default_rng(1)
    taken = generator.random((n, 8)) < 2 * law.expected_rate
    noise = generator.standard_normal((n, 8))
    x = columns.adjoint(columns.forward(taken.astype(float)) / sigma + noise) / sigma
    c = np.tril(lam ** np.abs(np.subtract.outer(np.arange(n), np.arange(n)), dtype=np.longdouble))
    exact = c.T @ (c @ taken.astype(np.longdouble) / np.longdouble(sigma) + noise) / np.longdouble(sigma)
    likelihood = BMinSepLikelihood.from_columns(columns, law, sigma)
    found, expected = (
        np.log(likelihood.bounds(likelihood.weights(np.array(each, dtype=float)))[1]) for each in (x, exact)
    )
    assert 100 < expected.max() < 690
    assert np.abs(found - expected).max() < columns.rounding / 10
    single = np.log(likelihood.bounds(likelihood.weights(x.astype(np.float32)))[1])
    assert np.abs(single - expected).max() > 10 * columns.rounding


def test_the_noise_found_is_at_most_a_percent_above_what_plain_means_ask_for() -> None:
    """A mean of 16,000 bounded draws, others than the search's, has an error of .5 % of δ; a percent of σ is 10 to 20 %."""
    participation, epsilon, delta = b_min_sep(60, 6, 0.1), 4.0, 1e-5
    found = calibrate(BSR(4), participation, epsilon=epsilon, delta=delta).noise_multiplier
    columns, law = columns_of(BSR(4), 60, 6, 60), BMinSepLaw(60, 6, 0.1, True)
    for part, too_little in ((1.0, False), (0.99, True)):
        sigma = part * found
        sampler = sampler_of(columns, law, sigma, epsilon)
        values, shares = sampler.draw(16_000, (7, 0))
        assert (math.exp(sampler.log_scale) * values.mean() * shares.mean() > 1.03 * delta) == too_little


def test_a_search_that_comes_near_no_goal_keeps_what_is_enough() -> None:
    """δ jumps across the goal at x = 2: no x is within a tenth of it, and to give up amplification would be the answer 8."""

    def at(x: float) -> SimpleNamespace:
        return SimpleNamespace(pilot=lambda *_, times: SimpleNamespace(likely=1e-4 if x < 2 else 1e-9 / x))

    x, pilot, _ = monte_carlo._proposed(at, 8.0, 1e-6, 0, 1e-13, silent)
    assert 2 <= x < 2.1
    assert pilot is not None
    assert pilot.likely == 1e-9 / x


@pytest.mark.parametrize(("epsilon", "delta"), [(2, 1e-3), pytest.param(4, 1e-10, marks=pytest.mark.slow)])
def test_one_round_apart_is_poisson_sampling(epsilon: float, delta: float) -> None:
    """σ of C = I with b = 1 beside that of the exact Poisson accountant: an upper bound, and within 3 %."""
    poisson = Participation(rounds=20, sampling="poisson", sampling_rate=0.1)
    exact = calibrate(DPSGD(), poisson, epsilon=epsilon, delta=delta).noise_multiplier
    found = calibrate(DPSGD(), b_min_sep(20, 1, 0.1), epsilon=epsilon, delta=delta).noise_multiplier
    assert exact <= found <= exact * 1.03


def test_a_part_of_a_run_costs_less(few_draws: None) -> None:
    participation, heard = b_min_sep(24, 6, 0.1), list[str]()
    whole = calibrate(BSR(4), participation, epsilon=2, delta=1e-3, progress=heard.append)
    assert "confirmed" in heard[-1]
    assert "1e-12" in str(whole)
    part = compute_epsilon(BSR(4), participation, noise_multiplier=whole.noise_multiplier, delta=1e-3, released=8)
    assert part.epsilon < 1.8
    assert part.condition is not None


@pytest.mark.parametrize("banded", [True, False])
def test_what_rounding_leaves_below_zero_is_accounted_for_by_its_amount(banded: bool) -> None:
    """C = [[1, 0, 0], [−e, 1, 0], [.5, −e, 1]]: |C| may be accounted for in its place, and zeros may not."""
    entries = np.array([[1.0, -5e-13, 0.5], [1.0, -5e-13, 0.0], [1.0, 0.0, 0.0]])
    b = 3 if banded else 2  # otherwise three bands are too many to be followed
    columns = columns_of(Dense("band-mf", entries), 3, b, 3)
    assert np.all(dense(columns) >= np.abs(np.array([[1, 0, 0], [-5e-13, 1, 0], [0.5, -5e-13, 1]])))
    with pytest.raises(NegativeEntryError):
        columns_of(Dense("band-mf", entries * np.array([1.0, 4.0, 1.0])), 3, b, 3)
    found = compute_delta(Dense("band-mf", entries), b_min_sep(3, 2, 0.5), noise_multiplier=1.0, epsilon=1.0).delta
    c = np.abs(np.array([[1, 0, 0], [-5e-13, 1, 0], [0.5, -5e-13, 1]]))
    assert found >= max(deltas(c, patterns(3, 2, 0.5, warm=True), 1.0, 1.0, 60))


def test_the_integral_steps_through_weights_as_if_each_were_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """From one point of it to the next all weights fall by a known factor; where exponents were capped they are found anew."""
    for mechanism in (BSR(3), LambdaCGD(0.6)):
        sampler = sampler_of(columns_of(mechanism, 12, 3, 12), BMinSepLaw(12, 3, 0.4, True), 1.0, 2.0)
        found = sampler.draw(400, (1, 0))[0]
        with monkeypatch.context() as patched:
            patched.setattr(remove, "_NOT_CAPPED", 0.0)
            np.testing.assert_allclose(sampler.draw(400, (1, 0))[0], found, rtol=1e-9)


def test_a_ratio_beyond_every_float_has_a_value_where_epsilon_is_beyond_it_too() -> None:
    """Two rounds of e^501 each, whose exponents are not capped: S is about e^1000, and only a lower bound on it is known."""
    columns, law = columns_of(DPSGD(), 2, 1, 2), BMinSepLaw(2, 1, 0.5, True)
    likelihood = BMinSepLikelihood.from_columns(columns, law, 1.5)
    sampler = RemoveSampler(columns, likelihood, law.tuples(columns, 1.5, 2), 1.5, 999.0, 1.0)
    ratio = math.exp(2 * 501 - 1 / 1.5**2 + 2 * math.log(0.5) - 999)  # S/e^ε, by the pattern in which both rounds are
    found = sampler._integrals(np.full((2, 1), 501.0), np.zeros((2, 1)), np.full(1, 6.0))
    assert found[0] >= 4 * (ratio - 1) / ratio**2 > 0.5


OF_TUPLES = [
    (DPSGD(), 40, 5),
    (BSR(3), 40, 5),
    (LambdaCGD(0.9), 40, 5),
    (Normalized(LambdaCGD(0.8)), 40, 1),
    (BISR(4), 40, 5),  # a head that is not geometric, and a tail that is
    (uneven(40, 4), 40, 5),
]


@pytest.mark.parametrize(("mechanism", "n", "b"), OF_TUPLES)
def test_overlaps_of_tuples_are_those_of_their_columns(mechanism, n: int, b: int) -> None:
    """By products of C1_P as they stand."""
    columns, users, count = columns_of(mechanism, n, b, n), 4, 60
    one, two, _ = PairChain.from_columns(columns, BMinSepLaw(n, b, 0.3, True), 0.4).draw(
        np.random.default_rng(4), users * count // 2
    )
    turns = np.concatenate([one, two], axis=1).reshape(-1, users, count)
    sums = np.stack([dense(columns) @ indicators(turns[:, a], n) for a in range(users)])
    truth = np.einsum("aij,cij->jac", sums, sums) * (1 - np.eye(users))
    found = overlaps.overlaps(columns, turns)
    np.testing.assert_allclose(found, truth, rtol=1e-11, atol=1e-11)
    assert found.max() > 1


def test_tables_that_no_memory_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="smaller min_separation"):
        compute_delta(DPSGD(), b_min_sep(100_000, 2_000, 0.1), noise_multiplier=2.0, epsilon=1.0)


def test_seed_depends_on_the_question() -> None:
    problem = monte_carlo.Problem(columns_of(BSR(2), 8, 2, 8), BMinSepLaw(8, 2, 0.3, True))
    others = [
        monte_carlo.Problem(columns_of(BSR(2), 8, 2, 8), BMinSepLaw(8, 2, 0.3, False)),
        monte_carlo.Problem(columns_of(BSR(2), 8, 2, 8), BMinSepLaw(8, 2, 0.31, True)),
        monte_carlo.Problem(columns_of(Normalized(BSR(2)), 8, 2, 8), BMinSepLaw(8, 2, 0.3, True)),
    ]
    seeds = {problem.seed("delta", 1.0, 2.0), problem.seed("delta", 1.0, 2.1), problem.seed("sigma", 1.0, 2.0)}
    assert len(seeds | {other.seed("delta", 1.0, 2.0) for other in others}) == 6


def test_a_confirmation_that_will_hardly_hold_is_given_up_after_a_quarter_and_proves_nothing() -> None:
    problem = monte_carlo.Problem(columns_of(BSR(4), 60, 6, 60), BMinSepLaw(60, 6, 0.1, True))
    pilot = problem.at(2.5, 1.0).pilot(5, 1e-12)
    assert pilot is not None
    pilot.__dict__["count"] = 20_000
    whole = pilot.sampler.draw(20_000, (5, 2))
    mean = pilot.sampler.mean(*whole)
    assert pilot.sampler.draw(20_000, (5, 2), 1.5 * mean)[0].tolist() == whole[0].tolist()
    few = pilot.sampler.draw(20_000, (5, 2), mean / 2)
    assert len(few[0]) < 0.3 * len(whole[0])
    bound = pilot.confirm(math.inf, 5, 0)
    assert bound > mean
    assert pilot.confirm(1.2 * bound, 5, 0) == bound
    for goal in (mean, mean / 3):  # above the goal, whatever was drawn
        assert pilot.confirm(goal, 5, 0) > goal
