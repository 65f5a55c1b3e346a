"""Mechanisms that a user writes: accepted where C and its inverse agree, refused where ε would be of other noise."""

from dataclasses import dataclass

import numpy as np
import pytest

from fedcgd import LambdaCGD, Normalized, Participation, Plan
from fedcgd.mechanisms import own
from fedcgd.mechanisms.own import check_own
from fedcgd.mechanisms.toeplitz import ToeplitzMechanism, reciprocal
from fedcgd.optimisation.catalogue import describe

RUN = Participation(rounds=24, min_separation=6)


@dataclass(frozen=True)
class Harmonic(ToeplitzMechanism):
    """c_t = 1/(t + 1); the inverse may be spoilt at one lag."""

    spoilt: int = 0

    @property
    def name(self) -> str:
        return "harmonic"

    def coefficients(self, rounds: int) -> np.ndarray:
        return 1 / np.arange(1.0, rounds + 1)

    def inverse_coefficients(self, rounds: int) -> np.ndarray:
        inverse = reciprocal(self.coefficients(rounds), rounds)
        if 0 < self.spoilt < rounds:
            inverse[self.spoilt] *= 1.001
        return inverse


class Forgetful(Harmonic):
    """Adds fresh noise only, though its C says otherwise."""

    def multiply_next(self, round, rounds, z, kept):
        return z, ()


class Upper(Harmonic):
    def columns(self, rounds, indices):
        return super().columns(rounds, indices) + np.eye(rounds, k=1)[:, indices]


class Another(LambdaCGD):
    """Under the name of a mechanism that ledgers know."""


def plan(mechanism) -> Plan:
    return Plan.calibrated(mechanism, RUN, clip_norm=1.0, epsilon=2, delta=1e-5)


@pytest.mark.parametrize("mechanism", [Harmonic(), Normalized(Harmonic()), LambdaCGD(0.5)])
def test_a_mechanism_whose_inverse_is_right_is_planned(mechanism):
    assert plan(mechanism).noise_multiplier > 0


@pytest.mark.parametrize(
    ("mechanism", "words"),
    [
        (Harmonic(spoilt=1), "not that of its C from round 1 on"),
        (Harmonic(spoilt=23), "not that of its C from round 23 on"),
        (Normalized(Harmonic(spoilt=5)), "not that of its C from round 5 on"),
        (Forgetful(), "`multiply_next` of harmonic does not make the noise of its `inverse_row` in round 1"),
        (Upper(), "lower-triangular"),
    ],
)
def test_a_mechanism_whose_noise_is_not_that_of_its_c_has_no_plan(mechanism, words):
    with pytest.raises(ValueError, match=words):
        plan(mechanism)


def test_a_long_run_is_looked_at_in_its_first_rounds(monkeypatch):
    monkeypatch.setattr(own, "_ENTRIES", 2**14)
    check_own(Harmonic(), 200)
    with pytest.raises(ValueError, match="from round 80 on"):  # of 2¹⁴ // 200 = 81
        check_own(Harmonic(spoilt=80), 200)
    check_own(Harmonic(spoilt=81), 200)


def test_no_record_takes_a_mechanism_that_it_would_not_make_again():
    with pytest.raises(ValueError, match="no file or ledger can hold it"):
        describe(Harmonic())
    with pytest.raises(ValueError, match="no file or ledger can hold it"):
        describe(Another(0.5))
