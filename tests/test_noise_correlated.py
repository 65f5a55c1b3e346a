"""Σ w_j·Z_j chunk by chunk: right numbers, any chunking and threads, right correlation between rounds."""

import tracemalloc

import numpy as np
import pytest
from scipy import stats

from fedcgd.mechanisms import LambdaCGD
from fedcgd.noise import NoiseStream, for_each_chunk

STREAM = NoiseStream(bytes(range(32)))
TILE = 2 * 262144
TERMS = [(5, 1, 1.0), (4, 0, -0.9), (2, 0, 0.25)]


def add_correlated(x, terms, stddev, *, start=0, threads=None):
    """x[i] += stddev·Σ_j w_j·Z_j[start + i], in place."""

    def add(begin, noise):
        x[begin - start : begin - start + len(noise)] += noise

    for_each_chunk(add, STREAM, terms, stddev, start, start + len(x), threads=threads)


@pytest.mark.parametrize(
    ("start", "size"), [(0, 1000), (131_002, 100), (393_217, 77), (TILE - 7, 600_000), (131_072, 131_072)]
)
def test_adds_the_weighted_sum(start, size):
    x = np.linspace(-1, 1, size)
    before = x.copy()
    add_correlated(x, TERMS, 1.5, start=start)
    z = [np.float64(STREAM.normal(r, a, start, start + size)) for r, a, _ in TERMS]
    expected = before + 1.5 * sum(w * row for (_, _, w), row in zip(TERMS, z, strict=True))
    np.testing.assert_allclose(x, expected, rtol=0, atol=4e-6)


def test_many_terms_are_added_as_well_as_few():
    x = np.zeros(10)
    add_correlated(x, [(t, 0, 0.5) for t in range(200)], 2.0)
    np.testing.assert_allclose(x, sum(np.float64(STREAM.normal(t, 0, 0, 10)) for t in range(200)), atol=1e-5)


def test_threads_and_splits_do_not_change_a_bit():
    size = 3 * TILE + 12345
    whole = np.zeros(size)
    add_correlated(whole, TERMS, 0.5, threads=1)
    for threads in (2, 3, 7):
        again = np.zeros(size)
        add_correlated(again, TERMS, 0.5, threads=threads)
        np.testing.assert_array_equal(again, whole)
    parts = np.zeros(size)
    for start in range(0, size, 301_001):
        add_correlated(parts[start : start + 301_001], TERMS, 0.5, start=start, threads=2)
    np.testing.assert_array_equal(parts, whole)


def test_float64_noise_is_the_exact_product_that_float32_rounds():
    wide = np.zeros(5000)
    add_correlated(wide, [(8, 0, 1.0)], 1.0)
    np.testing.assert_array_equal(wide.astype(np.float32), STREAM.normal(8, 0, 0, 5000))
    assert np.mean(wide == wide.astype(np.float32)) < 0.01


def test_noise_chunks_cover_each_coordinate_once():
    seen = np.zeros(TILE + 500, np.int64)

    def consume(begin, noise):
        seen[begin - 77 : begin - 77 + len(noise)] += 1

    for_each_chunk(consume, STREAM, TERMS, 1.0, 77, 77 + len(seen), threads=3)
    assert (seen == 1).all()


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9])
def test_rounds_are_correlated_as_the_mechanism_says(lam):
    size, rounds = 200_000, 4
    mechanism = LambdaCGD(lam)
    noise = np.zeros((rounds, size))
    for t in range(rounds):
        weights = mechanism.inverse_row(t, rounds)
        add_correlated(noise[t], [(t - i, 0, float(w)) for i, w in enumerate(weights)], 3.0)
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
    add_correlated(first, [(0, 0, 1.0)], 2.0)
    for terms in ([(0, 0, 1.0)], [(1, 0, 1.0), (0, 0, -1.0)]):
        add_correlated(both, terms, 2.0)
    np.testing.assert_allclose(both, 2.0 * np.float64(STREAM.normal(1, 0, 0, 10_000)), rtol=0, atol=2e-6)


def test_no_noise_and_no_coordinates_leave_x_alone():
    x = np.ones(10)
    add_correlated(x, [], 1.0)
    add_correlated(x, TERMS, 0.0)
    add_correlated(x[:0], TERMS, 1.0)
    np.testing.assert_array_equal(x, np.ones(10))


def test_extra_memory_is_at_most_24_mib_with_two_threads():
    x = np.zeros(6 * TILE)
    add_correlated(x[:10], TERMS, 1.0)
    tracemalloc.start()
    try:
        add_correlated(x, TERMS, 1.0, threads=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 1 < peak / 2**20 < 24


@pytest.mark.parametrize(
    ("terms", "stddev", "options", "message"),
    [
        ([(0, 0, 1.0)], -1.0, {}, "stddev must be finite"),
        ([(0, 0, 1.0)], float("nan"), {}, "stddev must be finite"),
        ([(0, 0, float("inf"))], 1.0, {}, "must be finite"),
        ([(0, 0, float("nan"))], 1.0, {}, "must be finite"),
        ([(0, 0, 1e38)], 1.0, {}, "must be finite"),
        ([(0, 0, -1e38)], 1.0, {}, "must be finite"),
        ([(0, 0, 1e20)], 1e20, {}, "must be finite"),
        ([(-1, 0, 1.0)], 1.0, {}, "round must be"),
        ([(0, 2**128, 1.0)], 1.0, {}, "nonce must be"),
        ([(0, 0, 1.0)], 1.0, {"start": -1}, "coordinates"),
        ([(0, 0, 1.0)], 1.0, {"start": 2**40}, "coordinates"),
        ([(0, 0, 1.0)], 1.0, {"threads": 0}, "threads must be"),
    ],
)
def test_bad_arguments_are_refused_before_x_changes(terms, stddev, options, message):
    x = np.zeros(4)
    with pytest.raises(ValueError, match=message):
        add_correlated(x, terms, stddev, **options)
    assert not x.any()
