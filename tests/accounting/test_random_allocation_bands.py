"""One secret round of each epoch, for C with bands: against enumeration, quadrature, draws, and the accountant of one band."""

import json
import math

import numpy as np
import pytest
from command_line import run
from oracles_b_min_sep import deltas, indicators, ratio
from oracles_random_allocation import by_draws, patterns

from fedcgd.accounting import accountant, compute_delta, gaussian
from fedcgd.accounting.accountant import Bound
from fedcgd.accounting.explain import explain
from fedcgd.accounting.random_allocation import BandsAccountant, OneBandAccountant, epochs
from fedcgd.accounting.random_allocation.epochs import Overlaps
from fedcgd.accounting.random_allocation.law import RandomAllocationLaw
from fedcgd.accounting.random_participation import overlaps, search
from fedcgd.accounting.random_participation.add import AddDirection
from fedcgd.accounting.random_participation.columns import Columns, columns_of
from fedcgd.accounting.random_participation.law import LARGEST
from fedcgd.accounting.random_participation.remove import RemoveSampler
from fedcgd.accounting.selection import select_mechanism
from fedcgd.mechanisms import (
    BSR,
    DPSGD,
    BandedToeplitz,
    Dense,
    LambdaCGD,
    Mechanism,
    Normalized,
    matrix,
)
from fedcgd.optimisation import catalogue
from fedcgd.participation import Participation
from fedcgd.plan import Plan


def one_each(rounds: int, length: int) -> Participation:
    return Participation(rounds=rounds, max_participations=rounds // length, sampling="random-allocation")


def uneven(n: int, bands: int) -> Mechanism:
    """Columns of which none is a multiple of another."""
    band = np.random.default_rng(n).uniform(0.3, 1.5, (n, bands))
    return Dense("band-mf", np.where(np.add.outer(np.arange(n), np.arange(bands)) < n, band, 0.0))


SMALL = [  # mechanism, rounds, rounds of an epoch, released
    (BSR(3), 6, 3, 6),
    (BSR(2), 6, 2, 6),
    (BSR(2), 6, 3, 5),
    (BSR(3), 9, 3, 4),
    (BSR(4), 8, 4, 5),
    (DPSGD(), 6, 3, 6),
    (DPSGD(), 4, 1, 4),
    (Normalized(BSR(2)), 6, 2, 6),
    (uneven(6, 3), 6, 3, 6),
    (uneven(6, 2), 6, 2, 5),
]


@pytest.mark.parametrize(("mechanism", "n", "length", "released"), SMALL)
def test_likelihood_ratio_and_reach_by_enumeration(mechanism: Mechanism, n: int, length: int, released: int) -> None:
    columns, law = columns_of(mechanism, n, length, released), RandomAllocationLaw(released, length)
    c, rounds = matrix(mechanism, n)[:released, :released], patterns(n, length, released)
    y = 1.3 * np.random.default_rng(1).standard_normal((released, 40)) + c[:, [0]]
    truth = ratio(c, rounds, y, 1.3)
    likelihood = law.likelihood(columns, 1.3)
    lower, upper = likelihood.bounds(likelihood.weights(columns.adjoint(y) / 1.3**2))
    np.testing.assert_allclose(lower, truth, rtol=1e-12)
    np.testing.assert_allclose(upper, truth, rtol=1e-12)
    most = max(np.square(c[:, list(taken)].sum(axis=1)).sum() for taken in rounds)
    assert Overlaps.from_columns(columns, law).most() == pytest.approx(most, rel=1e-12)


def test_numbers_are_right_wherever_pairs_do_not_overflow_and_else_rounds_count_as_known() -> None:
    mechanism, participation = BandedToeplitz((1.0, 1.0)), one_each(6, 2)
    columns, law, c = columns_of(mechanism, 6, 2, 6), RandomAllocationLaw(6, 2), matrix(mechanism, 6)
    assert math.isfinite(law.pairs(columns, 1 / 0.13**2).log_total)
    generator = np.random.default_rng(2)
    for taken in ((0, 2, 4), (1, 2, 5), ()):
        y = c[:, list(taken)].sum(axis=1)[:, None] + 0.13 * generator.standard_normal((6, 200))
        means = np.array([c[:, list(each)].sum(axis=1) for each in patterns(6, 2, 6)])
        logs = (means @ y - np.square(means).sum(axis=1)[:, None] / 2) / 0.13**2
        truth = np.logaddexp.reduce(logs, axis=0) - math.log(8)
        assert np.abs(truth).max() > 100
        likelihood = law.likelihood(columns, 0.13)
        for bound in likelihood.bounds(likelihood.weights(columns.adjoint(y) / 0.13**2)):
            np.testing.assert_allclose(np.log(bound), np.maximum(truth, -math.log(LARGEST)), rtol=1e-9)
    assert math.isinf(law.pairs(columns, 1 / 0.1**2).log_total)
    found = compute_delta(mechanism, participation, noise_multiplier=0.1, epsilon=600.0)
    assert found.delta == gaussian.delta(
        epsilon=600.0, sigma=0.1 / math.sqrt(Overlaps.from_columns(columns, law).most())
    )
    assert found.failure_probability == 0


@pytest.mark.parametrize(("mechanism", "n", "length", "released"), SMALL)
def test_pairs_by_enumeration(mechanism: Mechanism, n: int, length: int, released: int) -> None:
    """Their weights add up, and each pair is drawn as often as its weight says."""
    columns, law, scale, count = (
        columns_of(mechanism, n, length, released),
        RandomAllocationLaw(released, length),
        0.7,
        100_000,
    )
    c, rounds = matrix(mechanism, n)[:released, :released], patterns(n, length, released)
    means, chances = np.array([c[:, list(taken)].sum(axis=1) for taken in rounds]), np.array(list(rounds.values()))
    weights = np.outer(chances, chances) * np.exp(scale * means @ means.T)
    chain = law.pairs(columns, scale)
    assert chain.log_total == pytest.approx(math.log(weights.sum()), abs=1e-12)
    *turns, drawn = chain.draw(np.random.default_rng(2), count)
    one, two = (indicators(each, released) for each in turns)
    by_rounds = scale * overlaps.overlaps(columns, np.stack(turns, axis=1))[:, 0, 1]
    by_columns = scale * (columns.forward(one.astype(float)) * columns.forward(two.astype(float))).sum(axis=0)
    np.testing.assert_allclose(drawn, by_columns, atol=1e-12)
    np.testing.assert_allclose(by_rounds, by_columns, atol=1e-12)
    powers = 1 << np.arange(released)
    place = {int(powers[list(taken)].sum()): i for i, taken in enumerate(rounds)}
    found = np.zeros_like(weights)
    np.add.at(found, ([place[int(code)] for code in powers @ one], [place[int(code)] for code in powers @ two]), 1)
    expected = weights / weights.sum() * count
    assert np.abs((found - expected) / np.sqrt(expected + 1)).max() < 6


@pytest.mark.parametrize(
    ("mechanism", "n", "length", "sigma"),
    [(BandedToeplitz((1.0, 1.0)), 4, 2, 1.5), (uneven(4, 2), 4, 2, 1.3), (BSR(2), 4, 2, 0.7)],
)
def test_small_cases_by_quadrature(mechanism: Mechanism, n: int, length: int, sigma: float) -> None:
    truth = max(deltas(matrix(mechanism, n), patterns(n, length, n), sigma, 0.7, 61))
    found = compute_delta(mechanism, one_each(n, length), noise_multiplier=sigma, epsilon=0.7)
    assert truth * (1 - 2e-3) <= found.delta <= truth * 1.12
    assert found.failure_probability == 1e-12


@pytest.mark.parametrize(("mechanism", "released"), [(BSR(3), 6), (uneven(6, 3), 6), (BSR(3), 5), (BSR(3), 3)])
def test_both_directions_by_draws_of_an_enumerated_law(mechanism: Mechanism, released: int) -> None:
    """n = 6 in 2 epochs of 3, 3 bands; and the first rounds of a run."""
    c = matrix(mechanism, 6)[:released, :released]
    sigma = 1.2 * float(np.linalg.norm(c[:, 0]))
    both = by_draws(c, patterns(6, 3, released), sigma, 0.5, draws=400_000, seed=3)
    found = compute_delta(mechanism, one_each(6, 3), noise_multiplier=sigma, epsilon=0.5, released=released).delta
    truth, error = max(both)
    assert error < 0.01 * truth
    assert truth - 4 * error <= found <= truth * 1.12 + 4 * error


def test_overlaps_of_neighbouring_epochs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if rounds of two epochs never met, δ would be below the truth: what the tests above would see."""
    mechanism, n, length, sigma = BandedToeplitz((1.0, 1.0)), 4, 2, 1.5
    truth = max(deltas(matrix(mechanism, n), patterns(n, length, n), sigma, 0.7, 61))
    of = Overlaps.from_columns

    def apart(columns: Columns, law: epochs.Epochs) -> Overlaps:
        found = of(columns, law)
        found.before[:] = 0.0
        return found

    monkeypatch.setattr(epochs.Overlaps, "from_columns", apart)
    problem = search.Problem(columns_of(mechanism, n, length, n), RandomAllocationLaw(n, length))
    assert search.delta(problem, Bound(1.0, ""), sigma=sigma, epsilon=0.7, progress=lambda _: None).value < 0.95 * truth


@pytest.mark.parametrize(("sigma", "epsilon"), [(0.8, 2.0), (1.5, 0.7)])
def test_one_band_agrees_with_the_accountant_that_draws_nothing(sigma: float, epsilon: float) -> None:
    participation = one_each(40, 10)
    without_draws = accountant(DPSGD(), participation)
    assert isinstance(without_draws, OneBandAccountant)
    exact = without_draws.delta(noise_multiplier=sigma, epsilon=epsilon).delta
    found = BandsAccountant(DPSGD(), participation).delta(noise_multiplier=sigma, epsilon=epsilon).delta
    assert exact * (1 - 3e-3) <= found <= exact * 1.12


def test_rounds_that_everybody_knows_are_the_gaussian_mechanism() -> None:
    """Epochs of one round: nothing is secret, also for a part of the run and for several runs together."""
    reach = math.sqrt(6)
    run_of_six = BandsAccountant(DPSGD(), one_each(6, 1))
    found = run_of_six.delta(noise_multiplier=3.0, epsilon=1.0).delta
    assert found == pytest.approx(gaussian.delta(epsilon=1.0, sigma=3.0 / reach), rel=0.12)
    assert run_of_six.gaussian_mu(3.0, 6).value == pytest.approx(reach / 3.0)
    assert BandsAccountant(BandedToeplitz((1.0, 1.0)), one_each(6, 2)).gaussian_mu(1.0, 3).value == pytest.approx(
        math.sqrt(5)
    )


def test_confidence_bounds_on_removing_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a failure probability of 20 %, at most that many of 200 bounds are below δ by quadrature; and they bind."""
    truth, _ = deltas(matrix(BSR(2), 4), patterns(4, 2, 4), 1.5, 0.7, 61)
    problem = search.Problem(columns_of(BSR(2), 4, 2, 4), RandomAllocationLaw(4, 2))
    pilot = problem.at(1.5, 0.7).pilot(1, 0.4)  # half of it is for adding
    assert pilot is not None
    monkeypatch.setattr(AddDirection, "confirm", lambda *_: 0.0)
    monkeypatch.setattr(search, "draw_log_ratios", lambda *_: None)  # of adding, which is not looked at
    bounds = [pilot.confirm(math.inf, 1, attempt) for attempt in range(200)]
    below = sum(bound < truth for bound in bounds)
    assert below <= 0.2 * 200 + 3 * math.sqrt(0.16 * 200)
    assert np.median(bounds) < 1.2 * truth
    assert sum(bound < 1.05 * truth for bound in bounds) > below


def test_an_order_of_moments_is_found_from_wherever_the_search_for_it_begins() -> None:
    """BSR 4, 600 rounds: here a bound by moments of order 10 to 16 is above 1, and one of order 2 near δ."""
    columns, law = columns_of(BSR(4), 600, 50, 600), RandomAllocationLaw(600, 50)
    sigma = 0.98 * float(np.linalg.norm(columns.column))
    for near in (2, 10, 16):
        sampler = RemoveSampler.from_law(columns, law, law.likelihood(columns, sigma), sigma, 4.0, near)
        assert sampler is not None
        assert sampler.log_scale + math.log(sampler.accepted) < -2.0


@pytest.mark.parametrize(
    ("mechanism", "n", "length", "message"),
    [
        (BSR(4), 12, 3, r"at most 3 bands, .* bsr has 4"),
        (LambdaCGD(0.5), 12, 4, r"at most 4 bands, .* lambda-cgd has 12"),
        (BandedToeplitz((1.0, -0.5)), 12, 4, "an entry of C is -0.5"),
    ],
)
def test_what_is_refused(mechanism: Mechanism, n: int, length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accountant(mechanism, one_each(n, length)).check()


def test_tables_that_would_be_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match=r"5e\+07 numbers"):
        compute_delta(BSR(50), one_each(20_000, 100), noise_multiplier=20.0, epsilon=1.0)


def test_from_the_command_line_to_the_explanation(few_draws: None) -> None:
    words = ["--rounds", "12", "--participations", "3", "--sampling", "random-allocation", "--delta", "1e-4"]
    found = run("account", "--mechanism", "bsr:2", *words, "--noise-multiplier", "2", "--json")
    assert found.exit_code == 0, found.output
    values = json.loads(found.stdout)
    plan = Plan(mechanism=BSR(2), participation=one_each(12, 4), clip_norm=1.0, noise_multiplier=2.0, delta=1e-4)
    assert values["epsilon"] == plan.guarantee().epsilon
    assert Plan.from_description(json.loads(json.dumps(plan.to_description()))) == plan
    assert "each 4," in str(plan.participation)
    steps = explain(BSR(2), one_each(12, 4), clip_norm=1.0, delta=1e-4, noise_multiplier=2.0)
    said = {step.title: step.statement for step in steps}
    assert "epochs overlap" in said["sensitivity"]
    assert "Monte Carlo" in said["method"]


def test_bands_are_chosen_up_to_an_epoch_and_optimised_as_if_turns_were_an_epoch_apart() -> None:
    participation = one_each(24, 6)
    assert participation.spacing == 6
    known = catalogue.mechanism("band-mf:3", Participation(rounds=24, min_separation=6))
    np.testing.assert_array_equal(matrix(catalogue.mechanism("band-mf:3", participation), 24), matrix(known, 24))
    chosen = select_mechanism("bsr", participation, epsilon=4, delta=1e-3)
    assert isinstance(chosen, BSR)
    assert 1 < chosen.bands <= 6
