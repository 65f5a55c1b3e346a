"""Noise round by round from few vectors is the noise of the matrix, for every mechanism, in one process or split over many."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from mechanism_table import MECHANISMS, N

from fedcgd.mechanisms import (
    BIFR,
    BISR,
    BLT,
    BSR,
    DPSGD,
    BandedToeplitz,
    BandInvMF,
    BinaryTree,
    Dense,
    Diagonal,
    LambdaCGD,
    LambdaMuCGD,
    Normalized,
    SquareRootToeplitz,
    matrix,
)
from fedcgd.mechanisms.adjoint import transposed_inverse
from fedcgd.mechanisms.streaming import State, correlate, noise_mode, state_before
from fedcgd.mechanisms.workload import Workload
from fedcgd.noise import NoiseStream
from fedcgd.release.run_noise import NoiseSource

KEY = bytes(range(32))


def stream(mechanism, rounds, z):
    state, out = State(), []
    for row in z:
        noise, state = correlate(mechanism, rounds, row, state)
        out.append(noise)
        assert len(state.buffers) <= mechanism.num_buffers(rounds)
    return out


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_buffers_dense_inverse_and_replay_agree(mechanism) -> None:
    keyed = NoiseStream(KEY)
    z = np.stack([keyed.normal(t, 0, 0, 7) for t in range(N)]).astype(np.float64)
    before = z.copy()
    dense = np.linalg.inv(matrix(mechanism, N)) @ z
    np.testing.assert_allclose(stream(mechanism, N, z), dense, atol=1e-10)
    np.testing.assert_array_equal(z, before)
    for t in range(N):
        weights = mechanism.inverse_row(t, N)
        np.testing.assert_allclose(weights @ z[t::-1][: len(weights)], dense[t], atol=1e-10)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_tensors_of_any_shape_work_too(mechanism) -> None:
    z = torch.arange(N * 6, dtype=torch.float32).reshape(N, 2, 3).sin()
    expected = np.linalg.inv(matrix(mechanism, N)) @ z.reshape(N, 6).double().numpy()
    found = torch.stack(stream(mechanism, N, z))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.reshape(N, 6).numpy(), expected, atol=1e-4)


def test_many_rounds_stay_accurate() -> None:
    # Round-off must not grow: 1000 rounds in float32 against float64.
    rounds = 1000
    z = np.random.default_rng(0).standard_normal((rounds, 3))
    for mechanism in (BSR(50), BLT((0.05, 0.02, 0.3), (0.999, 0.99, 0.5)), BinaryTree(), BISR(8)):
        exact = stream(mechanism, rounds, z)
        single = stream(mechanism, rounds, z.astype(np.float32))
        np.testing.assert_allclose(single, exact, atol=2e-4)


# Table 5 of arXiv:2601.22334: vectors in memory, and vectors made in the last round if none is kept.
@pytest.mark.parametrize(
    ("mechanism", "kept", "replayed", "mode"),
    [
        (DPSGD(), 0, 1, "replay"),
        (LambdaCGD(0.9), 1, 2, "replay"),
        (Normalized(LambdaCGD(0.9)), 1, 2, "replay"),
        (BISR(16), 15, 16, "replay"),
        (BIFR(3, 0.7), 2, 3, "replay"),
        (BIFR(16, 1.0), 1, 2, "replay"),
        (LambdaMuCGD(0.8, 0.3), 2, 3, "replay"),
        (LambdaMuCGD(0.8, 0.0), 1, 2, "replay"),
        (BandInvMF((1.0, -0.5, -0.1, -0.1)), 3, 4, "replay"),
        (Diagonal(), 0, 1, "replay"),
        (BSR(16), 15, 1000, "buffer"),
        (BandedToeplitz((1.0, 0.5, 0.2)), 2, 1000, "buffer"),
        (Normalized(BSR(16)), 15, 1000, "buffer"),
        (Dense("band-mf", np.tile([1.0, 0.0, 0.0, 0.0], (1000, 1))), 3, 1000, "buffer"),
        (BLT((0.1, 0.2), (0.9, 0.5)), 2, 1000, "buffer"),
        (BinaryTree(), 10, 1000, "buffer"),
        (SquareRootToeplitz(), 999, 1000, "replay"),
    ],
    ids=str,
)
def test_memory_of_table_5(mechanism, kept, replayed, mode) -> None:
    assert mechanism.num_buffers(1000) == kept
    assert mechanism.inverse_bandwidth(1000) == replayed
    assert noise_mode(mechanism, 1000) == mode


def test_no_noise_after_the_last_round() -> None:
    _, state = correlate(DPSGD(), 1, np.zeros(2), State())
    with pytest.raises(ValueError, match="1 rounds"):
        correlate(DPSGD(), 1, np.zeros(2), state)


WORKER = """
import sys
import numpy as np
from fedcgd.mechanisms import BSR, BISR
from fedcgd.mechanisms.streaming import State, correlate
from fedcgd.noise import NoiseStream
from fedcgd.release.run_noise import NoiseSource
start, stop = map(int, sys.argv[1:])
stream = NoiseStream(bytes(range(32)))
for mechanism in (BSR(4), BISR(3)):
    state = State()
    for t in range(6):
        noise, state = correlate(mechanism, 6, stream.normal(t, 0, start, stop), state)
        sys.stdout.buffer.write(noise.tobytes())
"""


def test_processes_that_own_slices_make_the_same_noise_as_one() -> None:
    # Section 3.3 of "Scaling up the banded matrix factorization mechanism": a worker makes the noise of its own coordinates.
    slices = [(0, 4097), (4097, 70_001)]
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(start), str(stop)], stdout=subprocess.PIPE)
        for start, stop in slices
    ]
    stream, whole = NoiseStream(KEY), []
    for mechanism in (BSR(4), BISR(3)):
        state = State()
        for t in range(6):
            noise, state = correlate(mechanism, 6, stream.normal(t, 0, 0, slices[-1][1]), state)
            whole.append(noise)
    parts = []
    for worker, (start, stop) in zip(workers, slices, strict=True):
        output, _ = worker.communicate(timeout=120)
        assert worker.returncode == 0
        parts.append(np.frombuffer(output, np.float32).reshape(12, stop - start))
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize(
    "mechanism",
    [LambdaCGD(0.9), BLT((0.3, 0.1), (0.95, 0.6)), BSR(8), Normalized(LambdaCGD(0.9))],
    ids=lambda mechanism: type(mechanism).__name__,
)
def test_single_precision_errs_by_less_than_four_millionths_however_many_rounds(mechanism) -> None:
    """C·(what single precision changes) beside C·(C⁻¹Z) = Z, in standard deviations of Z; early and late."""
    n, z = 1000, np.random.default_rng(3).standard_normal((1000, 100)).astype(np.float32)
    single, double = np.stack(stream(mechanism, n, z)), np.stack(stream(mechanism, n, z.astype(float)))
    assert single.dtype == np.float32
    changed = matrix(mechanism, n) @ (single - double)
    assert 0 < np.abs(changed).max() < 4e-6
    assert np.sqrt((changed[-100:] ** 2).mean()) < 2 * np.sqrt((changed[:100] ** 2).mean()) + 1e-8


@pytest.mark.parametrize(
    "mechanism",
    [LambdaCGD(0.9), BLT((0.3, 0.1), (0.95, 0.6)), BSR(8), BISR(4), BinaryTree(), Normalized(LambdaCGD(0.9))],
    ids=lambda mechanism: type(mechanism).__name__,
)
def test_what_buffers_bring_to_a_round_follows_from_earlier_rounds_alone(mechanism) -> None:
    """Rows of two Z_t from the same buffers differ by their difference over C[t, t], but for the row's own additions: what the
    bound on noise in buffers (docs: proofs.md) is proven from.
    """
    n, z = 40, np.random.default_rng(4).standard_normal((40, 2, 100)).astype(np.float32)
    diagonal, state = np.diag(matrix(mechanism, n)), State()
    for t in range(n):
        (row, following), (other, _) = (correlate(mechanism, n, each, state) for each in z[t])
        assert row.dtype == np.float32
        largest = np.maximum(np.abs(z[t]).max(axis=0), np.maximum(np.abs(row), np.abs(other)))
        changed = np.abs(row.astype(float) - other - (z[t, 0].astype(float) - z[t, 1]) / diagonal[t])
        assert np.all(changed <= 2.0**-23 * (2 + len(state.buffers)) * largest)
        state = following


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_products_with_the_transposed_inverse_are_those_of_the_matrix(mechanism) -> None:
    v = np.random.default_rng(0).normal(size=(N, 2))
    before = v.copy()
    expected = np.linalg.inv(matrix(mechanism, N)).T @ v
    np.testing.assert_allclose(transposed_inverse(mechanism, N, v), expected, atol=1e-9)
    np.testing.assert_array_equal(v, before)


def test_coefficients_of_an_inverse_are_an_array_and_begin_above_zero() -> None:
    assert BandInvMF((1.0, -0.5)).inverse_band.tolist() == [1.0, -0.5]
    with pytest.raises(ValueError, match="inverse coefficients"):
        BandInvMF((0.0, 1.0))


def test_learning_rates_of_any_number_type_are_floats() -> None:
    (rate,) = Workload(learning_rates=(np.float64(0.5),)).learning_rates
    assert type(rate) is float


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_buffers_are_made_anew_from_the_rounds_before(mechanism) -> None:
    z = np.random.default_rng(0).normal(size=(N, 2))
    dense = np.linalg.inv(matrix(mechanism, N)) @ z
    state = state_before(mechanism, N, N - 1, lambda t: z[t])
    np.testing.assert_allclose(correlate(mechanism, N, z[-1], state)[0], dense[-1], atol=1e-10)


@pytest.mark.parametrize(
    "make",
    [lambda: BISR(1.5), lambda: Workload(momentum=1.5), lambda: NoiseSource(DPSGD(), 3, None, "x")],
)
def test_numbers_and_modes_outside_their_range_are_refused(make) -> None:
    with pytest.raises(ValueError, match=r"nu|momentum|mode"):
        make()
