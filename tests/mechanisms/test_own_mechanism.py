"""Mechanisms that a user writes: accepted where C and its inverse agree, refused where ε would be of other noise."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from plans import make_plan
from torch.utils.data import DataLoader, TensorDataset

from fedcgd import NoiseKey, Participation, Plan, accountant, calibrate, compute_delta, compute_epsilon, sensitivity
from fedcgd.mechanisms import DPSGD, LambdaCGD, Mechanism, Normalized
from fedcgd.mechanisms.own import check_own
from fedcgd.mechanisms.toeplitz import Toeplitz, reciprocal
from fedcgd.opacus import CorrelatedPrivacyEngine
from fedcgd.optimisation.mechanism_json import describe

RUN = Participation(rounds=24, min_separation=6)


@dataclass(frozen=True)
class Harmonic(Toeplitz):
    """c_t = 1/(t + 1); the inverse may be spoilt at one lag."""

    name = "harmonic"

    spoilt: int = 0
    by: float = 1.001

    def coefficients(self, rounds: int) -> np.ndarray:
        return 1 / np.arange(1.0, rounds + 1)

    def inverse_coefficients(self, rounds: int) -> np.ndarray:
        inverse = reciprocal(self.coefficients(rounds), rounds)
        if 0 < self.spoilt < rounds:
            inverse[self.spoilt] *= self.by
        return inverse


class Forgetful(Harmonic):
    """Adds fresh noise only, though its C says otherwise."""

    def multiply_next(self, round, rounds, z, kept):
        return z, ()


class KeepsNothing(Harmonic):
    """Its `multiply_next` is left without the rounds before."""

    def num_buffers(self, rounds):
        return 0


class TooFewReplayed(LambdaCGD):
    """A replay would leave out the noise of the round before."""

    def inverse_bandwidth(self, rounds: int) -> int:
        return 1


class Table(Mechanism):
    """A C that is not Toeplitz, and says so many bands."""

    name = "table"

    def __init__(self, bands: int, above: float = 0.0, spoilt: float = 0.0) -> None:
        self.bands, self.above, self.spoilt = bands, above, spoilt

    def bandwidth(self, rounds: int) -> int:
        return self.bands

    def columns(self, rounds, indices):
        c = np.eye(rounds) + np.diag(np.linspace(0.1, 0.9, rounds - 1), -1)
        c[0, -1] = self.above
        return c[:, indices]

    def inverse_row(self, round, rounds):
        inverse = np.linalg.inv(np.tril(self.columns(rounds, np.arange(rounds))))
        inverse[-1, 0] += self.spoilt
        return inverse[round, round::-1]


class Another(LambdaCGD):
    """Under the name of a mechanism that ledgers know."""


def plan(mechanism) -> Plan:
    return Plan.calibrated(mechanism, RUN, clip_norm=1.0, epsilon=2, delta=1e-5)


@pytest.mark.parametrize(
    ("mechanism", "words"),
    [
        (Harmonic(spoilt=1), "not that of its C from round 1 on"),
        (Harmonic(spoilt=23), "not that of its C from round 23 on"),
        (Normalized(Harmonic(spoilt=5)), "not that of its C from round 5 on"),
        (KeepsNothing(), "`multiply_next` of harmonic .* in round 1"),
        (Forgetful(), "`multiply_next` of harmonic does not make the noise of its `inverse_row` in round 1"),
        (Harmonic(spoilt=1, by=1 + 3e-7), "not that of its C from round 1 on"),  # 15 times the tolerance
    ],
)
def test_a_mechanism_whose_noise_is_not_that_of_its_c_has_no_plan(mechanism, words):
    for ask in (
        lambda: plan(mechanism),
        lambda: calibrate(mechanism, RUN, epsilon=2, delta=1e-5),
        lambda: compute_epsilon(mechanism, RUN, noise_multiplier=2, delta=1e-5),
        lambda: compute_delta(mechanism, RUN, noise_multiplier=2, epsilon=2),
        lambda: make_plan(mechanism, RUN),
    ):
        with pytest.raises(ValueError, match=words):
            ask()


def test_a_long_run_is_looked_at_in_every_round():
    """More rounds than 2²⁴ entries of C have in full, wrong in the last one."""
    check_own(Harmonic(), 5000)
    with pytest.raises(ValueError, match="round 4999"):
        check_own(Harmonic(spoilt=4999, by=100.0), 5000)


class Fading(Harmonic):
    """c_t = (1 − t/n)²: C depends on the number of rounds."""

    name = "fading"

    def coefficients(self, rounds: int) -> np.ndarray:
        return (1 - np.arange(rounds) / rounds) ** 2.0


def test_the_first_rounds_of_a_c_that_depends_on_n_are_those_of_n():
    """Rows 0 … 11 of the C of 24 rounds, not the C of 12 rounds: by the definition, Σ of every sixth column."""
    made = plan(Fading())
    c = Fading().columns(24, np.arange(24))[:12]
    by_definition = float(np.linalg.norm(c[:, 0] + c[:, 6]))
    assert sensitivity(Fading(), RUN, released=12).value == pytest.approx(by_definition, rel=1e-12)
    once = Participation(rounds=1)
    known = compute_epsilon(DPSGD(), once, noise_multiplier=made.noise_multiplier / by_definition, delta=1e-5)
    assert made.guarantee(released=12).epsilon == pytest.approx(known.epsilon, rel=1e-9)
    other = Fading().coefficients(12)
    assert np.linalg.norm(other + np.concatenate([np.zeros(6), other[:6]])) < 0.9 * by_definition


@pytest.mark.parametrize("method", ["bandwidth", "columns", "inverse_row"])
def test_matrices_of_a_toeplitz_mechanism_follow_from_its_coefficients_alone(method: str) -> None:
    """ε is found from the coefficients, and the noise is made of rows: no class can have both of its own."""
    with pytest.raises(TypeError, match=method):
        type("Another", (LambdaCGD,), {method: lambda self, *_: 1})
    with pytest.raises(TypeError, match=method):
        type("Another", (type("Mixed", (), {method: lambda self, *_: 1}), LambdaCGD), {})


@pytest.mark.parametrize(
    ("mechanism", "words"),
    [
        (TooFewReplayed(0.9), "`inverse_bandwidth` says 1"),
        (Table(1), "`bandwidth` of table says that C has 1 bands, and it has 2"),
        (Table(2, above=1e-300), "lower-triangular"),
        (Table(2, spoilt=1e-6), "from round 23 on"),
    ],
)
def test_what_a_mechanism_says_of_itself_must_be_of_one_matrix(mechanism, words):
    with pytest.raises(ValueError, match=words):
        check_own(mechanism, 24)


def test_the_lemma_of_normalised_lambda_cgd_is_for_lambda_cgd_alone():
    """For the subclass the pattern of leftmost columns is not proven to be the worst: no exact value by that name."""
    run = Participation(rounds=9, min_separation=2, max_participations=2)
    found = sensitivity(Normalized(Swelling(0.5)), run)
    c = Normalized(Swelling(0.5)).columns(9, np.arange(9))
    pairs = [(i, j) for i in range(9) for j in range(i + 2, 9)]
    worst = max(float(np.linalg.norm(c[:, i] + sign * c[:, j])) for i, j in pairs for sign in (1, -1))
    leftmost = float(np.linalg.norm(c[:, 0] + c[:, 2]))
    assert leftmost < 0.99 * worst  # so the lemma would have been below the truth
    assert found.value >= worst * (1 - 1e-12)
    assert "Lemma 8" not in found.method


class Swelling(LambdaCGD):
    """c_0 = 1 and c_2 = c_4 = −1/2, else 0: the leftmost columns cancel in part, later ones do not."""

    def coefficients(self, rounds: int) -> np.ndarray:
        c = np.zeros(rounds)
        c[0], c[2:5:2] = 1.0, -0.5
        return c

    def inverse_coefficients(self, rounds: int) -> np.ndarray:
        return reciprocal(self.coefficients(rounds), rounds)


class Late(Swelling):
    """c = 0, 1, 1, which has no inverse."""

    def coefficients(self, rounds: int) -> np.ndarray:
        return np.array([0.0, 1.0, 1.0, *[0.0] * rounds])[:rounds]


@pytest.mark.parametrize("sampling", ["none", "b-min-sep"])
def test_coefficients_that_begin_with_zero_are_refused_in_words(sampling) -> None:
    rate = 0.3 if sampling == "b-min-sep" else None
    participation = Participation(rounds=9, min_separation=3, sampling=sampling, sampling_rate=rate)
    with pytest.raises(ValueError, match=r"\[0.0, 1.0"):
        calibrate(Late(0.5), participation, epsilon=2, delta=1e-3)
    if sampling == "b-min-sep":
        with pytest.raises(ValueError, match="diagonal of"):
            accountant(Late(0.5), participation).check()


def test_no_record_takes_a_mechanism_that_it_would_not_make_again():
    for mechanism in (Harmonic(), Another(0.5)):
        with pytest.raises(ValueError, match="no file"):
            describe(mechanism)


@pytest.mark.filterwarnings("ignore:Secure RNG")
@pytest.mark.parametrize("recorded", [False, True])
def test_opacus_says_before_training_that_a_run_with_it_is_not_saved(recorded, tmp_path):
    model, data = torch.nn.Linear(2, 2), TensorDataset(torch.randn(24, 2), torch.arange(24) % 2)
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)
    engine = CorrelatedPrivacyEngine(NoiseKey.simulation(1), record=tmp_path / "releases" if recorded else None)
    told = pytest.raises(ValueError, match="; BandedToeplitz")
    with told if recorded else pytest.warns(UserWarning, match=r"'harmonic' .*BandedToeplitz"):
        engine.make_private(module=model, optimizer=optimizer, data_loader=loader, plan=plan(Harmonic()))
    if recorded:
        with pytest.raises(RuntimeError):  # there is no run
            _ = engine.accountant
