"""More of what costs privacy never gives a smaller ε, for every sampling."""

from dataclasses import replace
from itertools import pairwise

import pytest

from fedcgd import BSR, DPSGD, BandInvMF, LambdaCGD, Normalized, Participation, compute_epsilon

# The tolerance is that of the search for ε, or of draws.
CASES = [
    (BandInvMF((1.0, 0.5)), Participation(rounds=24, min_separation=4), 1e-9),
    (Normalized(LambdaCGD(0.9)), Participation(rounds=24, min_separation=4), 1e-9),
    (DPSGD(), Participation(rounds=40, sampling="poisson", sampling_rate=0.05), 5e-3),
    (BSR(4), Participation(rounds=40, min_separation=4, sampling="cyclic-poisson", sampling_rate=0.2), 5e-3),
    pytest.param(
        DPSGD(),
        Participation(rounds=12, min_separation=4, sampling="balls-in-bins"),
        1e-2,
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("mechanism", "participation", "tolerance"), CASES)
def test_what_costs_more_is_never_said_to_cost_less(mechanism, participation, tolerance: float) -> None:
    def spent(run=participation, sigma: float = 2.0, delta: float = 1e-6, released: int | None = None) -> float:
        return compute_epsilon(mechanism, run, noise_multiplier=sigma, delta=delta, released=released).epsilon

    rounds, least = participation.rounds, spent()
    costlier = [
        spent(replace(participation, rounds=rounds + participation.min_separation)),
        spent(sigma=1.9),
        spent(delta=5e-7),
    ]
    if participation.sampling_rate:
        costlier.append(spent(replace(participation, sampling_rate=participation.sampling_rate * 1.1)))
    assert all(epsilon >= least * (1 - tolerance) for epsilon in costlier)
    so_far = [spent(released=released) for released in (1, rounds // 2, rounds // 2 + 1)] + [least]
    assert all(later >= earlier * (1 - tolerance) for earlier, later in pairwise(so_far))
