"""What the app's run configuration may say, and what it means."""

import tomllib
from pathlib import Path

import pytest

from fedcgd.mechanisms import DPSGD, LambdaCGD, Normalized
from fedcgd.participation import Participation
from fedcgd_simulations.settings import Settings

APP = Path(__file__).resolve().parents[1] / "simulations"
DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def settings(**changes) -> Settings:
    return Settings.read(DEFAULTS | {key.replace("_", "-"): value for key, value in changes.items()})


def test_defaults_are_the_documented_job() -> None:
    default = settings()
    assert default.participation(1260) == Participation(rounds=210, min_separation=21, max_participations=10)
    assert default.mechanism(default.participation(1260)) == LambdaCGD(0.8)
    assert (default.epsilon, default.delta, default.label) == (4.0, 1e-5, "lambda-cgd λ=0.8")
    assert default.key().simulated


def test_every_key_is_in_the_documentation() -> None:
    page = (APP.parent / "docs" / "simulations.md").read_text()
    assert [key for key in DEFAULTS if f"`{key}`" not in page] == []


def test_mechanisms_by_name() -> None:
    participation = settings().participation(1260)
    assert settings(mechanism="dp-sgd").mechanism(participation) == DPSGD()
    assert settings(normalize=True).mechanism(participation) == Normalized(LambdaCGD(0.8))
    with pytest.raises(ValueError, match="sgdd"):
        settings(mechanism="sgdd").mechanism(participation)
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        settings(lam=1.0).mechanism(participation)


def test_samplings() -> None:
    bins = settings(sampling="balls-in-bins").participation(1260)
    assert (bins.rounds, bins.min_separation, bins.sampling) == (210, 21, "balls-in-bins")
    poisson = settings(sampling="poisson", cohort=63).participation(1260)
    assert (poisson.rounds, poisson.sampling_rate) == (200, 0.05)
    cyclic = settings(sampling="cyclic-poisson", cohort=63, bandwidth=4).participation(1260)
    assert (cyclic.rounds, cyclic.min_separation, cyclic.sampling_rate) == (200, 4, 0.2)
    with pytest.raises(ValueError, match="no other sampling"):
        settings(sampling="shuffle").participation(1260)


def test_fewer_rounds_than_planned_stay_consistent() -> None:
    short = settings(rounds=5).participation(1260)
    assert (short.rounds, short.participations) == (5, 1)


@pytest.mark.parametrize("cohort", [0, -1, 1261])
def test_a_cohort_that_no_round_can_have_is_refused(cohort: int) -> None:
    with pytest.raises(ValueError, match="between 1 and the 1260 users"):
        settings(cohort=cohort).participation(1260)


def test_a_key_file_makes_the_run_private(tmp_path: Path) -> None:
    private = settings(key_file=str(tmp_path / "key"))
    assert not private.key().simulated
    assert private.key().noise == private.key().noise  # made once, then read
    assert settings(key_file=str(tmp_path / "other")).key().noise != private.key().noise
    assert settings().ledger() is None
    assert settings(ledger=str(tmp_path / "run.db")).ledger() == tmp_path / "run.db"
