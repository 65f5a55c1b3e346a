"""Replayed and buffered noise are the same rows of C⁻¹Z, whatever was tried in between."""

import numpy as np
import pytest

from fedcgd.mechanisms import BISR, BLT, BSR, DPSGD, BinaryTree, Diagonal, LambdaCGD, Normalized, inverse_matrix
from fedcgd.noise import NoiseStream
from fedcgd.noise.source import RunNoise
from fedcgd.participation import Participation
from fedcgd.plan import Plan

ROUNDS, SIZE, STEP = 12, 50, 2.0**-22
STREAM = NoiseStream(bytes(range(32)))
ATTEMPTS = [0, 3, 0, 0, 7, 0, 0, 0, 1, 0, 0, 0]
MECHANISMS = [
    DPSGD(),
    LambdaCGD(0.8),
    BISR(4),
    BSR(4),
    BLT((0.2, 0.1), (0.9, 0.5)),
    BinaryTree(),
    Diagonal(),
    Normalized(BSR(3)),
    Normalized(LambdaCGD(0.5)),
]


def plan(mechanism) -> Plan:
    participation = Participation(rounds=ROUNDS, min_separation=4)
    return Plan(mechanism=mechanism, participation=participation, clip_norm=0.5, noise_multiplier=3.0, delta=1e-5)


def expected(mechanism) -> np.ndarray:
    z = np.stack([STREAM.normal(t, a, 0, SIZE) for t, a in enumerate(ATTEMPTS)]).astype(np.float64)
    smoothing = [STREAM.derive("smoothing").normal(t, a, 0, SIZE) for t, a in enumerate(ATTEMPTS)]
    return 1.5 * inverse_matrix(mechanism, ROUNDS) @ z + 1.5 / 256 * np.stack(smoothing)


@pytest.mark.parametrize("mode", ["replay", "buffer", None])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: type(m).__name__)
def test_rows_of_the_inverse_times_the_noise(mechanism, mode) -> None:
    noise = RunNoise(plan(mechanism), STREAM, mode=mode)
    for t in range(ROUNDS):
        total = np.full(SIZE, 7)
        noise.add(total, ATTEMPTS[: t + 1], STEP)
        np.testing.assert_allclose((total - 7) * STEP, expected(mechanism)[t], atol=2e-5)


@pytest.mark.parametrize(
    "mechanism", [BSR(4), BLT((0.2, 0.1), (0.9, 0.5)), BinaryTree()], ids=lambda m: type(m).__name__
)
def test_attempts_that_were_not_released_leave_no_trace(mechanism) -> None:
    noise = RunNoise(plan(mechanism), STREAM, mode="buffer")
    for t in range(ROUNDS):
        for wasted in (50, 51):
            noise.add(np.zeros(SIZE, np.int64), [*ATTEMPTS[:t], wasted], STEP)
        total = np.zeros(SIZE, np.int64)
        noise.add(total, ATTEMPTS[: t + 1], STEP)
        np.testing.assert_allclose(total * STEP, expected(mechanism)[t], atol=2e-5)


def test_another_process_goes_on_from_the_attempts_alone() -> None:
    total = np.zeros(SIZE, np.int64)
    RunNoise(plan(BSR(4)), STREAM, mode="buffer").add(total, ATTEMPTS[:9], STEP)
    np.testing.assert_allclose(total * STEP, expected(BSR(4))[8], atol=2e-5)


def test_the_mechanism_chooses_what_is_less_work() -> None:
    modes = {type(m).__name__: RunNoise(plan(m), STREAM).mode for m in MECHANISMS[:6]}
    assert modes == {
        "DPSGD": "replay",
        "LambdaCGD": "replay",
        "BISR": "replay",
        "BSR": "buffer",
        "BLT": "buffer",
        "BinaryTree": "buffer",
    }


def test_no_noise_after_the_last_round() -> None:
    for mode in ("replay", "buffer"):
        noise = RunNoise(plan(BSR(4)), STREAM, mode=mode)
        with pytest.raises(ValueError, match="round"):
            noise.add(np.zeros(SIZE, np.int64), [0] * (ROUNDS + 1), STEP)
