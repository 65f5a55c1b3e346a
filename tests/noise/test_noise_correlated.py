"""Σ w_j·Z_j: right numbers, any split, right correlation between rounds."""

from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from fedcgd.mechanisms import LambdaCGD
from fedcgd.noise import NoiseStream, correlated_noise

STREAM = NoiseStream(bytes(range(32)))
TILE = 1536
PART = 64 * TILE
TERMS = [(5, 1, 1.0), (4, 0, -0.9), (2, 0, 0.25)]


@pytest.mark.parametrize(("start", "size"), [(0, 1000), (1000, 100), (TILE - 7, 60_000), (PART - 1, 2), (5, 0)])
def test_the_weighted_sum(start, size):
    z = [np.float64(STREAM.normal(r, a, start, start + size)) for r, a, _ in TERMS]
    expected = 1.5 * sum(w * row for (_, _, w), row in zip(TERMS, z, strict=True))
    found = correlated_noise(STREAM, TERMS, 1.5, start, start + size)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6)


def test_many_terms_are_added_as_well_as_few():
    found = correlated_noise(STREAM, [(t, 0, 0.5) for t in range(200)], 2.0, 0, 10)
    np.testing.assert_allclose(found, sum(np.float64(STREAM.normal(t, 0, 0, 10)) for t in range(200)), atol=1e-5)


def test_splits_do_not_change_a_bit():
    size = 3 * PART + 12345
    whole = correlated_noise(STREAM, TERMS, 0.5, 0, size)
    ends = [*range(0, size, 101_001), size]
    parts = [correlated_noise(STREAM, TERMS, 0.5, *pair) for pair in pairwise(ends)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_float64_noise_is_the_exact_product_that_float32_rounds():
    wide = correlated_noise(STREAM, [(8, 0, 1.0)], 1.0, 0, 5000)
    np.testing.assert_array_equal(wide.astype(np.float32), STREAM.normal(8, 0, 0, 5000))
    assert np.mean(wide == wide.astype(np.float32)) < 0.01


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9])
def test_rounds_are_correlated_as_the_mechanism_says(lam):
    size, rounds = 200_000, 4
    mechanism = LambdaCGD(lam)
    rows = [mechanism.inverse_row(t, rounds) for t in range(rounds)]
    terms = [[(t - i, 0, float(w)) for i, w in enumerate(row)] for t, row in enumerate(rows)]
    noise = np.stack([correlated_noise(STREAM, row, 3.0, 0, size) for row in terms])
    scale = 3.0 * np.sqrt(1 + lam**2)
    assert noise[1:].std() == pytest.approx(scale, rel=4 / np.sqrt(2 * 3 * size))
    correlation = np.corrcoef(noise[1:])
    assert correlation[0, 1] == pytest.approx(-lam / (1 + lam**2), abs=4 / np.sqrt(size))
    assert correlation[1, 2] == pytest.approx(-lam / (1 + lam**2), abs=4 / np.sqrt(size))
    assert correlation[0, 2] == pytest.approx(0, abs=4 / np.sqrt(size))
    assert stats.kstest(noise[3] / scale, "norm", method="asymp").pvalue > 1e-3
    assert stats.kstest(noise[3] / scale * 1.03, "norm", method="asymp").pvalue < 1e-6, "does not see a wrong scale"


def test_the_replayed_noise_cancels():
    both = sum(correlated_noise(STREAM, t, 2.0, 0, 10_000) for t in ([(0, 0, 1.0)], [(1, 0, 1.0), (0, 0, -1.0)]))
    np.testing.assert_allclose(both, 2.0 * np.float64(STREAM.normal(1, 0, 0, 10_000)), rtol=0, atol=2e-6)


def test_no_terms_are_no_noise():
    np.testing.assert_array_equal(correlated_noise(STREAM, [], 1.0, 0, 10), np.zeros(10))
    np.testing.assert_array_equal(correlated_noise(STREAM, TERMS, 0.0, 0, 10), np.zeros(10))


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
        ([(0, 0, 1.0)], 1.0, {"stop": 2**40 + 1}, "coordinates"),
        ([(0, 0, 1.0)], 1.0, {"start": 5}, "coordinates"),
    ],
)
def test_bad_arguments_are_refused(terms, stddev, options, message):
    with pytest.raises(ValueError, match=message):
        correlated_noise(STREAM, terms, stddev, **{"start": 0, "stop": 4, **options})
