"""Sensitivities against all patterns and signs, for every mechanism and many (n, k, b)."""

import math

import numpy as np
import oracles_mechanisms as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mechanism_table import ONE_OF_EACH

from fedcgd.mechanisms import BIFR, BSR, BandedToeplitz, BandInvMF, Dense, LambdaCGD, LambdaMuCGD, Normalized, matrix
from fedcgd.mechanisms.mechanism import DENSE_LIMIT
from fedcgd.mechanisms.sensitivity import _gram, sensitivity
from fedcgd.mechanisms.worst_patterns import best_separated, gram_bound, lag_bound, normalized_bound
from fedcgd.participation import Participation

ROOT, TREE = ONE_OF_EACH["toeplitz"], ONE_OF_EACH["tree"]
MONOTONE = [
    *(ONE_OF_EACH[name] for name in ("dp-sgd", "lambda-cgd", "lambda-mu", "nu-dp-ftrl", "bifr", "bisr", "bsr", "blt")),
    ROOT,
    LambdaCGD(0.4),
    BIFR(3, 0.2),
    BIFR(5, 1.0),
    LambdaMuCGD(0.6, 0.3),
    LambdaMuCGD(0.9, 0.7),  # rises at first
]
LOG_CONVEX = [
    *(Normalized(ONE_OF_EACH[name]) for name in ("lambda-cgd", "toeplitz", "nu-dp-ftrl", "blt")),
    *(Normalized(LambdaCGD(lam)) for lam in (0.0, 0.3, 0.99)),
]
"""Of their unit columns the leftmost are the worst."""

OTHERS = [
    *(ONE_OF_EACH[name] for name in ("banded-toeplitz", "band-inv-mf", "diagonal", "tree")),
    BandedToeplitz((1.0, 0.2, 0.6)),
    BandInvMF((1.0, 0.6)),
    BandInvMF((1.0, -0.2, -0.9)),
    LambdaMuCGD(0.5, -0.5),
    LambdaMuCGD(0.7, -0.6),
    *(Normalized(ONE_OF_EACH[name]) for name in ("bsr", "bisr", "bifr", "lambda-mu", "banded-toeplitz")),
    Normalized(BSR(6)),
    Normalized(LambdaMuCGD(0.9, 0.7)),
]
SETTINGS = [(7, 1, 1), (7, 7, 1), (7, 2, 1), (8, 2, 4), (8, 3, 3), (8, 4, 2), (9, 3, 2), (9, 2, 5), (10, 2, 3)]


def plan(n, k, b):
    return Participation(rounds=n, min_separation=b, max_participations=k)


@pytest.mark.parametrize("n_k_b", SETTINGS, ids=str)
@pytest.mark.parametrize("mechanism", MONOTONE + LOG_CONVEX + OTHERS, ids=str)
def test_against_all_patterns_and_signs(mechanism, n_k_b) -> None:
    n, k, b = n_k_b
    c = matrix(mechanism, n)
    for released in (n, n - 1, n - 3, 1):
        found = sensitivity(mechanism, plan(n, k, b), released=released)
        truth = oracle.sensitivity(c, k, b, released)
        assert found.value >= truth * (1 - 1e-12)
        if found.exact:
            assert found.value == pytest.approx(truth, rel=1e-8)
        assert found.exact or mechanism in OTHERS
        assert len(found.pattern) <= k
        assert all(np.diff(found.pattern) >= b)
        assert max(found.pattern) < released
        assert found.value <= 1.5 * truth  # a bound that is no use would pass all else


@given(st.integers(0, 2**32 - 1), st.integers(2, 9), st.integers(1, 4), st.integers(1, 4))
@settings(derandomize=True, max_examples=150, deadline=None)
def test_the_bound_for_unit_columns_is_one_for_any_coefficients(seed, n, k, b) -> None:
    b = min(b, n)
    generator = np.random.default_rng(seed)
    c = generator.standard_normal(n) if seed % 2 else np.sort(generator.random(n) ** 3)[::-1].copy()
    c[0] = abs(c[0]) + 0.1
    norms = np.sqrt(np.cumsum(c**2))[::-1]
    for rows in (n, int(generator.integers(1, n + 1))):
        most = min(k, -(-rows // b))
        gram = oracle.normalized(oracle.toeplitz(c, n))[:rows]
        gram = np.abs(gram.T @ gram)
        truth = max(gram[np.ix_(pattern, pattern)].sum() for pattern in oracle.patterns(rows, most, b))
        assert normalized_bound(c, norms, rows, most, b) >= truth * (1 - 1e-12)


@pytest.mark.parametrize("mechanism", [ROOT, ONE_OF_EACH["bisr"], LambdaCGD(0.9999)], ids=str)
def test_unit_columns_of_a_full_matrix_go_on_beyond_dense_sizes(mechanism) -> None:
    n = 2 * DENSE_LIMIT
    for released, k in ((n, 8), (n - 5, 8), (10_000, 8), (n, 3), (n, 1)):
        found = sensitivity(Normalized(mechanism), plan(n, k, n // 8), released=released)
        columns = Normalized(mechanism).columns(n, np.array(found.pattern))[:released]
        assert found.exact
        assert found.value == pytest.approx(np.linalg.norm(columns.sum(axis=1)), rel=1e-8)


def test_vectors_of_any_direction_do_not_exceed_the_bound() -> None:
    # With negative Gram entries the users' vectors need not be parallel: three columns at 120° and so on.
    generator = np.random.default_rng(3)
    mechanism = BandInvMF((1.0, -0.2, -0.9))
    c = matrix(mechanism, 8)
    bound = sensitivity(mechanism, plan(8, 4, 2)).value
    for _ in range(300):
        u = generator.standard_normal((4, 3))
        u /= np.linalg.norm(u, axis=1, keepdims=True)
        assert np.linalg.norm(c[:, [0, 2, 4, 6]] @ u) <= bound


@given(st.integers(0, 2**32 - 1), st.integers(2, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
@settings(derandomize=True, max_examples=150, deadline=None)
def test_bands_that_overlap_are_bounded_and_others_exact(seed, n, p, k, b) -> None:
    b, p = min(b, n), min(p, n)
    k = min(k, -(-n // b))
    generator = np.random.default_rng(seed)
    band = generator.random((n, p)) ** 3
    band[:, 0] += 0.1
    band *= np.arange(n)[:, None] + np.arange(p) < n
    mechanism = Dense("band-mf", band)
    released = int(generator.integers(1, n + 1))
    for rows in (n, released):
        found = sensitivity(mechanism, plan(n, k, b), released=rows)
        truth = oracle.sensitivity(matrix(mechanism, n), k, b, rows)
        assert truth * (1 - 1e-12) <= found.value <= truth * (1 + 1e-9 if found.exact else 1.3)
        assert found.exact or p > b


@given(st.integers(0, 2**32 - 1), st.integers(2, 9), st.integers(1, 4), st.integers(1, 4))
@settings(derandomize=True, max_examples=100, deadline=None)
def test_bounds_for_any_series_and_any_matrix(seed, n, k, b) -> None:
    b = min(b, n)
    k = min(k, -(-n // b))
    generator = np.random.default_rng(seed)
    series = generator.standard_normal(n)
    truth = oracle.sensitivity(oracle.toeplitz(series, n), k, b)
    assert math.sqrt(lag_bound(series, k, b)) >= truth
    c = np.tril(generator.standard_normal((n, n)))
    total, pattern = gram_bound(np.abs(c.T @ c), k, b)
    assert math.sqrt(total) >= oracle.sensitivity(c, k, b) * (1 - 1e-12)
    assert len(pattern) <= k
    assert all(np.diff(pattern) >= b)
    values = generator.random(n)
    found, pattern = best_separated(values, k, b)
    assert found == pytest.approx(max(values[list(p)].sum() for p in oracle.patterns(n, k, b)))
    assert found == pytest.approx(values[list(pattern)].sum())


def test_nothing_released_needs_no_noise() -> None:
    assert sensitivity(TREE, plan(8, 2, 4), released=0).value == 0
    with pytest.raises(ValueError, match=r"^released .*9"):
        sensitivity(TREE, plan(8, 2, 4), released=9)


def test_too_large_for_a_gram_matrix_says_what_to_do() -> None:
    """What is Toeplitz needs none."""
    n = DENSE_LIMIT + 1
    for mechanism in (LambdaCGD(0.99), ROOT, BandInvMF((1.0, -0.6, 0.1, -0.3))):
        found = sensitivity(mechanism, plan(10**6, 10, 10**5))
        assert ("Theorem 1" in found.method) == (type(mechanism) is not BandInvMF)
    with pytest.raises(ValueError, match="8192 rounds"):
        sensitivity(TREE, plan(n, 2, 2))


def test_the_gram_matrix_in_blocks_is_the_product() -> None:
    c = np.tril(np.random.default_rng(0).normal(size=(1100, 1100)))  # of three blocks, the last of them short
    np.testing.assert_allclose(_gram(c), c.T @ c, rtol=1e-10, atol=1e-10)
