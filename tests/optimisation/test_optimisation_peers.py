"""Errors of optimised mechanisms against those of jax-privacy 2.0.0 (`jax_privacy.matrix_factorization`), as constants.

Each constant stands below the call that made it, in double precision: the root of the error (mean or largest over the rounds)
times the sensitivity. An optimum that is no worse is accepted, a better one up to where another optimiser may have stopped early.
"""

import numpy as np
import pytest

from fedcgd import Mechanism, Participation, error_norms, sensitivity
from fedcgd.mechanisms.workload import PREFIX_SUMS, Workload
from fedcgd.optimisation.banded import band_mf, dense
from fedcgd.optimisation.toeplitz import Objective, banded_toeplitz, blt


def once(rounds: int) -> Participation:
    return Participation(rounds=rounds, min_separation=rounds)


def error_of(
    mechanism: Mechanism, participation: Participation, error: Objective = "rmse", workload: Workload = PREFIX_SUMS
) -> float:
    norms, bound = error_norms(mechanism, participation.rounds, workload), sensitivity(mechanism, participation)
    assert bound.exact
    return norms.rmse(bound.value) if error == "rmse" else norms.max_se(bound.value)


def assert_as_good(found: float, peer: float, slack: float = 1e-6) -> None:
    assert peer * (1 - 1e-3) < found <= peer * (1 + slack)


# toeplitz.loss(toeplitz.optimize_banded_toeplitz(n, p), n) ** 0.5, and with jnp.max as reduction_fn and third argument
@pytest.mark.parametrize(
    ("rounds", "bands", "error", "peer"),
    [(1024, 16, "rmse", 6.342793360417921), (256, 4, "rmse", 5.978010859365355), (256, 4, "max-se", 8.276080840212831)],
)
def test_banded_toeplitz(rounds: int, bands: int, error: Objective, peer: float) -> None:
    found = banded_toeplitz(bands, once(rounds), error=error)
    assert_as_good(error_of(found, once(rounds), error), peer)


# A = streaming_matrix.momentum_sgd_matrix(0.9, jnp.linspace(1, 0.1, 64))
FALLING = Workload(momentum=0.9, learning_rates=tuple(np.linspace(1, 0.1, 64).tolist()))


# jnp.mean(banded.per_query_error(banded.optimize(n, bands=p, max_optimizer_steps=2000))) ** 0.5; both with A=A in the last
@pytest.mark.parametrize(
    ("rounds", "bands", "workload", "peer"),
    [
        (9, 3, PREFIX_SUMS, 1.6626907595211464),
        (64, 8, PREFIX_SUMS, 2.6205169694344734),
        (64, 8, FALLING, 12.321883066296731),
    ],
)
def test_band_mf(rounds: int, bands: int, workload: Workload, peer: float) -> None:
    found = band_mf(bands, once(rounds), workload=workload)
    assert_as_good(error_of(found, once(rounds), workload=workload), peer)


def test_dense() -> None:
    # C = dense.optimize(64); jnp.mean(dense.per_query_error(strategy_matrix=C)) ** 0.5 * jnp.linalg.norm(C, axis=0).max()
    assert_as_good(error_of(dense(once(64)), once(64)), 2.0998686732409073)
    # The same of dense.optimize(64, epochs=4, bands=16, equal_norm=True), whose sensitivity is 1
    many = Participation(rounds=64, min_separation=16)
    assert_as_good(error_of(dense(many), many), 4.58523596563172)


# blt = buffered_toeplitz.optimize(n=1000, error=e, min_sep=b, max_participations=k, min_buffers=d, max_buffers=d)
# c = blt.toeplitz_coefs(1000); q = toeplitz.per_query_error(strategy_coef=c, n=1000)
# (jnp.max(q) or jnp.mean(q)) ** 0.5 * toeplitz.minsep_sensitivity_squared(c, b, k) ** 0.5
@pytest.mark.parametrize(
    ("separation", "error", "degree", "peer"),
    [
        (1000, "max-se", 2, 3.321261737650111),
        (1000, "max-se", 3, 3.2699178059418226),
        (100, "max-se", 2, 14.952974918636038),
        (100, "max-se", 3, 14.884258152741555),
        (1000, "rmse", 2, 3.075844276751557),
        (100, "rmse", 2, 12.193851565550732),
    ],
)
def test_blt(separation: int, error: Objective, degree: int, peer: float) -> None:
    participation = Participation(rounds=1000, min_separation=separation)
    assert_as_good(error_of(blt(degree, participation, error=error), participation, error), peer)
