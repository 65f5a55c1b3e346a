"""Replayed and buffered noise are the same rows of C⁻¹Z, whatever was tried in between."""

from contextlib import suppress
from dataclasses import replace

import mechanism_table
import numpy as np
import pytest
from plans import make_plan

from fedcgd.mechanisms import BLT, BSR, LambdaCGD, inverse_matrix
from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Lattice
from fedcgd.participation import Participation
from fedcgd.release import lattice_of
from fedcgd.release.run_noise import LatticeNormals, NoiseSource

ROUNDS, SIZE, STEP = 12, 50, 2.0**-22
STREAM = NoiseStream(bytes(range(32)))
NONCES = [0, 3, 0, 0, 7, 0, 2**127 + 5, 0, 1, 0, 0, 2**128 - 1]
MECHANISMS = [*mechanism_table.ONE_OF_EACH.values(), *mechanism_table.NORMALIZED.values()]


def source(mechanism, mode=None) -> NoiseSource:
    return NoiseSource(mechanism, ROUNDS, LatticeNormals(STREAM, Lattice(STEP)), mode)


def expected(mechanism) -> np.ndarray:
    z = np.stack([STREAM.normal(t, a, 0, SIZE) for t, a in enumerate(NONCES)]).astype(np.float64)
    smoothing = [STREAM.derive("smoothing").words(t, a, 0, SIZE) for t, a in enumerate(NONCES)]
    return 1.5 * inverse_matrix(mechanism, ROUNDS) @ z + 1.5 / 2**39 * np.stack(smoothing)


@pytest.mark.parametrize("mode", ["replay", "buffer", "cpu-buffer", None])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: type(m).__name__)
def test_rows_of_the_inverse_times_the_noise(mechanism, mode) -> None:
    noise = source(mechanism, mode)
    for t in range(ROUNDS):
        total = np.full(SIZE, 7)
        noise.add(total, NONCES[: t + 1], 1.5)
        np.testing.assert_allclose((total - 7) * STEP, expected(mechanism)[t], atol=2e-5)


@pytest.mark.parametrize("mode", ["buffer", "cpu-buffer"])
@pytest.mark.parametrize("other", [0, 7])
def test_buffers_of_another_history_are_not_used(other: int, mode) -> None:
    """As many rounds, of which one was released under another nonce: by another process, or by one before a copy of it."""
    noise = source(BLT((0.2, 0.1), (0.9, 0.5)), mode)
    history = [50 if t == other else nonce for t, nonce in enumerate(NONCES[:8])]
    noise.add(np.zeros(SIZE, np.int64), history, 1.5)
    total = np.zeros(SIZE, np.int64)
    noise.add(total, NONCES[:9], 1.5)
    np.testing.assert_allclose(total * STEP, expected(BLT((0.2, 0.1), (0.9, 0.5)))[8], atol=2e-5)


@pytest.mark.parametrize("mode", ["replay", "buffer", "cpu-buffer"])
@pytest.mark.parametrize("where", ["vector", "add", "add_row"])
@pytest.mark.parametrize("retry", [50, 51], ids=["the same nonce", "another nonce"])
def test_what_raised_halfway_makes_the_right_noise_afterwards(monkeypatch, mode, where: str, retry: int) -> None:
    """So nobody needs to make another source after a round that failed."""
    mechanism, history = BLT((0.2, 0.1), (0.9, 0.5)), [*NONCES[:5], retry, *NONCES[6:]]
    noise, untouched = source(mechanism, mode), source(mechanism, mode)

    def row(source: NoiseSource, t: int) -> list[int]:
        total = np.zeros(SIZE, np.int64)
        source.add(total, history[: t + 1], 1.5)
        return list(total)

    def interrupted(original):
        def then(*arguments):
            original(*arguments)
            raise KeyboardInterrupt

        return then

    assert [row(noise, t) for t in range(5)] == [row(untouched, t) for t in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(LatticeNormals, where, interrupted(getattr(LatticeNormals, where)))
        with suppress(KeyboardInterrupt):  # a mode does not call all of them
            noise.add(np.zeros(SIZE, np.int64), [*NONCES[:5], 50], 1.5)
    assert [row(noise, t) for t in range(5, ROUNDS)] == [row(untouched, t) for t in range(5, ROUNDS)]


def test_replay_makes_the_bands_again_and_buffers_make_one_vector() -> None:
    class Recorded(LatticeNormals):
        def add(self, total, terms, stddev) -> None:
            made.append([round for round, _, _ in terms])
            super().add(total, terms, stddev)

        def vector(self, total, round, nonce):
            made.append([round])
            return super().vector(total, round, nonce)

    for mode, expected_rounds in (("replay", [[0], [1, 0], [2, 1]]), ("buffer", [[0], [1], [2]])):
        made: list = []
        noise = NoiseSource(LambdaCGD(0.8), ROUNDS, Recorded(STREAM, Lattice(STEP)), mode)
        for t in range(3):
            noise.add(np.zeros(SIZE, np.int64), NONCES[: t + 1], 1.5)
        assert made == expected_rounds
    # Without a mode it is what is less work.
    assert [source(mechanism).mode for mechanism in (LambdaCGD(0.8), BSR(4))] == ["replay", "buffer"]


def test_no_noise_after_the_last_round() -> None:
    for mode in ("replay", "buffer"):
        noise = source(BSR(4), mode)
        with pytest.raises(ValueError, match="round"):
            noise.add(np.zeros(SIZE, np.int64), [0] * (ROUNDS + 1), 1.5)


def test_the_grid_holds_the_largest_row_of_the_noise():
    """Of one coordinate at clip norm 1 it holds 2³⁰; a row of C⁻¹ of λ = 0.9 sums up to 1.9."""
    plan = make_plan(LambdaCGD(0.9), Participation(rounds=4), noise_multiplier=0.6 * 2**30)
    with pytest.raises(ValueError, match="lattice"):
        lattice_of(plan, 1)
    assert lattice_of(replace(plan, mechanism=LambdaCGD(0.0)), 1) == Lattice(2.0**-10)
