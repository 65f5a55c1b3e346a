"""The federated counterpart of a point has the point's plan."""

import tomllib
from dataclasses import fields, replace

import pytest
from app_runs import DEFAULTS

from fedcgd_experiments.flower_command import flower_command, run_config
from fedcgd_experiments.point import CentralPoint
from fedcgd_simulations.settings import Settings

POINT = CentralPoint(
    task="digits", mechanism="lambda-cgd:0.7", epsilon=2.0, delta=1e-6, steps=21, epochs=4, clip_norm=0.5,
    learning_rate=3.0, seed=5, momentum=0.9, schedule="cosine",
)  # fmt: skip

POINTS = {
    "none": POINT,
    "balls-in-bins": replace(POINT, sampling="balls-in-bins"),
    "poisson": replace(POINT, mechanism="dp-sgd", sampling="poisson"),
    "cyclic-poisson": replace(POINT, mechanism="bisr:3", sampling="cyclic-poisson"),
}


@pytest.mark.parametrize("sampling", POINTS)
def test_the_app_reads_the_points_plan(sampling):
    settings = Settings.read(DEFAULTS | run_config(POINTS[sampling], users=1260))
    assert settings.participation(1260) == POINTS[sampling].setup.participation()
    shared = {field.name for field in fields(settings)} & {field.name for field in fields(POINT)}
    assert shared >= {"epsilon", "delta", "clip_norm", "learning_rate", "momentum", "schedule", "seed", "average"}
    assert [name for name in shared if getattr(settings, name) != getattr(POINTS[sampling], name)] == []


def test_the_command_can_be_pasted():
    command = flower_command(POINT, users=1260, gpus=0.25)
    assert command.startswith("flwr run simulations --stream --federation-config 'client-resources-num-gpus=0.25'")
    inside = command.split("--run-config '")[1].removesuffix("'")
    read = tomllib.loads("\n".join(inside.split(" ")))
    assert read == run_config(POINT, users=1260)
    assert "federation-config" not in flower_command(POINT, users=1260, gpus=0)


def test_steps_that_the_app_cannot_make_are_refused():
    with pytest.raises(ValueError, match="4 steps"):
        run_config(replace(POINT, steps=4), users=10)
