"""ε when the noise comes from keepers, some of which work with the server, and the theorem that it rests on."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles_accounting import worst_squared_mu
from scipy import stats

from fedcgd import BISR, DPSGD, BandInvMF, LambdaCGD, Normalized, Participation, Plan, SquareRootToeplitz
from fedcgd.accounting.shares import NoiseShares, check_rounding, guarantees_by_collusion, log_rounding_distance
from fedcgd.keepers.keeper import share_terms
from fedcgd.mechanisms.sensitivity import sensitivity

PLAN = Plan.calibrated(
    "lambda-cgd:0.9", Participation(rounds=210, min_separation=21), clip_norm=1.0, epsilon=8, delta=1e-5
)


@pytest.mark.parametrize(
    ("keepers", "colluding", "expected"),
    [
        (1, 0, [8.00, math.inf]),
        (2, 0, [8.00, 12.26, math.inf]),
        (2, 1, [5.30, 8.00, math.inf]),
        (3, 1, [6.28, 8.00, 12.26, math.inf]),
        (3, 2, [4.18, 5.30, 8.00, math.inf]),
        (5, 2, [5.90, 6.73, 8.00, 10.25, 15.86, math.inf]),
    ],
)
def test_epsilon_by_the_number_of_colluding_keepers(keepers: int, colluding: int, expected: list[float]) -> None:
    """ε of the Gaussian mechanism with σ·√((K − j)/(K − t)): computed apart from this code, for the plan of the README."""
    found = guarantees_by_collusion(
        PLAN.accountant,
        NoiseShares(keepers=keepers, colluding=colluding),
        noise_multiplier=PLAN.noise_multiplier,
        delta=PLAN.delta,
    )
    assert [one.colluding for one in found] == list(range(keepers + 1))
    assert [one.epsilon for one in found] == pytest.approx(expected, abs=0.006)
    assert found[-1].guarantee is None
    assert "no guarantee" in str(found[-1])
    assert "ε ≤ 8" in str(found[colluding])
    mu = sensitivity(PLAN.mechanism, PLAN.participation).value / PLAN.noise_multiplier
    for one in found[:-1]:
        reach = mu * math.sqrt((keepers - colluding) / (keepers - one.colluding))
        assert _delta(one.epsilon, reach) == pytest.approx(PLAN.delta, rel=1e-6)


def _delta(epsilon: float, mu: float) -> float:
    """Balle and Wang, 2018, Theorem 8, by scipy's normal distribution."""
    phi = stats.norm.cdf
    return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)


def test_keepers_that_may_be_away_make_the_others_noise_larger() -> None:
    shares = NoiseShares(keepers=5, colluding=1, away=1)
    assert shares.share(3.0) == pytest.approx(3 / math.sqrt(3))
    assert shares.noise_multiplier(2.0, colluding=1) == pytest.approx(2.0)  # one away, one colluding: three left
    assert shares.noise_multiplier(2.0, colluding=1, present=5) == pytest.approx(2 * math.sqrt(4 / 3))
    assert shares.noise_multiplier(2.0, colluding=4) == 0
    recorded = guarantees_by_collusion(
        PLAN.accountant, shares, noise_multiplier=PLAN.noise_multiplier, delta=1e-5, released=3, present=[5, 4, 5]
    )
    full = guarantees_by_collusion(
        PLAN.accountant, shares, noise_multiplier=PLAN.noise_multiplier, delta=1e-5, released=3, present=[5, 5, 5]
    )
    assert recorded[1].epsilon > full[1].epsilon
    assert recorded[1].epsilon == PLAN.guarantee(released=3).epsilon
    with pytest.raises(ValueError, match="5 keepers"):
        shares.noise_multiplier(2.0, colluding=1, present=3)
    for impossible in (-1, 6):
        with pytest.raises(ValueError, match="colluding must"):
            shares.noise_multiplier(2.0, colluding=impossible)
    written = [one.to_description() for one in full]
    assert [math.inf if one["epsilon"] is None else one["epsilon"] for one in written] == [one.epsilon for one in full]
    assert written[0]["guarantee"]["epsilon"] == full[0].epsilon


@pytest.mark.parametrize("numbers", [(1, 1, 0), (3, 2, 1), (3, -1, 0), (3, 1, 0.5), (2.0, 1, 0)])
def test_numbers_that_leave_no_noise_are_refused(numbers) -> None:
    keepers, colluding, away = numbers
    with pytest.raises(ValueError, match="must be"):
        NoiseShares(keepers=keepers, colluding=colluding, away=away)


# Theorem 1: whatever comes, goes, cancels what, and with which variance, μ stays within the plan's.

MECHANISMS = [
    DPSGD(), LambdaCGD(0.3), LambdaCGD(0.9), LambdaCGD(0.99), Normalized(LambdaCGD(0.8)),
    BISR(2), BISR(4), Normalized(BISR(3)), BandInvMF((1.0, -0.6, -0.1)), SquareRootToeplitz(),
]  # fmt: skip


def covariance(mechanism, rounds: int, parties) -> np.ndarray:
    """Σ over rounds of what the `parties` add, each a (variance, {round: earlier round or None}); from `share_terms`."""
    total = np.zeros((rounds, rounds))
    for variance, pointers in parties:
        b = np.zeros((rounds, rounds))
        for t, p in pointers.items():
            earlier = []
            while p is not None and len(earlier) < mechanism.inverse_bandwidth(rounds) - 1:  # as `Record.before`
                earlier.append((p, 0))
                p = pointers[p]
            for s, _, weight in share_terms(mechanism, rounds, t, 0, earlier):
                b[t, s] = weight
        total += variance * b @ b.T
    return total


@st.composite
def churns(draw):
    """A mechanism, a participation, and honest parties that come, go and point as an adversary likes."""
    n = draw(st.integers(2, 8))
    participation = Participation(rounds=n, min_separation=draw(st.integers(1, n)))
    mechanism = draw(st.sampled_from(MECHANISMS))
    parties = []
    for _ in range(draw(st.integers(1, 4))):
        present = sorted(draw(st.sets(st.integers(0, n - 1), min_size=1)))
        rule = draw(st.sampled_from(["last", "any", "none"]))
        pointers = {}
        for i, t in enumerate(present):
            earlier = present[:i]
            match rule if earlier else "none":
                case "last":
                    pointers[t] = earlier[-1]
                case "any":
                    pointers[t] = draw(st.sampled_from([None, *earlier]))
                case _:
                    pointers[t] = None
        parties.append((draw(st.sampled_from([0.25, 1.0, 1.0, 3.0])), pointers))
    return mechanism, participation, parties


@settings(derandomize=True, max_examples=400, deadline=None)
@given(churns(), st.integers(0, 2**32))
def test_theorem_1_holds_for_any_churn_pointers_and_variances(churn, seed: int) -> None:
    mechanism, participation, parties = churn
    n = participation.rounds
    variance = [sum(v for v, pointers in parties if t in pointers) for t in range(n)]
    if not all(variance):  # nothing is released without anybody's noise
        parties = [*parties, (1.0, {t: t - 1 if t else None for t in range(n)})]
        variance = [v + 1.0 for v in variance]
    planned = sensitivity(mechanism, participation).value ** 2 / min(variance)
    found = worst_squared_mu(covariance(mechanism, n, parties), participation, np.random.default_rng(seed))
    assert found <= planned * (1 + 1e-9)


def test_with_all_keepers_in_every_round_the_bound_is_attained() -> None:
    """So the theorem gives nothing away: μ² is the plan's, times (K − t)/(K − j)."""
    participation = Participation(rounds=6, min_separation=2)
    mechanism = LambdaCGD(0.9)
    always = {t: t - 1 if t else None for t in range(6)}
    found = worst_squared_mu(covariance(mechanism, 6, [(0.5, always)] * 2), participation, np.random.default_rng(0))
    assert found == pytest.approx(sensitivity(mechanism, participation).value ** 2)


# Lemma 3: shares are rounded one by one.


def test_rounding_shares_one_by_one_costs_what_lemma_3_says() -> None:
    """Two shares of 0.3 steps: the distance of the fractional part from uniform, given the sum, by integration."""
    stddev = 0.3
    conditional = stddev / math.sqrt(2)  # of one share given the sum of two
    points = (np.arange(20_000) + 0.5) / 20_000
    density = sum(stats.norm.pdf(points + j, scale=conditional) for j in range(-6, 7))
    exact = np.abs(density - 1).mean() / 2
    bound = math.exp(log_rounding_distance(parties=2, size=1, rounds=1, share_steps=stddev))
    assert exact <= bound < 8 * exact
    assert log_rounding_distance(parties=2, size=1, rounds=7, share_steps=1.0) == pytest.approx(
        math.log(7) + log_rounding_distance(parties=2, size=1, rounds=1, share_steps=1.0)
    )
    assert log_rounding_distance(parties=1, size=10, rounds=9, share_steps=1.0) == -math.inf
    assert log_rounding_distance(parties=3, size=10, rounds=9, share_steps=0.1) == 0
    # At three steps and √m: 2·e^(−18π²)/2·…, below 10⁻⁷⁶ a coordinate.
    assert log_rounding_distance(parties=2, size=1, rounds=1, share_steps=3 * math.sqrt(2)) < math.log(1e-76)


def test_shares_that_are_too_coarse_for_the_lattice_are_refused() -> None:
    shares = NoiseShares(keepers=4, colluding=1)
    fine = {"size": 10**6, "rounds": 210, "epsilon": 8.0}
    check_rounding(shares, share_steps=6.0, delta=1e-5, **fine)
    check_rounding(shares, share_steps=60.0, delta=1e-5, **fine)
    with pytest.raises(ValueError, match="4 keepers"):
        check_rounding(shares, share_steps=5.9, delta=1e-5, **fine)
    distance = log_rounding_distance(parties=4, size=10**6, rounds=210, share_steps=6.0)
    least = 2.0**40 * (1 + math.exp(8.0)) * math.exp(distance)  # below it 2⁻⁴⁰·δ is less than what rounding adds
    check_rounding(shares, share_steps=6.0, delta=least * 1.001, **fine)
    with pytest.raises(ValueError, match="not negligible"):
        check_rounding(shares, share_steps=6.0, delta=least * 0.999, **fine)
