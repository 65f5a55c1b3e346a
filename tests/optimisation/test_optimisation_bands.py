"""How many bands, with noise multipliers from another library's accounting."""

import numpy as np
import pytest

from fedcgd import BSR, error_norms
from fedcgd.optimisation.bands import power_bandwidths, rule_of_thumb

ROUNDS = 1024


# (k, ε): σ for p = 1, 2, 4, … n/k bands, of Poisson sampling with q = p·k/n over n/p rounds, at δ = 1e-8. With dp-accounting 0.6:
# calibrate_dp_mechanism(rdp.RdpAccountant, lambda s: SelfComposedDpEvent(PoissonSampledDpEvent(p*k/n, GaussianDpEvent(s)), n//p),
#                        epsilon, 1e-8, ExplicitBracketInterval(0.3, 60), tol=1e-3)
SIGMAS = {
    (8, 0.5): (2.787, 3.875, 5.431, 7.639, 10.76, 15.14, 21.235, 29.559),
    (8, 2.0): (1.123, 1.333, 1.716, 2.305, 3.153, 4.341, 5.931, 7.912),
    (8, 8.0): (0.659, 0.735, 0.836, 0.984, 1.198, 1.499, 1.875, 2.215),
    (2, 2.0): (0.868, 0.93, 1.011, 1.126, 1.3, 1.586, 2.032, 2.648, 3.372, 3.957),
    (32, 2.0): (2.962, 4.124, 5.778, 8.112, 11.367, 15.823),
}


@pytest.mark.parametrize(("epochs", "epsilon"), SIGMAS)
def test_the_rule_of_thumb_costs_little(epochs: int, epsilon: float) -> None:
    errors = {}
    for p in power_bandwidths(ROUNDS, epochs):
        norm = float(np.linalg.norm(BSR(p).coefficients(p)))  # the sensitivity of bands that do not overlap
        errors[p] = error_norms(BSR(p), ROUNDS).rmse(norm * SIGMAS[epochs, epsilon][p.bit_length() - 1])
    guess = rule_of_thumb(epsilon, rounds=ROUNDS, epochs=epochs)
    near = min(errors, key=lambda p: abs(p - guess))
    assert errors[near] < 1.1 * min(errors.values())


@pytest.mark.parametrize(
    ("epsilon", "rounds", "epochs", "expected"),
    [(1, 4096, 8, 8), (2, 4096, 8, 16), (1, 4096, 64, 1), (8, 4096, 1, 512), (100, 4096, 1, 4096), (0.01, 4096, 8, 1)],
)
def test_rule_of_thumb(epsilon, rounds, epochs, expected) -> None:
    assert rule_of_thumb(epsilon, rounds=rounds, epochs=epochs) == expected


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rule_without_a_budget_is_refused(epsilon: float) -> None:
    with pytest.raises(ValueError, match=r"^epsilon"):
        rule_of_thumb(epsilon, rounds=100, epochs=2)


def test_numbers_of_bands_are_powers_of_two_and_the_rounds_of_an_epoch() -> None:
    assert power_bandwidths(10, 10) == (1,)
    assert power_bandwidths(390, 1)[-2:] == (256, 390)
