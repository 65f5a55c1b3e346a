"""The audit of the mechanism: the real release path passes, and each planted bug is refuted."""

import dataclasses
from itertools import count

import numpy as np
import pytest

from fedcgd import NoiseKey, Participation, Plan
from fedcgd.audit.audit import audit_canaries, audit_plan, canary_scores
from fedcgd.audit.coins import coin_scores, coin_sums
from fedcgd.audit.paths import audit_key
from fedcgd.mechanisms import BSR, DPSGD, LambdaCGD, Mechanism, Normalized, inverse_matrix, matrix
from fedcgd.noise import NoiseStream
from fedcgd.participation.cohorts import rounds_of
from fedcgd.release import lattice_of
from fedcgd.release.run_noise import LatticeNormals, NoiseSource

PARTICIPATION = Participation(rounds=12, min_separation=4)
CLIP = 0.5
DELTA = 1e-5


def planned(mechanism: Mechanism, epsilon: float) -> Plan:
    return Plan.calibrated(mechanism, participation=PARTICIPATION, clip_norm=CLIP, epsilon=epsilon, delta=DELTA)


def released(plan: Plan, nonces=None, scale: float = 1.0):
    """What the server does: the noise of `plan` on each sum, a fresh key in each repetition."""

    def release(sums: np.ndarray, repetition: int) -> np.ndarray:
        stream = NoiseStream(NoiseKey.simulation(repetition).noise)
        grid = lattice_of(plan, sums.shape[1])
        noise = NoiseSource(plan.mechanism, plan.participation.rounds, LatticeNormals(stream, grid))
        out = np.empty_like(sums)
        for t, row in enumerate(sums):
            total = grid.to_steps(row)
            noise.add(total, (nonces or [0] * len(sums))[: t + 1], scale * plan.stddev)
            out[t] = grid.from_steps(total)
        return out

    return release


def audit(release, mechanism: Mechanism, epsilon: float, **options):
    return audit_plan(planned(mechanism, epsilon), release, epsilon=epsilon, **{"seed": 1, "trials": 20_000, **options})


MECHANISMS = [DPSGD(), LambdaCGD(0.8), Normalized(LambdaCGD(0.8)), BSR(3)]


@pytest.mark.parametrize("epsilon", [0.5, 8.0])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_real_release_passes_and_the_bound_is_close(mechanism: Mechanism, epsilon: float) -> None:
    result = audit(released(planned(mechanism, epsilon)), mechanism, epsilon)
    assert result.passed
    assert 0.9 * epsilon < result.epsilon_lower < epsilon
    assert result.epsilon_lower == max(result.bounds.values()) == result.bounds[result.method]
    assert len(result.bounds) == 9
    assert (result.claimed_epsilon, result.delta, result.confidence, result.trials) == (epsilon, DELTA, 0.99, 40_000)


@pytest.mark.parametrize("epsilon", [0.5, 8.0])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_sigma_ten_percent_too_small_is_refuted(mechanism: Mechanism, epsilon: float) -> None:
    result = audit(released(planned(mechanism, epsilon), scale=0.9), mechanism, epsilon)
    assert not result.passed
    assert result.epsilon_lower > epsilon


def replayed(plan: Plan, sums: np.ndarray, repetition: int) -> np.ndarray:
    """Round 4 was released, and is released again after a crash with other answers and the same (round, attempt)."""
    others = sums.copy()
    others[4] = 0.0  # this time the canary did not answer
    first, second = (released(plan)(x, repetition) for x in (sums, others))
    return np.concatenate([first, second[4:5]])


def without_noise(*rounds: int):
    def release(plan: Plan, sums: np.ndarray, repetition: int) -> np.ndarray:
        out = released(plan)(sums, repetition)
        out[list(rounds)] = sums[list(rounds)]
        return out

    return release


def the_same_noise_in_every_round(plan: Plan, sums: np.ndarray, repetition: int) -> np.ndarray:
    """The round is left out of the noise's index: differences of releases hold no noise."""
    return sums + released(plan)(np.zeros_like(sums), repetition)[:1]


def cancelled_twice(plan: Plan, sums: np.ndarray, repetition: int) -> np.ndarray:
    """C⁻¹ applied two times: noise of the right size in each round, and too little of it in their sum."""
    noise = np.random.default_rng(repetition).normal(size=sums.shape)
    return sums + plan.stddev * np.linalg.matrix_power(inverse_matrix(plan.mechanism, 12), 2) @ noise


def a_round_again(plan: Plan, sums: np.ndarray, repetition: int) -> np.ndarray:
    """A round that was released twice under two nonces is a release too many, but reveals far less."""
    second = released(plan, nonces=[7] * 12)(sums, repetition)
    return np.concatenate([released(plan)(sums, repetition), second[4:5]])


HIDDEN = (
    "learned statistic, least hidden rounds"  # none of the rounds is in the pattern of largest sensitivity (0, 4, 8)
)


@pytest.mark.parametrize(
    ("planted", "mechanism", "epsilon", "above", "below", "method"),
    [
        *((replayed, mechanism, 0.5, 1000, np.inf, "learned statistic") for mechanism in MECHANISMS),
        *((without_noise(*r), LambdaCGD(0.8), 2.0, 1000, np.inf, HIDDEN) for r in ((2, 6, 10), (3,), (11,))),
        (the_same_noise_in_every_round, DPSGD(), 0.5, 1000, np.inf, ""),
        (cancelled_twice, LambdaCGD(0.8), 2.0, 2.0, np.inf, ""),
        (a_round_again, DPSGD(), 0.5, 0.5, 0.8, ""),
    ],
)
def test_planted_bugs_are_refuted(planted, mechanism: Mechanism, epsilon: float, above, below, method: str) -> None:
    plan = planned(mechanism, epsilon)
    result = audit(lambda sums, repetition: planted(plan, sums, repetition), mechanism, epsilon)
    assert above < result.epsilon_lower < below
    assert result.method.startswith(method)
    assert not result.passed


def test_a_round_without_noise_is_found_in_any_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcgd.audit.audit._LEARNED_ROWS", 5)
    plan = planned(BSR(3), 2.0)
    assert audit(released(plan), BSR(3), 2.0).passed
    assert not audit(lambda *given: without_noise(9)(plan, *given), BSR(3), 2.0).passed


def test_what_is_released_beyond_one_row_a_round_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 0 again, in a run with more rounds than the learned statistic looks at."""
    monkeypatch.setattr("fedcgd.audit.audit._LEARNED_ROWS", 3)
    plan = planned(DPSGD(), 0.5)

    def release(sums: np.ndarray, repetition: int) -> np.ndarray:
        first = released(plan)(sums, repetition)
        return np.concatenate([first, first[:1] - sums[:1]])

    assert audit(release, DPSGD(), 0.5).epsilon_lower > 1000


def test_many_rounds_are_audited_in_several_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcgd.audit.audit._BATCH", 2**22)
    participation = Participation(rounds=2000, min_separation=500)
    plan = Plan.calibrated(LambdaCGD(0.9), participation, clip_norm=1.0, epsilon=2.0, delta=DELTA)
    shapes = []

    def release(sums: np.ndarray, repetition: int) -> np.ndarray:
        shapes.append((sums.shape, repetition))
        return released(plan)(sums, repetition)

    result = audit_plan(plan, release, epsilon=2.0, seed=0, trials=4000)
    assert shapes == [((2000, 2097), repetition) for repetition in range(4)]
    assert result.trials == 4 * 2097
    assert result.passed
    assert result.epsilon_lower > 1.6


def test_canary_scores_by_the_definition() -> None:
    """⟨m, C·x̂⟩/(‖m‖ζ) with dense matrices, for canaries of different patterns."""
    rng = np.random.default_rng(0)
    c = matrix(Normalized(LambdaCGD(0.6)), 7)
    x = rng.normal(size=(7, 3))
    patterns = [(0, 3), (1, 4), (0, 3)]
    expected = []
    for j, pattern in enumerate(patterns):
        m = c[:, list(pattern)].sum(axis=1)
        expected.append(m @ (c @ x[:, j]) / np.linalg.norm(m) / 2.0)
    np.testing.assert_allclose(canary_scores(Normalized(LambdaCGD(0.6)), x, patterns, clip_norm=2.0), expected)


COINS = Participation(rounds=8, min_separation=4, sampling="b-min-sep", sampling_rate=0.5)


def coins_plan(epsilon: float, delta: float) -> Plan:
    return Plan.calibrated(LambdaCGD(0.8), COINS, clip_norm=CLIP, epsilon=epsilon, delta=delta)


def test_with_coins_the_claim_stands_and_a_tenth_less_noise_is_refuted() -> None:
    plan = coins_plan(2.0, 0.1)
    for scale in (1.0, 0.9):
        result = audit_plan(plan, released(plan, scale=scale), epsilon=2.0, seed=0, trials=300_000)
        assert result.passed == (scale == 1.0)
        assert result.epsilon_lower > 1.6
        assert result.trials == 300_000
        assert all(name.startswith("likelihood ratio with coins") for name in result.bounds)


def test_coins_that_everybody_knows_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is right, and the rounds are always 0 and 4: what coins are accounted for, they do not bring."""
    plan = coins_plan(2.0, 0.1)
    monkeypatch.setattr("fedcgd.audit.coins.rounds_of", lambda *_: (0, 4))
    assert not audit_plan(plan, released(plan), epsilon=2.0, seed=0, trials=40_000).passed


def test_scores_with_coins_do_not_depend_on_the_unit_of_updates() -> None:
    plan = coins_plan(2.0, 0.1)
    released = np.random.default_rng(7).standard_normal((plan.participation.rounds, 5))
    scores = coin_scores(dataclasses.replace(plan, clip_norm=4.0), 4.0 * released)
    np.testing.assert_allclose(scores, coin_scores(dataclasses.replace(plan, clip_norm=1.0), released), rtol=1e-9)


def test_no_two_repetitions_have_the_same_key() -> None:
    keys = [audit_key(seed, repetition) for seed in range(3) for repetition in range(3)]
    assert len({key.choices_of("") for key in keys}) == len(keys)


def test_coins_are_those_of_a_run() -> None:
    """Each present user in its own rounds, and nobody else; users of another call have other coins."""
    plan = Plan(mechanism=LambdaCGD(0.8), participation=COINS, clip_norm=CLIP, noise_multiplier=1.0, delta=0.1)
    users, present = count(), np.arange(4000) % 3 > 0
    sums = coin_sums(plan, users, present, 5)
    assert set(np.unique(sums)) == {0.0, CLIP}
    assert not sums[:, ~present].any()
    key = NoiseKey.simulation(5).choices_of("")
    rows = [tuple(np.flatnonzero(column).tolist()) for column in sums[:, present].T]
    assert rows == [rounds_of(str(user), COINS, key) for user in range(len(rows))]
    assert sums[:, present].mean() / CLIP == pytest.approx(0.2, abs=0.01)  # 1/(1/p + b − 1)
    assert not np.array_equal(sums, coin_sums(plan, users, present, 5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epsilon": 0.0}, "^epsilon"),
        ({"epsilon": float("inf")}, "^epsilon"),
        ({"confidence": 1.0}, "^confidence"),
        ({"trials": 10}, "^trials"),
        ({"release": lambda sums, _: sums[:3]}, r"got \(3, 1000\)"),
        ({"release": lambda sums, _: sums * np.nan}, "finite"),
        ({"sampling": "balls-in-bins"}, "balls-in-bins"),
    ],
)
def test_bad_input_is_refused(options: dict, words: str) -> None:
    asked = {"epsilon": 1.0, "seed": 0, "trials": 1000, "release": lambda sums, _: sums} | options
    who = dataclasses.replace(PARTICIPATION, sampling=asked.pop("sampling", "none"))
    plan = Plan(mechanism=DPSGD(), participation=who, clip_norm=CLIP, noise_multiplier=1.0, delta=DELTA)
    with pytest.raises(ValueError, match=words):
        audit_plan(plan, **asked)


@pytest.mark.parametrize(
    ("included", "held_out", "words"),
    [
        ([1.0], [0.0, 0.0], "^included"),
        ([1.0, 1.0], [0.0, np.inf], "^held_out"),
        ([[1.0, 1.0]], [0.0, 0.0], "^included"),
    ],
)
def test_bad_scores_are_refused(included, held_out, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        audit_canaries(included, held_out, epsilon=1.0, delta=DELTA)


@pytest.mark.parametrize("name", ["epsilon", "delta", "confidence"])
def test_a_claim_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        audit_canaries([1.0, 1.0], [0.0, 0.0], **{"epsilon": 1.0, "delta": DELTA, "confidence": 0.9} | {name: 0.0})


def test_canaries_without_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2 patterns"):
        canary_scores(DPSGD(), np.zeros((3, 2)), [(0,), ()], clip_norm=1.0)
