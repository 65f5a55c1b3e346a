"""Errors and noise of mechanisms equal those recorded at commit 9ec9bba, before mechanisms answered for themselves."""

import numpy as np
import pytest

from fedcgd.mechanisms import (
    BISR,
    BLT,
    BSR,
    DPSGD,
    BandInvMF,
    BinaryTree,
    Diagonal,
    LambdaCGD,
    Normalized,
    NuDPFTRL,
)
from fedcgd.mechanisms.error import error_norms
from fedcgd.mechanisms.streaming import State, correlate
from fedcgd.mechanisms.workload import Workload

# For 60 rounds: both norms under a learning-rate schedule, the Frobenius norm with momentum, Σ|w| of the last row of C⁻¹, and the
# last (C⁻¹Z)_t for Z_t = sin(t + 1).
RECORDED = [
    (DPSGD(), (13.47915056670857, 2.207940216581962, 339.0167992106216, 1.0, -0.3048106211022167)),
    (LambdaCGD(0.9), (5.304891610579803, 1.0, 42.77849927241488, 1.9, -0.8778748275274407)),
    (Normalized(LambdaCGD(0.9)), (12.116402400569694, 2.294153634503402, 97.93573564453489, 1.9, -0.8778748275274407)),
    (Normalized(BISR(3)), (9.285417459524465, 1.3380889714325495, 163.51445327614897, 1.625, -0.7472887056823527)),
    (BSR(4), (8.138262237210112, 1.2181448712626124, 158.3761126855955, 2.1375037721377614, -0.7808936732236917)),
    (
        Normalized(BSR(4)),
        (9.92594869983226, 1.4764432622816064, 193.20931679290553, 2.1375037721377614, -0.7808936732236917),
    ),
    (
        BLT((0.2, 0.1), (0.9, 0.5)),
        (7.690434807768783, 1.073995788043938, 124.5865445181966, 1.6874999747589265, -0.6166939991998668),
    ),
    (BinaryTree(), (4.408765357962115, 0.7790129903405357, 51.12966583757929, 1.2783055365400366, -0.654341174403136)),
    (Diagonal(), (5.3194341896748725, 1.013135521341638, 134.83871092875304, 1.0, -0.3048106211022167)),
    (NuDPFTRL(0.01), (6.3581101519287415, 1.0, 73.06994759139893, 1.887207322774793, -0.7280081589791627)),
    (
        BandInvMF((1.0, -0.6, -0.1)),
        (6.890709324880856, 1.0, 108.26238259570124, 1.7000000000000002, -0.7861406901941531),
    ),
]


@pytest.mark.parametrize(("mechanism", "expected"), RECORDED, ids=str)
def test_errors_and_noise_are_those_recorded(mechanism, expected) -> None:
    state, noise = State(), 0.0
    for t in range(60):
        noise, state = correlate(mechanism, 60, np.sin(t + 1.0), state)
    schedule = error_norms(mechanism, 60, Workload(learning_rates=(1.0, 0.5, 0.25)))
    momentum = error_norms(mechanism, 60, Workload(momentum=0.9))
    weights = np.abs(mechanism.inverse_row(59, 60)).sum()
    found = (schedule.frobenius, schedule.max_row, momentum.frobenius, weights, noise)
    assert found == pytest.approx(expected, rel=1e-13)
