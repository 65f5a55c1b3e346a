"""Noise round by round from few vectors is the noise of the matrix, for every mechanism, in one process or split over many."""

import numpy as np
import pytest
import torch
from mechanism_table import MECHANISMS, NORMALIZED, ONE_OF_EACH, N

from fedcgd import Participation
from fedcgd.mechanisms import BLT, BSR, Dense, SquareRootToeplitz, matrix
from fedcgd.mechanisms.adjoint import transposed_inverse
from fedcgd.mechanisms.streaming import State, correlate, noise_mode, state_before
from fedcgd.noise import NoiseStream
from fedcgd.optimisation import catalogue

KEY = bytes(range(32))
SOME = [*(ONE_OF_EACH[name] for name in ("lambda-cgd", "bisr", "blt", "bsr", "tree")), NORMALIZED["lambda-cgd"]]


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


# Table 5 of arXiv:2601.22334: vectors in memory, and vectors made in the last round if none is kept.
@pytest.mark.parametrize(
    ("mechanism", "kept", "replayed", "mode"),
    [
        ("dp-sgd", 0, 1, "replay"),
        ("lambda-cgd:0.9", 1, 2, "replay"),
        ("bisr:16", 15, 16, "replay"),
        ("bifr:3:0.7", 2, 3, "replay"),
        ("bsr:16", 15, 1000, "buffer"),
        (Dense("band-mf", np.tile([1.0, 0.0, 0.0, 0.0], (1000, 1))), 3, 1000, "buffer"),
        (BLT((0.1, 0.2), (0.9, 0.5)), 2, 1000, "buffer"),
        ("tree", 10, 1000, "buffer"),
        ("toeplitz", 999, 1000, "replay"),
    ],
    ids=str,
)
def test_memory_of_table_5(mechanism, kept, replayed, mode) -> None:
    if isinstance(mechanism, str):
        mechanism = catalogue.mechanism(mechanism, Participation(rounds=1000))
    assert mechanism.num_buffers(1000) == kept
    assert mechanism.inverse_bandwidth(1000) == replayed
    assert noise_mode(mechanism, 1000) == mode


def test_no_noise_after_the_last_round() -> None:
    _, state = correlate(SOME[0], 1, np.zeros(2), State())
    with pytest.raises(ValueError, match="1 rounds"):
        correlate(SOME[0], 1, np.zeros(2), state)


@pytest.mark.parametrize("mechanism", SOME, ids=str)
def test_single_precision_errs_by_less_than_four_millionths_however_many_rounds(mechanism) -> None:
    """C·(what single precision changes) beside C·(C⁻¹Z) = Z, in standard deviations of Z; early and late."""
    n, z = 1000, np.random.default_rng(3).standard_normal((1000, 100)).astype(np.float32)
    single, double = np.stack(stream(mechanism, n, z)), np.stack(stream(mechanism, n, z.astype(float)))
    assert single.dtype == np.float32
    changed = matrix(mechanism, n) @ (single - double)
    assert 0 < np.abs(changed).max() < 4e-6
    assert np.sqrt((changed[-100:] ** 2).mean()) < 2 * np.sqrt((changed[:100] ** 2).mean()) + 1e-8


@pytest.mark.parametrize("mechanism", SOME, ids=str)
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


@pytest.mark.parametrize(
    ("mechanism", "n"), [*((each, N) for each in MECHANISMS), (SquareRootToeplitz(), 45), (BSR(3), 45)], ids=str
)
def test_products_with_the_transposed_inverse_are_those_of_the_matrix(mechanism, n: int) -> None:
    """By few terms of C⁻¹, by few of C, and by a transform."""
    v = np.random.default_rng(0).normal(size=(n, 2))
    before = v.copy()
    expected = np.linalg.inv(matrix(mechanism, n)).T @ v
    np.testing.assert_allclose(transposed_inverse(mechanism, n, v), expected, atol=1e-9)
    np.testing.assert_array_equal(v, before)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_buffers_are_made_anew_from_the_rounds_before(mechanism) -> None:
    z = np.random.default_rng(0).normal(size=(N, 2))
    dense = np.linalg.inv(matrix(mechanism, N)) @ z
    state = state_before(mechanism, N, N - 1, lambda t: z[t])
    np.testing.assert_allclose(correlate(mechanism, N, z[-1], state)[0], dense[-1], atol=1e-10)
