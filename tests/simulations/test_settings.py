"""What the app's run configuration may say, and what it means."""

import tomllib
from pathlib import Path

import pytest
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvgM, FedYogi

from fedcgd.participation import Participation
from fedcgd_simulations.server_optimizer import server_strategy
from fedcgd_simulations.settings import Settings

APP = Path(__file__).resolve().parents[2] / "simulations"
DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def settings(**changes) -> Settings:
    return Settings.read(DEFAULTS | {key.replace("_", "-"): value for key, value in changes.items()})


def test_defaults_are_the_documented_job() -> None:
    default = settings()
    assert default.participation(1260) == Participation(rounds=210, min_separation=21)
    assert (default.epsilon, default.delta, default.mechanism) == (4.0, 1e-5, "lambda-cgd:0.8")
    assert default.key().simulated


def test_every_key_is_in_the_documentation() -> None:
    page = (APP.parent / "docs" / "simulations.md").read_text()
    assert [key for key in DEFAULTS if f"`{key}`" not in page] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mechanism": "lambda-cgd:x"}, "lambda-cgd"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, adam, yogi, adagrad, got 'lion'"),
        ({"schedule": "steps"}, "schedule must be one of constant, linear, cosine, got 'steps'"),
        ({"momentum": 1}, "momentum must be in"),
        ({"momentum": 0.9, "optimizer": "adam"}, "0 with an optimizer other than sgd, got 0.9 with adam"),
        ({"reply_timeout": 0}, "reply-timeout .*0.0"),
        ({"reply_timeout": float("inf")}, "reply-timeout .*inf"),
        ({"reply_timeout": float("nan")}, "reply-timeout .*nan"),
        ({"test_examples": -1}, "got -1"),
        ({"average": 1.0}, r"average must be in \[0, 1\), got 1.0"),
        ({"augmentations": -1}, "augmentations must be at least 0, got -1"),
        ({"augmentations": 2, "local-epochs": 1}, "augmentations must be 0 with local epochs, got 2"),
    ],
)
def test_settings_are_checked_before_any_work(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**change)


@pytest.mark.parametrize(
    ("optimizer", "cls"), [("sgd", FedAvgM), ("adam", FedAdam), ("yogi", FedYogi), ("adagrad", FedAdagrad)]
)
def test_the_servers_optimisers_are_flowers_with_the_schedule(optimizer, cls) -> None:
    momentum = 0.9 * (optimizer == "sgd")
    made = server_strategy(optimizer, learning_rate=0.3, momentum=momentum, schedule="linear", rounds=4)
    assert isinstance(made, cls)
    rates = (made.server_learning_rate, made.server_momentum) if momentum else (made.eta, 0)
    assert rates == (0.3, momentum)
    assert made.rate_schedule.startswith("linear over 4 rounds")


@pytest.mark.parametrize("cohort", [0, -1, 1261])
def test_a_cohort_that_no_round_can_have_is_refused(cohort: int) -> None:
    with pytest.raises(ValueError, match="1260 users"):
        settings(cohort=cohort).participation(1260)


def test_a_key_file_makes_the_run_private(tmp_path: Path) -> None:
    private = settings(key_file=str(tmp_path / "key"))
    assert not private.key().simulated
    assert private.key().noise == private.key().noise  # made once, then read
    assert settings(key_file=str(tmp_path / "other")).key().noise != private.key().noise
    assert settings().ledger() is None
    assert settings(ledger=str(tmp_path / "run.db")).ledger() == tmp_path / "run.db"


def test_fewer_rounds_than_planned_stay_consistent() -> None:
    short = settings(rounds=5).participation(1260)
    assert (short.rounds, short.participations) == (5, 1)
