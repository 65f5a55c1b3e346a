"""Balls-in-Bins without draws: never below quadrature, never below an independent estimate, and near both."""

import numpy as np
import pytest

from fedcgd import BISR, BSR, DPSGD, LambdaCGD, Normalized, Participation
from fedcgd.accounting import calibrate, compute_delta, compute_epsilon, gaussian
from fedcgd.accounting.balls_in_bins.deterministic import METHOD
from fedcgd.accounting.balls_in_bins.gram import bin_gram
from fedcgd.accounting.balls_in_bins.markov_chain import (
    Chain,
    _hat_weights,
    chain_bound,
    chains_of,
)
from fedcgd.accounting.effort import BINS, Fineness


def bins(rounds: int, b: int) -> Participation:
    return Participation(rounds=rounds, min_separation=b, sampling="balls-in-bins")


# (n, b, λ, σ): δ at ε = 1 of removing and of adding a user, by numerical quadrature outside this project.
QUADRATURE = [
    ((4, 2, 0.5, 2.0), 0.0604618393, 0.0598377928),
    ((6, 2, 0.9, 4.0), 0.1234833759, 0.1214147255),
    ((6, 3, 0.5, 2.0), 0.0394477639, 0.0385921099),
]


@pytest.mark.parametrize(("case", "removing", "adding"), QUADRATURE)
@pytest.mark.parametrize("fineness", [BINS.rough, BINS.fine])
def test_every_chain_is_at_least_the_quadrature_in_both_directions(case, removing, adding, fineness: Fineness) -> None:
    n, b, lam, sigma = case
    chains = chains_of(bin_gram(LambdaCGD(lam), bins(n, b)))
    assert len(chains) == 3  # without a ring, and for two κ
    for chain in chains:
        for value, is_adding in ((removing, False), (adding, True)):
            found = chain_bound(chain, sigma=sigma, epsilon=1.0, ignore=1e-6, fineness=fineness, adding=is_adding)
            assert value < found < 1.8 * value


@pytest.mark.parametrize(("case", "removing", "adding"), QUADRATURE)
def test_small_cases_by_quadrature(case, removing: float, adding: float) -> None:
    n, b, lam, sigma = case
    found = compute_delta(LambdaCGD(lam), bins(n, b), noise_multiplier=sigma, epsilon=1.0, method="deterministic")
    assert removing < found.delta < removing * (1.012 if b == 2 else 1.15)
    assert found.failure_probability == 0
    assert found.method == METHOD


@pytest.mark.parametrize("mechanism", [DPSGD(), LambdaCGD(0.7), Normalized(LambdaCGD(0.7)), BSR(6), BSR(40), BISR(4)])
def test_chains_have_no_less_correlation_than_the_bins(mechanism) -> None:
    gram = bin_gram(mechanism, bins(120, 20))
    chains = chains_of(gram)
    assert chains
    steps = np.abs(np.subtract.outer(np.arange(20), np.arange(20)))
    for chain in chains:
        own, shared = chain.deviation * chain.alpha, chain.deviation * chain.beta
        dominating = np.outer(own, own) * chain.decay**steps + np.outer(shared, shared)
        assert (dominating >= gram * (1 - 1e-12)).all()
        np.testing.assert_allclose(np.diag(dominating), np.diag(gram), rtol=1e-9)


@pytest.mark.parametrize(("adding", "sigma", "epsilon"), [(False, 1.6, 1.0), (True, 1.6, 0.5), (False, 0.8, 4.0)])
@pytest.mark.parametrize("mechanism", [DPSGD(), LambdaCGD(0.7)])
def test_is_above_plain_draws(mechanism, adding: bool, sigma: float, epsilon: float) -> None:
    """A plain mean over draws of the bins' Gaussian vector, without importance sampling: its error is a few percent."""
    gram = bin_gram(mechanism, bins(60, 20)) / sigma**2
    generator = np.random.default_rng(0)
    y = generator.standard_normal((200_000, 20)) @ np.linalg.cholesky(gram).T
    s, a = np.exp(y - np.diag(gram) / 2).mean(axis=1), np.exp(epsilon)
    draws = np.maximum(1 - a * s, 0) if adding else np.maximum(s - a, 0)
    estimate, error = draws.mean(), draws.std() / np.sqrt(len(draws))
    chains = chains_of(gram * sigma**2)
    least = min(
        chain_bound(chain, sigma=sigma, epsilon=epsilon, ignore=1e-7, fineness=BINS.fine, adding=adding)
        for chain in chains
    )
    assert least > estimate - 3 * error
    assert least < 1.4 * estimate + 3 * error  # the corner weighs much where there are few bins


@pytest.mark.parametrize(
    ("own", "epsilon"), [((12.0, 1.0), 0.0), ((10.0, 0.3), 0.1), ((9.0, 0.3), 0.5), ((18.0, 0.5), 0.5)]
)
def test_bins_of_very_different_sizes_in_both_directions(own, epsilon: float) -> None:
    """Two independent bins, one nearly known: a plain sum over a grid, with each bin moved in turn for removing."""
    deviation, a = np.array(own), np.exp(epsilon)
    axis = np.linspace(-9, 9, 1201)
    weight = np.exp(-(axis**2) / 2)
    weight = np.outer(weight, weight) / weight.sum() ** 2

    def ratio(shift: int) -> np.ndarray:
        """S where bin `shift`, if it is not −1, took part."""
        first, second = (
            deviation[j] * (axis + (deviation[j] if j == shift else 0)) - deviation[j] ** 2 / 2 for j in (0, 1)
        )
        return (np.exp(first)[:, None] + np.exp(second)[None, :]) / 2

    adding = float((weight * np.maximum(1 - a * ratio(-1), 0)).sum())
    removing = float(np.mean([(weight * np.maximum(1 - a / ratio(j), 0)).sum() for j in (0, 1)]))
    chain = chains_of(np.diag(deviation**2))[0]
    for truth, is_adding, most in ((adding, True, 1.05), (removing, False, 2.1)):
        found = chain_bound(chain, sigma=1.0, epsilon=epsilon, ignore=1e-4, fineness=BINS.fine, adding=is_adding)
        assert truth * 0.9999 < found < most * truth


@pytest.mark.parametrize("adding", [False, True])
def test_the_bound_is_a_sum_over_all_that_can_happen(adding: bool) -> None:
    """At ε = 0 both directions have the same δ, the total variation; and less noise never lowers it."""
    chain = chains_of(bin_gram(LambdaCGD(0.5), bins(12, 6)))[1]
    found = [
        chain_bound(chain, sigma=sigma, epsilon=0.0, ignore=1e-6, fineness=BINS.fine, adding=adding)
        for sigma in (16.0, 4.0, 1.0, 0.25)
    ]
    assert found == sorted(found)
    assert 0.9 < found[-1] <= 1
    other = chain_bound(chain, sigma=4.0, epsilon=0.0, ignore=1e-6, fineness=BINS.fine, adding=not adding)
    assert found[1] == pytest.approx(other, rel=0.05)


@pytest.mark.parametrize("adding", [False, True])
@pytest.mark.parametrize("kind", [0, 1])
def test_shorter_grids_never_lower_the_bound(kind: int, adding: bool) -> None:
    """What leaves a grid is paid for: `ignore` = 1 makes them far too short, of x (without a ring) and of w (with one)."""
    chain = chains_of(bin_gram(LambdaCGD(0.9), bins(6, 2)))[kind]
    target = 2.0 if adding else 4.0
    short, long = (
        chain_bound(chain, sigma=3.0, epsilon=target, ignore=ignore, fineness=BINS.fine, adding=adding)
        for ignore in (1.0, 1e-9)
    )
    assert short >= long * (1 - 1e-3)


@pytest.mark.parametrize(("case", "removing", "adding"), QUADRATURE)
def test_the_coarsest_grid_is_still_an_upper_bound(case, removing: float, adding: float) -> None:
    n, b, lam, sigma = case
    for chain in chains_of(bin_gram(LambdaCGD(lam), bins(n, b))):
        for value, is_adding in ((removing, False), (adding, True)):
            for coarse in (
                Fineness(step=8.0, factor_step=0.4, nodes=2000),
                Fineness(step=3.0, factor_step=0.4, nodes=2000),
                Fineness(step=0.2, factor_step=6.0, nodes=2000),
            ):
                found = chain_bound(chain, sigma=sigma, epsilon=1.0, ignore=1e-6, fineness=coarse, adding=is_adding)
                assert found > value


@pytest.mark.parametrize("adding", [False, True])
@pytest.mark.parametrize("step", [0.1, 1.0])
@pytest.mark.parametrize("reach", [0.5, 3.0])
def test_one_bin_on_any_grid_is_above_the_gaussian_mechanism(adding: bool, step: float, reach: float) -> None:
    """The one variable is x, or w: both are integrated alike."""
    one, none = np.ones(1), np.zeros(1)
    exact = gaussian.delta(epsilon=1.0, sigma=1 / reach)
    for alpha, beta in ((one, none), (none, one)):
        for ignore in (1e-9, 1e-2 if beta.any() else 1.0):
            found = chain_bound(
                Chain(0.0, one, alpha, beta), sigma=1 / reach, epsilon=1.0, ignore=ignore, adding=adding,
                fineness=Fineness(step=step, factor_step=step, nodes=2000),
            )  # fmt: skip
            assert exact * (1 - 1e-9) < found
            assert step > 0.1 or ignore > 1e-9 or found < exact * 1.02


def test_splitting_a_normal_variable_keeps_its_mean_or_that_of_its_exponential() -> None:
    grid, means = np.linspace(-8, 9, 40), np.array([-1.0, 0.0, 2.0])
    for exponent in (0.0, 0.7):
        weights = _hat_weights(means, 0.6, grid, exponent)
        points, kept = (np.exp(0.7 * grid), np.exp(0.7 * means + 0.7**2 * 0.6**2 / 2)) if exponent else (grid, means)
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-12)
        np.testing.assert_allclose(weights @ points, kept, rtol=1e-9, atol=1e-12)
        assert (weights >= 0).all()


def test_calibrate_and_epsilon_undo_each_other_and_stay_near_the_draws() -> None:
    participation, steps = bins(60, 20), []
    found = calibrate(
        LambdaCGD(0.5), participation, epsilon=2, delta=1e-4, method="deterministic", progress=steps.append
    )
    drawn = calibrate(LambdaCGD(0.5), participation, epsilon=2, delta=1e-4)
    assert 0.99 < found.noise_multiplier / drawn.noise_multiplier < 1.06
    assert any("not enough" in step for step in steps)
    back = compute_epsilon(
        LambdaCGD(0.5), participation, noise_multiplier=found.noise_multiplier, delta=1e-4, method="deterministic"
    )
    assert back.epsilon == pytest.approx(2, rel=0.02)
    assert back.failure_probability == 0
    assert "probability" not in str(back)


def test_one_bin_is_the_gaussian_mechanism() -> None:
    known = compute_delta(LambdaCGD(0.5), Participation(rounds=5), noise_multiplier=5.0, epsilon=1.0).delta
    found = compute_delta(LambdaCGD(0.5), bins(5, 1), noise_multiplier=5.0, epsilon=1.0, method="deterministic").delta
    assert found == pytest.approx(known, rel=1e-6)


def test_bins_that_hardly_differ_fall_back_on_the_gaussian_mechanism() -> None:
    """ρ is too near 1 for a grid; then the promise is the one without amplification."""
    mechanism = BSR(400)
    assert not chains_of(np.full((3, 3), 2.0) + 1e-9 * np.eye(3))
    known = Participation(rounds=12, min_separation=3)
    found = compute_delta(mechanism, bins(12, 3), noise_multiplier=5.0, epsilon=1.0, method="deterministic").delta
    assert found <= compute_delta(mechanism, known, noise_multiplier=5.0, epsilon=1.0).delta * (1 + 1e-6)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="monte-carlo, deterministic, got 'exact'"):
        calibrate(DPSGD(), bins(4, 2), epsilon=1, delta=1e-5, method="exact")  # type: ignore[arg-type]


# C = I, k = 3 in n = 60 rounds: 1-out-of-20 random allocation with sensitivity √3. δ by opake 0.16.1 (an upper bound):
# random_allocation_gaussian_pld(σ / 3**0.5, 20, 1, DiscretizationConfig()).delta_at(ε).
@pytest.mark.parametrize(("sigma", "target", "theirs"), [(1.6, 1.0, 0.000966137373), (0.8, 4.0, 0.007242580970)])
def test_agrees_with_random_allocation_of_opake(sigma: float, target: float, theirs: float) -> None:
    found = compute_delta(DPSGD(), bins(60, 20), noise_multiplier=sigma, epsilon=target)
    assert 0.99 * theirs < found.delta <= theirs


def test_agrees_with_random_allocation_of_pld_accounting() -> None:
    """PLD_accounting 2.0: gaussian_allocation_epsilon_range(delta=1e-4, sigma=1.6 / 3**0.5, num_steps=20,
    epsilon_accuracy=0.01) gives ε between 1.4601190595 and 1.4686702908.
    """
    found = compute_epsilon(DPSGD(), bins(60, 20), noise_multiplier=1.6, delta=1e-4)
    assert 1.4601190595 < found.epsilon < 1.4686702908


def test_agrees_with_jax_privacy() -> None:
    """jax-privacy 2.0.0: the mean of (1 − e^(1 − L))₊ over 50 000 losses L from get_privacy_loss_sample(
    BallsInBinsSampling(iterations=60, cycle_length=20), 2.0, 0.5 ** np.arange(60.0), seed=1, positive_sample=…,
    num_samples=50000) is 0.00284846 ± 0.00012085 for removing (True), and 0.00163852 ± 0.00008033 for adding (False).
    """
    chains = chains_of(bin_gram(LambdaCGD(0.5), bins(60, 20)))
    for adding, mean, error in ((False, 0.00284846, 0.00012085), (True, 0.00163852, 0.00008033)):
        found = min(
            chain_bound(chain, sigma=2.0, epsilon=1.0, ignore=1e-6, fineness=BINS.fine, adding=adding)
            for chain in chains
        )
        assert mean - 3 * error < found < 1.5 * mean
    drawn = compute_delta(LambdaCGD(0.5), bins(60, 20), noise_multiplier=2.0, epsilon=1.0).delta
    assert drawn == pytest.approx(0.00284846, abs=3 * 0.00012085)


@pytest.mark.parametrize("method", ["monte-carlo", "deterministic"])
def test_extremes_fall_back_on_the_gaussian_mechanism(method) -> None:
    """Where squares would overflow amplification is left out: the answer is finite, and larger than it need be."""
    participation, known = bins(12, 3), Participation(rounds=12, min_separation=3)
    found = calibrate(LambdaCGD(0.5), participation, epsilon=1e-200, delta=1e-200, method=method).noise_multiplier
    assert found == pytest.approx(
        calibrate(LambdaCGD(0.5), known, epsilon=1e-200, delta=1e-200).noise_multiplier, rel=1e-6
    )
    for sigma, least, most in ((1e160, 0, 1e-150), (1e-140, 1e250, 1e300)):
        spent = compute_epsilon(
            LambdaCGD(0.5), participation, noise_multiplier=sigma, delta=1e-200, method=method
        ).epsilon
        assert least <= spent <= most
        assert compute_delta(LambdaCGD(0.5), participation, noise_multiplier=sigma, epsilon=1, method=method).delta <= 1
    for target, failure, message in ((1e-301, 1e-5, "epsilon must be in"), (1.0, 1e-301, "delta must be in")):
        with pytest.raises(ValueError, match=message):
            calibrate(LambdaCGD(0.5), participation, epsilon=target, delta=failure, method=method)


# An independent Monte Carlo with importance sampling (standard error 0.1 %): n = 3900, b = 390, k = 10, δ = 1e-5, σ.
REFERENCE = [
    (LambdaCGD(0.9), 8.0, 2.926637, 1.05),
    (LambdaCGD(0.9), 1.0, 7.476348, 1.03),
    (DPSGD(), 8.0, 1.210277, 1.01),
    (DPSGD(), 1.0, 2.258091, 1.01),
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("mechanism", "target", "sigma", "ratio"), REFERENCE)
def test_is_above_an_independent_estimate_and_near_it(mechanism, target, sigma: float, ratio: float) -> None:
    found = calibrate(mechanism, bins(3900, 390), epsilon=target, delta=1e-5, method="deterministic").noise_multiplier
    assert 0.999 * sigma <= found <= ratio * sigma
