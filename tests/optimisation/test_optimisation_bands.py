"""How many bands, with noise multipliers from another library's accounting."""

import numpy as np
import pytest

from fedcgd import BISR, BSR, DPSGD, Mechanism, error_norms
from fedcgd.mechanisms.workload import Workload
from fedcgd.optimisation.bands import BandChoice, best_bandwidth, power_bandwidths

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


def choice(epochs: int, epsilon: float) -> BandChoice:
    def candidate(p: int) -> tuple[Mechanism, float]:
        norm = float(np.linalg.norm(BSR(p).coefficients(p)))  # the sensitivity of bands that do not overlap
        return BSR(p), norm * SIGMAS[epochs, epsilon][p.bit_length() - 1]

    return best_bandwidth(candidate, power_bandwidths(ROUNDS, epochs), rounds=ROUNDS)


def test_more_budget_wants_more_bands_and_more_epochs_want_fewer() -> None:
    # arXiv:2405.15913, Figure 3b: roughly linear in ε and in 1/k.
    by_epsilon = [choice(8, epsilon).bandwidth for epsilon in (0.5, 2.0, 8.0)]
    by_epochs = [choice(epochs, 2.0).bandwidth for epochs in (2, 8, 32)]
    assert by_epsilon == sorted(by_epsilon)
    assert by_epochs == sorted(by_epochs, reverse=True)
    assert by_epsilon[0] < by_epsilon[-1]
    assert by_epochs[-1] < by_epochs[0]


def test_the_choice_is_the_least_error_of_all() -> None:
    found = choice(8, 2.0)
    errors = dict(found.errors)
    assert list(errors) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert errors[found.bandwidth] == min(errors.values())
    assert found.mechanism == BSR(found.bandwidth)
    norms = error_norms(found.mechanism, ROUNDS)
    assert norms.rmse(found.noise_multiplier) == errors[found.bandwidth]


def test_the_error_that_is_asked_for_decides() -> None:
    # σ grows so fast with p that the last band pays for the RMSE and not for the largest error, or the other way round.
    for error, workload in (("rmse", Workload(0.9)), ("max-se", Workload(0.0))):
        found = best_bandwidth(lambda p: (BISR(p), 1 + p / 7), (3, 1, 2, 2), rounds=50, error=error, workload=workload)
        for p, value in found.errors:
            norms = error_norms(BISR(p), 50, workload)
            assert value == (norms.rmse(1 + p / 7) if error == "rmse" else norms.max_se(1 + p / 7))
        assert [p for p, _ in found.errors] == [1, 2, 3]


def test_ties_go_to_the_fewest_bands() -> None:
    assert best_bandwidth(lambda p: (DPSGD(), 1.0), (4, 2, 8), rounds=10).bandwidth == 2


def test_nothing_to_try_is_refused() -> None:
    with pytest.raises(ValueError, match="no bandwidths"):
        best_bandwidth(lambda p: (DPSGD(), 1.0), (), rounds=10)
    assert power_bandwidths(10, 10) == (1,)
    assert power_bandwidths(390, 1)[-2:] == (256, 390)
