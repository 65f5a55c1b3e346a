"""Numbers that are left open, beside the best of fine grids; what is optimised is damped for the sampling that runs."""

import json
from dataclasses import replace

import numpy as np
import pytest
from command_line import figures, run

from fedcgd.accounting import search, selection
from fedcgd.accounting.coverage import NegativeEntryError
from fedcgd.accounting.selection import select_lambda, select_mechanism
from fedcgd.mechanisms import BIFR, BLT, BandInvMF, LambdaCGD, LambdaMuCGD, Mechanism, Normalized
from fedcgd.mechanisms.error import error_norms
from fedcgd.mechanisms.schedule import scheduled_workload
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.mechanisms.workload import PREFIX_SUMS
from fedcgd.optimisation import catalogue
from fedcgd.optimisation.catalogue import spelling_of
from fedcgd.optimisation.damping import damped
from fedcgd.optimisation.mechanism_json import write_mechanism
from fedcgd.participation import Participation
from fedcgd.plan import Plan
from fedcgd.quadratic import Quadratic, Spectrum
from fedcgd.quadratic.loss import final_loss

BUDGET = {"epsilon": 2.0, "delta": 1e-5}
KNOWN = Participation(rounds=60, min_separation=12)
BINS = replace(KNOWN, sampling="balls-in-bins")
COINS = Participation(rounds=60, min_separation=8, sampling="b-min-sep", sampling_rate=0.2)
EPOCHS = Participation(rounds=60, max_participations=5, sampling="random-allocation")
OPTIMISED = ("blt:2", "band-inv-mf:3", "banded-toeplitz:4", "banded-toeplitz:4:normalized")


def error(mechanism: Mechanism, participation=KNOWN, workload=PREFIX_SUMS, kind="rmse") -> float:
    norms = error_norms(mechanism, participation.rounds, workload)
    sens = sensitivity(mechanism, participation).value
    return norms.rmse(sens) if kind == "rmse" else norms.max_se(sens)


@pytest.mark.parametrize(
    "workload", [PREFIX_SUMS, scheduled_workload("linear", 60, momentum=0.9)], ids=["sums", "schedule"]
)
@pytest.mark.parametrize("kind", ["rmse", "max-se"])
@pytest.mark.parametrize("normalized", [False, True])
def test_gamma_is_the_best_of_a_fine_grid(workload, kind, normalized: bool) -> None:
    text = "bifr:3:normalized" if normalized else "bifr:3"
    found = select_mechanism(text, KNOWN, error=kind, workload=workload, **BUDGET)
    made = [BIFR(3, gamma) for gamma in np.linspace(0.01, 1, 200)]
    least = min(error(Normalized(one) if normalized else one, KNOWN, workload, kind) for one in made)
    assert error(found, KNOWN, workload, kind) <= least * (1 + 1e-6)


def test_two_numbers_are_the_best_of_a_fine_grid_and_of_an_optimiser() -> None:
    """C⁻¹ = (1 − λx)(1 − μx) is any C⁻¹ of three bands whose roots are real: band-inv-mf:3 finds the same by gradients."""
    found = select_mechanism("lambda-mu", KNOWN, **BUDGET)
    assert isinstance(found, LambdaMuCGD)
    grid = [LambdaMuCGD(lam, share * lam) for lam in np.linspace(0, 0.98, 50) for share in np.linspace(-1, 1, 41)]
    assert error(found) <= min(map(error, grid)) * (1 + 1e-4)
    assert error(found) == pytest.approx(error(catalogue.mechanism("band-inv-mf:3", KNOWN)), rel=1e-4)
    assert found.mu < 0
    given = select_mechanism("lambda-mu:0.6", KNOWN, **BUDGET)
    assert isinstance(given, LambdaMuCGD)
    assert given.lam == 0.6
    assert error(given) <= min(error(LambdaMuCGD(0.6, mu)) for mu in np.linspace(-0.59, 0.99, 300)) * (1 + 1e-6)


def test_bands_and_gamma_are_chosen_together() -> None:
    found = select_mechanism("bifr", KNOWN, **BUDGET)
    best = {bands: select_mechanism(f"bifr:{bands}", KNOWN, **BUDGET) for bands in (1, 2, 4, 8, 12)}
    assert found == min(best.values(), key=error)


def test_numbers_for_a_curvature_are_those_of_least_loss() -> None:
    quadratic = Quadratic(Spectrum.from_eigenvalues([1.0, 0.1, 0.01]), 0.5)
    found = select_mechanism("bifr:3", KNOWN, curvature=quadratic, **BUDGET)

    def loss(mechanism: Mechanism) -> float:
        return final_loss(mechanism, 60, quadratic, stddev=sensitivity(mechanism, KNOWN).value)

    assert loss(found) <= min(loss(BIFR(3, gamma)) for gamma in np.linspace(0.01, 1, 200)) * (1 + 1e-6)
    assert found != select_mechanism("bifr:3", KNOWN, **BUDGET)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "needs") for text in ("nu-dp-ftrl", "blt", "blt:normalized")),  # there is no rule
        ("bifr:0", "bandwidth must be"),
        ("lambda-mu:1.5", "lam must be"),
    ],
)
def test_numbers_that_cannot_be_chosen_or_are_impossible_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        select_mechanism(text, BINS, **BUDGET)


class MadeUp:
    """σ that grows with all of C: the more is cancelled, the more it costs."""

    power = 0.85
    calls = 0

    def __init__(self, mechanism: Mechanism, participation: Participation) -> None:
        self.mechanism = mechanism

    def check(self) -> None:
        """No C is refused."""

    def rough_noise_multiplier(self, **_) -> float:
        type(self).calls += 1
        return float(self.mechanism.columns(60, np.array([0])).sum() ** self.power)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> type[MadeUp]:
    monkeypatch.setattr(search, "accountant", MadeUp)
    monkeypatch.setattr(selection, "accountant", MadeUp)
    monkeypatch.setattr(MadeUp, "calls", 0)
    return MadeUp


def amplified(mechanism: Mechanism, workload=PREFIX_SUMS) -> float:
    return error_norms(mechanism, 60, workload).rmse(MadeUp(mechanism, BINS).rough_noise_multiplier())


@pytest.mark.parametrize("participation", [BINS, COINS, EPOCHS], ids=lambda who: who.sampling)
@pytest.mark.parametrize("text", OPTIMISED)
def test_what_is_optimised_is_damped_for_the_sampling(text: str, participation, made_up) -> None:
    plain = catalogue.mechanism(text, participation)
    said: list[str] = []
    found = select_mechanism(text, participation, progress=said.append, **BUDGET)
    assert made_up.calls <= 18
    assert any("ρ = " in line for line in said)
    errors = [amplified(damped(plain, rho)) for rho in np.linspace(0, 1, 400)]
    assert 20 < np.argmin(errors) < 399
    assert amplified(found) <= min(errors) * 1.002
    assert amplified(found) < amplified(plain)
    assert amplified(plain) > min(errors) * 1.004
    assert type(found) is type(plain)


@pytest.mark.parametrize("text", OPTIMISED)
def test_nothing_is_damped_without_a_sampling_nor_where_it_does_not_help(text: str, made_up, monkeypatch) -> None:
    assert select_mechanism(text, KNOWN, **BUDGET) == catalogue.mechanism(text, KNOWN)
    assert made_up.calls == 0
    monkeypatch.setattr(MadeUp, "power", -0.5)  # the more is cancelled, the better
    assert select_mechanism(text, BINS, **BUDGET) == catalogue.mechanism(text, BINS)


def test_rho_is_the_best_for_the_workload(made_up, monkeypatch) -> None:
    monkeypatch.setattr(MadeUp, "power", 0.6)
    workload = scheduled_workload("linear", 60, momentum=0.9)
    found = select_mechanism("blt:2", BINS, workload=workload, **BUDGET)
    plain = catalogue.mechanism("blt:2", BINS, workload=workload)
    rhos = np.linspace(0, 1, 400)
    assert amplified(found, workload) <= min(amplified(damped(plain, rho), workload) for rho in rhos) * 1.005


def test_open_bands_are_compared_damped(made_up) -> None:
    found = select_mechanism("band-inv-mf", BINS, **BUDGET)
    assert isinstance(found, BandInvMF)
    best = [select_mechanism(f"band-inv-mf:{bands}", BINS, **BUDGET) for bands in (1, 2, 4, 8, 12)]
    assert found == min(best, key=amplified)


def test_numbers_of_bands_whose_c_is_refused_are_left_out(made_up, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self) -> None:
        if isinstance(self.mechanism, BandInvMF) and self.mechanism.inverse_bandwidth(12) >= 4:
            raise NegativeEntryError("an entry of C is -1")

    monkeypatch.setattr(MadeUp, "check", refused)
    found = select_mechanism("band-inv-mf", BINS, **BUDGET)
    best = [select_mechanism(f"band-inv-mf:{bands}", BINS, **BUDGET) for bands in (1, 2)]
    assert found == min(best, key=amplified)
    calls = made_up.calls
    with pytest.raises(NegativeEntryError):
        select_mechanism("band-inv-mf:4", BINS, **BUDGET)
    assert made_up.calls == calls  # before any search


@pytest.mark.parametrize(("text", "count"), [("bifr:3", 1), ("lambda-mu", 2)])
def test_open_numbers_are_searched_under_the_sampling(text: str, count: int, made_up) -> None:
    found = select_mechanism(text, BINS, **BUDGET)
    assert made_up.calls <= 18 * count
    made: list[Mechanism] = [BIFR(3, gamma) for gamma in np.linspace(0.005, 1, 200)]
    if text == "lambda-mu":
        made = [LambdaMuCGD(lam, share * lam) for lam in np.linspace(0, 0.98, 50) for share in np.linspace(-1, 1, 41)]
    assert amplified(found) <= min(map(amplified, made)) * 1.02
    assert amplified(found) < amplified(select_mechanism(text, KNOWN, **BUDGET))


def test_lambda_is_searched_under_the_sampling_in_few_calibrations(made_up) -> None:
    said: list[str] = []
    found = select_lambda(BINS, objective="amplified-rmse", progress=said.append, **BUDGET)
    errors = [amplified(LambdaCGD(1 - 1 / x)) for x in np.geomspace(1, 100, 2000)]
    assert found.value == pytest.approx(amplified(LambdaCGD(found.lam)))
    assert found.value <= min(errors) * 1.002
    assert len(said) == len(found.lams) <= 14
    excess = select_lambda(BINS, objective="excess", **BUDGET).lam
    assert excess / (1 - excess) == pytest.approx(found.lam / (1 - found.lam) / 3)


def test_what_is_made_already_stays_as_it_is(made_up, tmp_path) -> None:
    """A file, and a value."""
    made = BLT((0.4, 0.1), (0.95, 0.6))
    write_mechanism(made, tmp_path / "blt.json")
    assert select_mechanism(f"file:{tmp_path / 'blt.json'}", BINS, **BUDGET) == made
    assert made_up.calls == 0


def test_a_plan_is_accounted_for_with_the_damped_mechanism() -> None:
    """By the accounting itself: less error than undamped, and the plan written down holds the numbers that run."""
    few = Participation(rounds=12, min_separation=3, sampling="balls-in-bins")
    budget = {"clip_norm": 1.0, "epsilon": 1.0, "delta": 1e-3}
    plan = Plan.calibrated("band-inv-mf:2", few, **budget)
    plain = catalogue.mechanism("band-inv-mf:2", few)
    undamped = Plan.calibrated(plain, few, **budget)
    assert isinstance(plan.mechanism, BandInvMF)
    assert isinstance(plain, BandInvMF)
    assert 0 > plan.mechanism.values[1] > plain.values[1]
    rmse, before = (error_norms(each.mechanism, 12).rmse(each.noise_multiplier) for each in (plan, undamped))
    assert rmse < before
    assert Plan.calibrated(plan.mechanism, few, **budget) == plan
    assert Plan.from_description(json.loads(json.dumps(plan.to_description()))) == plan


def test_the_command_line_chooses_what_is_left_open() -> None:
    known = ["--rounds", "60", "--separation", "12", "--epsilon", "2", "--delta", "1e-5"]
    row = figures("compare", "--mechanism", "bifr:3", *known)["mechanisms"][0]
    assert row["label"] == f"bifr:3 → {spelling_of(select_mechanism('bifr:3', KNOWN, **BUDGET))}"
    best = figures("compare", "--mechanism", "bifr", *known)["mechanisms"][0]
    assert best["label"].partition(" → ")[2] == spelling_of(select_mechanism("bifr", KNOWN, **BUDGET))
    needs = run("account", "--mechanism", "bifr:3", *known[:4], "--delta", "1e-5", "--noise-multiplier", "2")
    assert needs.exit_code == 2
    assert "needs γ" in " ".join(needs.output.split())
