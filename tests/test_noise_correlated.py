"""Adding Σ w_j·Z_j in place: right numbers, any chunking and threads, right correlation between rounds."""

import tracemalloc

import numpy as np
import pytest
import torch
from scipy import stats

from fedcgd.mechanisms import LambdaCGD
from fedcgd.noise import NoiseStream, add_correlated, for_each_chunk

STREAM = NoiseStream(bytes(range(32)))
TILE = 2 * 262144
TERMS = [(5, 1, 1.0), (4, 0, -0.9), (2, 0, 0.25)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("start", "size"), [(0, 1000), (131_002, 100), (393_217, 77), (TILE - 7, 600_000), (131_072, 131_072)]
)
def test_adds_the_weighted_sum(dtype, start, size):
    x = np.linspace(-1, 1, size, dtype=dtype)
    before = x.astype(np.float64)
    add_correlated(x, STREAM, TERMS, 1.5, start=start)
    z = [np.float64(STREAM.normal(r, a, start, start + size)) for r, a, _ in TERMS]
    expected = before + 1.5 * sum(w * row for (_, _, w), row in zip(TERMS, z, strict=True))
    np.testing.assert_allclose(x, expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_of_any_shape_get_what_arrays_get(dtype):
    tensor = torch.zeros(30, 7, 11, dtype=dtype)
    add_correlated(tensor, STREAM, TERMS, 2.0)
    array = np.zeros(30 * 7 * 11, np.float32 if dtype == torch.float32 else np.float64)
    add_correlated(array, STREAM, TERMS, 2.0)
    np.testing.assert_array_equal(tensor.numpy().ravel(), array)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_threads_and_splits_do_not_change_a_bit(dtype):
    size = 3 * TILE + 12345
    whole = np.zeros(size, dtype)
    add_correlated(whole, STREAM, TERMS, 0.5, threads=1)
    for threads in (2, 3, 7):
        again = np.zeros(size, dtype)
        add_correlated(again, STREAM, TERMS, 0.5, threads=threads)
        np.testing.assert_array_equal(again, whole)
    parts = np.zeros(size, dtype)
    for start in range(0, size, 301_001):
        add_correlated(parts[start : start + 301_001], STREAM, TERMS, 0.5, start=start, threads=2)
    np.testing.assert_array_equal(parts, whole)


def test_float64_noise_is_the_exact_product_that_float32_rounds():
    wide = np.zeros(5000)
    add_correlated(wide, STREAM, [(8, 0, 1.0)], 1.0)
    np.testing.assert_array_equal(wide.astype(np.float32), STREAM.normal(8, 0, 0, 5000))
    assert np.mean(wide == wide.astype(np.float32)) < 0.01


def test_noise_chunks_cover_each_coordinate_once():
    seen = np.zeros(TILE + 500, np.int64)

    def consume(begin, noise):
        seen[begin - 77 : begin - 77 + len(noise)] += 1

    for_each_chunk(consume, STREAM, TERMS, 1.0, 77, 77 + len(seen), dtype=np.dtype(np.float32), threads=3)
    assert (seen == 1).all()


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9])
def test_rounds_are_correlated_as_the_mechanism_says(lam):
    size, rounds = 200_000, 4
    mechanism = LambdaCGD(lam)
    noise = np.zeros((rounds, size))
    for t in range(rounds):
        weights = mechanism.inverse_row(t, rounds)
        add_correlated(noise[t], STREAM, [(t - i, 0, float(w)) for i, w in enumerate(weights)], 3.0)
    scale = 3.0 * np.sqrt(1 + lam**2)
    assert noise[1:].std() == pytest.approx(scale, rel=4 / np.sqrt(2 * 3 * size))
    correlation = np.corrcoef(noise[1:])
    assert correlation[0, 1] == pytest.approx(-lam / (1 + lam**2), abs=4 / np.sqrt(size))
    assert correlation[1, 2] == pytest.approx(-lam / (1 + lam**2), abs=4 / np.sqrt(size))
    assert correlation[0, 2] == pytest.approx(0, abs=4 / np.sqrt(size))
    assert stats.kstest(noise[3] / scale, "norm", method="asymp").pvalue > 1e-3
    assert stats.kstest(noise[3] / scale * 1.03, "norm", method="asymp").pvalue < 1e-6, "does not see a wrong scale"


def test_the_replayed_noise_cancels():
    first, both = np.zeros(10_000), np.zeros(10_000)
    add_correlated(first, STREAM, [(0, 0, 1.0)], 2.0)
    for terms in ([(0, 0, 1.0)], [(1, 0, 1.0), (0, 0, -1.0)]):
        add_correlated(both, STREAM, terms, 2.0)
    np.testing.assert_allclose(both, 2.0 * np.float64(STREAM.normal(1, 0, 0, 10_000)), rtol=0, atol=2e-6)


def test_no_noise_and_no_coordinates_leave_x_alone():
    x = np.ones(10, np.float32)
    add_correlated(x, STREAM, [], 1.0)
    add_correlated(x, STREAM, TERMS, 0.0)
    add_correlated(x[:0], STREAM, TERMS, 1.0)
    np.testing.assert_array_equal(x, np.ones(10, np.float32))


def test_extra_memory_is_at_most_16_mib_with_two_threads():
    x = np.zeros(6 * TILE, np.float32)
    add_correlated(x[:10], STREAM, TERMS, 1.0)
    tracemalloc.start()
    try:
        add_correlated(x, STREAM, TERMS, 1.0, threads=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 1 < peak / 2**20 < 16


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(4, np.float16), "float32 or float64, got float16"),
        (np.zeros(4, np.int64), "float32 or float64"),
        (np.zeros((4, 4), np.float32).T[1:], "contiguous"),
        (torch.zeros(4, dtype=torch.bfloat16), "float32 or float64"),
        (torch.zeros(4, 4).T, "contiguous"),
    ],
)
def test_other_arrays_are_refused(x, message):
    with pytest.raises(ValueError, match=message):
        add_correlated(x, STREAM, TERMS, 1.0)


def test_a_read_only_array_is_refused():
    x = np.zeros(4, np.float32)
    x.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        add_correlated(x, STREAM, TERMS, 1.0)


@pytest.mark.parametrize(
    ("terms", "stddev", "options", "message"),
    [
        ([(0, 0, 1.0)], -1.0, {}, "stddev must be finite"),
        ([(0, 0, 1.0)], float("nan"), {}, "stddev must be finite"),
        ([(0, 0, float("inf"))], 1.0, {}, "must be finite"),
        ([(0, 0, float("nan"))], 1.0, {}, "must be finite"),
        ([(0, 0, 1e38)], 1.0, {}, "must be finite"),
        ([(-1, 0, 1.0)], 1.0, {}, "round must be"),
        ([(0, 2**32, 1.0)], 1.0, {}, "attempt must be"),
        ([(0, 0, 1.0)], 1.0, {"start": -1}, "coordinates"),
        ([(0, 0, 1.0)], 1.0, {"start": 2**40}, "coordinates"),
        ([(0, 0, 1.0)], 1.0, {"threads": 0}, "threads must be"),
    ],
)
def test_bad_arguments_are_refused_before_x_changes(terms, stddev, options, message):
    x = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=message):
        add_correlated(x, STREAM, terms, stddev, **options)
    assert not x.any()
