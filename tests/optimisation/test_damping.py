"""Damped mechanisms: D·C·D⁻¹ with D = diag(ρ^t), of the same kind, with everything that follows from C anew."""

import numpy as np
import pytest

from fedcgd.mechanisms import BLT, BandedToeplitz, BandInvMF, LambdaCGD, Normalized, inverse_matrix, matrix
from fedcgd.optimisation.damping import damped, damping

N = 12
MADE = [BLT((0.4, 0.1), (0.95, 0.6)), BandInvMF((1.0, -0.8, -0.1)), BandedToeplitz((1.0, 0.7, 0.5, 0.4))]


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.85, 1.0])
@pytest.mark.parametrize("mechanism", MADE, ids=lambda m: m.name)
def test_both_c_and_its_inverse_are_damped_and_stay_of_their_kind(mechanism, rho: float) -> None:
    found = damped(mechanism, rho)
    assert type(found) is type(mechanism)
    lags = np.subtract.outer(np.arange(N), np.arange(N))
    factor = np.where(lags >= 0, rho ** np.maximum(lags, 0), 0.0)
    np.testing.assert_allclose(matrix(found, N), matrix(mechanism, N) * factor, atol=1e-14)
    np.testing.assert_allclose(inverse_matrix(found, N), inverse_matrix(mechanism, N) * factor, atol=1e-12)
    assert found.num_buffers(N) == mechanism.num_buffers(N)
    assert damped(Normalized(mechanism), rho) == Normalized(found)
    if rho == 1:
        assert found == mechanism


def test_rho_can_be_read_from_both() -> None:
    for mechanism in MADE:
        for one in (mechanism, Normalized(mechanism)):
            assert damping(damped(one, 0.7), one) == pytest.approx(0.7, rel=1e-14)
            assert damping(one, one) == 1.0
    assert damping(MADE[0], MADE[1]) == 1.0
    assert damping(LambdaCGD(0.5), LambdaCGD(0.9)) == 1.0
    alone = BandInvMF((1.0,))
    assert damping(damped(alone, 0.5), alone) == 1.0


def test_other_mechanisms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^lambda-cgd cannot"):
        damped(LambdaCGD(0.5), 0.5)
