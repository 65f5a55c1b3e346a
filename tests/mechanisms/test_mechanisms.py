"""Every mechanism is the matrix of its paper, has the inverse that its noise uses, and survives being written down."""

import json
import math

import numpy as np
import oracles_mechanisms as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mechanism_table import DENSE, MECHANISMS, TABLE, N

from fedcgd.mechanisms import (
    BIFR,
    BISR,
    BLT,
    BSR,
    BandedToeplitz,
    BandInvMF,
    BinaryTree,
    Dense,
    LambdaCGD,
    LambdaMuCGD,
    Mechanism,
    Normalized,
    NuDPFTRL,
    SquareRootToeplitz,
    inverse_matrix,
    matrix,
)
from fedcgd.mechanisms import toeplitz as series
from fedcgd.optimisation import catalogue
from fedcgd.optimisation.catalogue import MechanismSpec, spelling_of
from fedcgd.optimisation.mechanism_json import describe, from_description
from fedcgd.participation import Participation


@pytest.mark.parametrize(("mechanism", "expected"), TABLE, ids=lambda v: str(v) if isinstance(v, Mechanism) else "")
def test_is_the_matrix_of_its_definition(mechanism, expected) -> None:
    np.testing.assert_allclose(matrix(mechanism, N), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_the_noise_uses_the_inverse_of_the_matrix_that_is_accounted(mechanism) -> None:
    for n in (N,) if isinstance(mechanism, Dense) else (1, 2, N):
        np.testing.assert_allclose(matrix(mechanism, n) @ inverse_matrix(mechanism, n), np.eye(n), atol=1e-12)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_columns_can_be_had_alone_and_the_band_is_true(mechanism) -> None:
    c = matrix(mechanism, N)
    np.testing.assert_array_equal(mechanism.columns(N, np.array([5, 0, 12])), c[:, [5, 0, 12]])
    assert np.all(np.triu(c, 1) == 0)
    assert np.all(np.diag(c) > 0)
    p = mechanism.bandwidth(N)
    assert np.all(np.tril(c, -p) == 0)
    if p < N:
        assert np.any(np.diag(c, 1 - p))


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13, 31, 33])
def test_the_tree_has_the_gram_matrix_of_tree_aggregation(n) -> None:
    c, t = matrix(BinaryTree(), n), oracle.tree(n)
    np.testing.assert_allclose(c.T @ c, t.T @ t, atol=1e-12)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_a_description_makes_the_same_mechanism(mechanism) -> None:
    again = from_description(json.loads(json.dumps(describe(mechanism))))
    assert again == mechanism
    assert hash(again) == hash(mechanism)
    np.testing.assert_array_equal(matrix(again, N), matrix(mechanism, N))


def test_explicit_matrices_are_equal_by_value_and_cannot_be_changed() -> None:
    one, two = Dense("dense", DENSE), Dense("dense", DENSE * 2)
    assert one != two
    assert one != Dense("band-mf", DENSE)
    with pytest.raises(ValueError, match="read-only"):
        one.band[0, 0] = 3
    with pytest.raises(ValueError, match="13 rounds"):
        matrix(one, 12)


def test_series_inverse_by_newton_is_that_of_the_recurrence(monkeypatch) -> None:
    expected = BISR(50).coefficients(3000), BSR(700).inverse_coefficients(3000)
    monkeypatch.setattr(series, "_DIRECT", 0)
    found = BISR(50).coefficients(3000), BSR(700).inverse_coefficients(3000)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


def test_blt_inverse_is_accurate_for_decays_near_one() -> None:
    mechanism = BLT((0.001, 0.005, 0.02, 0.1, 0.3), (0.99999, 0.9995, 0.99, 0.9, 0.4))
    n = 20_000
    product = np.convolve(mechanism.coefficients(n), mechanism.inverse_coefficients(n))[:n]
    product[0] -= 1
    assert np.abs(product).max() < 1e-12


RUN = Participation(rounds=40, min_separation=10)
SPELLED = [
    ("tree", BinaryTree()),
    ("bsr:4", BSR(4)),
    ("nu-dp-ftrl:0.01", NuDPFTRL(0.01)),
    ("toeplitz:normalized", Normalized(SquareRootToeplitz())),
    ("lambda-cgd:0.9:normalized", Normalized(LambdaCGD(0.9))),
    ("bifr:3:0.7:normalized", Normalized(BIFR(3, 0.7))),
    ("lambda-mu:0.8:-0.3", LambdaMuCGD(0.8, -0.3)),
]


@pytest.mark.parametrize(("text", "expected"), SPELLED, ids=str)
def test_a_mechanism_has_one_spelling(text: str, expected: Mechanism) -> None:
    made = catalogue.mechanism(text, RUN)
    assert made == expected
    assert made.name == text.partition(":")[0]
    assert str(MechanismSpec.parse(text)) == text == spelling_of(made)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("sgd", "mean dp-sgd"),
        ("", "unknown"),
        ("LAMBDA-CGD:0.9", "mean lambda-cgd:0.9"),
        ("lambda_cgd:0.9:normalized", "mean lambda-cgd:0.9:normalized"),
        ("lambda-cgd", "needs λ"),
        ("dp-sgd:0.5", "dp-sgd:normalized"),
        ("bisr:4:5", "bisr:p:normalized"),
        ("bisr:normalized:4", "bisr:p"),
        ("bifr::0.7", "write bifr:p:γ"),
        ("bifr:normalized", "needs p, .* and γ"),
        ("lambda-mu:0.8:x", "^μ of lambda-mu"),
        ("bisr:2.5", "^p of bisr"),
        ("lambda-cgd:1", "^lam .*1.0"),
        ("bisr:0", "^bandwidth .*0"),
        ("tree:normalized", "tree cannot"),
    ],
)
def test_what_is_misspelled_is_refused(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        catalogue.mechanism(text, RUN)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: BandedToeplitz(()), "^coefficients"),
        (lambda: BandedToeplitz((0.0, 1.0)), "^coefficients"),
        (lambda: BandInvMF((1.0, math.inf)), "^inverse"),
        (lambda: BLT((0.1, 0.2), (0.5,)), "as many decays"),
        (lambda: BLT((0.1,), (1.0,)), r"decays in \[0, 1\)"),
        (lambda: BLT((-0.1,), (0.5,)), "^scales"),
        (lambda: Dense("dense", -np.eye(3)), "positive diagonal"),
        (lambda: Dense("dense", np.ones((3, 3))), "outside the matrix"),
        (lambda: Dense("dense", np.ones((3, 4))), r"shape \(rounds, p\)"),
        (lambda: BandInvMF((0.0, 1.0)), "inverse coefficients"),
        (lambda: BISR(1.5), "bandwidth"),
        (lambda: BIFR(0, 0.5), "bandwidth"),
        (lambda: BIFR(3, 0.0), "gamma"),
        (lambda: BIFR(3, 1.01), "gamma"),
        (lambda: BIFR(3, math.nan), "gamma"),
        (lambda: LambdaMuCGD(1.0, 0.0), "lam"),
        (lambda: LambdaMuCGD(-0.1, 0.5), "lam"),
        (lambda: LambdaMuCGD(0.2, -0.3), "mu"),
        (lambda: LambdaMuCGD(0.2, 1.0), "mu"),
        (lambda: LambdaMuCGD(0.2, math.nan), "mu"),
        (lambda: LambdaCGD(math.nan), "lam"),
        (lambda: NuDPFTRL(-0.1), "nu"),
        (lambda: NuDPFTRL(1.0), "nu"),
        (lambda: from_description({"name": "nothing"}), "unknown mechanism"),
    ],
)
def test_values_that_make_no_mechanism_are_refused(make_it, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_it()


def test_noise_that_is_never_forgotten_is_that_of_the_square_root() -> None:
    np.testing.assert_array_equal(matrix(NuDPFTRL(0.0), 9), matrix(SquareRootToeplitz(), 9))


@pytest.mark.parametrize(
    "make_it", [lambda: BandedToeplitz([1.0, 0.5]), lambda: BLT([0.1], (0.5,)), lambda: BLT((0.1,), np.array([0.5]))]
)
def test_numbers_that_could_be_changed_later_are_refused(make_it) -> None:
    with pytest.raises(TypeError, match="a tuple"):
        make_it()


@given(st.floats(0, 0.999), st.floats(-1, 0.999), st.integers(2, 60))
@settings(derandomize=True, max_examples=300, deadline=None)
def test_lambda_mu_is_never_negative_and_rises_only_where_it_is_said_to(lam: float, mu: float, n: int) -> None:
    mu = max(mu, -lam)
    c = LambdaMuCGD(lam, mu).coefficients(n)
    assert c.min() >= 0
    if mu >= 0:
        monotone, falls = lam + mu <= 1, bool(c[1] <= 1)
        assert falls == monotone
        assert not monotone or np.all(np.diff(c) <= 1e-15)
        # Log-concave, up to rounding: what puts the worst columns leftmost where c rises.
        assert np.all(c[1:-1] ** 2 >= c[:-2] * c[2:] * (1 - 1e-12))
    elif mu**2 * (1 - mu) <= lam**2 * (1 - lam):
        assert np.all(np.diff(c) <= 1e-15)
    elif n > 2 and mu**2 * (1 - mu) > lam**2 * (1 - lam) + 1e-12:
        assert c[2] > c[1]
