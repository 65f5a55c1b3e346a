"""`make simulate` compares at equal (ε, δ), cohort and turns, and says the gain that was measured, whatever it is."""

import tomllib
from pathlib import Path

import pytest

from fedcgd.plan import Plan
from fedcgd_simulations.demo import COHORT, TASK, configurations, gain, table
from fedcgd_simulations.settings import Settings
from fedcgd_simulations.tasks import get_task


@pytest.fixture(scope="module")
def settings() -> dict[str, Settings]:
    project = tomllib.loads((Path(__file__).parents[2] / "simulations" / "pyproject.toml").read_text())
    defaults = project["tool"]["flwr"]["app"]["config"]
    return {name: Settings.read(defaults | options) for name, options in configurations(2.0).items()}


def test_the_task_has_the_users_that_the_plan_is_for() -> None:
    assert len(get_task("digits").load().train) == TASK.users


def test_all_runs_promise_the_same_within_the_same_limits(settings) -> None:
    for one in settings.values():
        participation = one.participation(TASK.users)
        plan = Plan.calibrated(
            one.mechanism, participation, clip_norm=one.clip_norm, epsilon=one.epsilon, delta=one.delta,
            workload=one.workload(participation.rounds),
        )  # fmt: skip
        assert plan.guarantee().epsilon == pytest.approx(2.0, rel=1e-3)
        assert one.cohort <= COHORT
        if one.sampling == "none":
            assert participation.participations <= TASK.participations
        assert abs(participation.rounds * one.cohort - TASK.users * TASK.participations) <= one.cohort


def test_the_plan_keeps_nothing_secret_and_is_correlated(settings) -> None:
    assert [(one.sampling, one.mechanism.partition(":")[0]) for one in settings.values()] == [
        ("none", "dp-sgd"), ("poisson", "dp-sgd"), ("none", "lambda-cgd")
    ]  # fmt: skip


def run(label: str, sampling: str, accuracy: float) -> dict:
    return {
        "label": label, "sampling": sampling, "accuracy": [0.1, accuracy], "epsilon": 4.0, "delta": 1e-5, "users": 1260,
        "adjacency": "zero out one user", "task": "digits", "cohort": 60, "releases": 210,
        "noise_multiplier": 3.4, "seconds": 9.0,
    }  # fmt: skip


def test_a_loss_is_said_as_a_gain_is() -> None:
    runs = [run("dp-sgd", "none", 0.83), run("dp-sgd", "poisson", 0.93), run("lambda-cgd:0.9", "none", 0.92)]
    assert "+9.0 points against dp-sgd, -1.0 points against dp-sgd with poisson sampling" in gain(runs)
    made = table(runs)
    assert [list(column.cells) for column in made.columns][1] == ["nothing", "who is drawn (poisson)", "nothing"]
