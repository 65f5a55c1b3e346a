"""A privacy loss distribution that dominates a run of which only some pairs (ε, δ) are known."""

import numpy as np
from dp_accounting.pld.pld_pmf import PLDPmf, create_pmf_pessimistic_connect_dots
from numpy.typing import NDArray

from fedcgd.mechanisms.mechanism import Vector


def pmf_of_profile(multiples: NDArray[np.int_], deltas: Vector, step: float) -> PLDPmf:
    """The distribution for a run that is (ε, δ)-private, adding and removing, for ε = `multiples`·`step` ≥ 0 in ascending order.

    H(γ) = sup P(S) − γ·Q(S) is convex in γ; δ at ε bounds it at γ = e^ε, and at γ = e^(−ε), where it is 1 − γ + γ·δ of the other
    direction. So it lies below the lower convex hull of these points, and that is the H of a distribution whose losses are the
    ε of the corners (Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, "Connect the Dots: Tighter Discrete Approximations of
    Privacy Loss Distributions", 2022, arXiv:2207.04380).
    """
    positive = multiples > 0
    all_multiples = np.concatenate([-multiples[positive][::-1], multiples])
    below = (-np.expm1(-multiples * step) + np.exp(-multiples * step) * deltas)[positive][::-1]
    values = np.minimum(np.concatenate([below, deltas]), 1.0)
    corners: list[int] = []
    gammas = np.exp(all_multiples * step)
    for i in range(len(values)):
        while len(corners) > 1 and _is_above(corners[-2], corners[-1], i, gammas, values):
            corners.pop()
        corners.append(i)
    return create_pmf_pessimistic_connect_dots(step, all_multiples[corners], values[corners])


def _is_above(a: int, b: int, c: int, gammas: Vector, values: Vector) -> bool:
    """Whether point b is on or above the line from a to c."""
    part = (gammas[b] - gammas[a]) / (gammas[c] - gammas[a])
    return bool(values[b] >= values[a] + part * (values[c] - values[a]))
