"""The command that `federated` prints releases the models of the central run that it stands for."""

import json
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_grid import FakeGrid, FakeNode
from flwr.app import Context, RecordDict
from typer.testing import CliRunner

from fedcgd.clipping.flat_models import flatten
from fedcgd.keys import NoiseKey
from fedcgd.opacus.batches import RoundBatches
from fedcgd.participation.cohorts import History, cohort
from fedcgd_experiments import __main__, experiment
from fedcgd_experiments.experiment import Point, Setup, calibrate_setup, identity, run_points, shared_identity
from fedcgd_experiments.federated import beside
from fedcgd_experiments.flower_command import run_config
from fedcgd_experiments.sweep import ResultsFile
from fedcgd_experiments.tables import fill
from fedcgd_simulations import client_app, server_app
from fedcgd_simulations.tasks import get_task

DEFAULTS = tomllib.loads((Path(__file__).parents[1] / "simulations" / "pyproject.toml").read_text())["tool"]["flwr"][
    "app"
]["config"]
SETUP = Setup(mechanism="lambda-cgd:0.8", epsilon=1.0, delta=1e-5, steps=21, epochs=1)
POINT = Point(setup=SETUP, task="digits", clip_norm=0.5, learning_rate=1.5, seed=1000, split="test")

ROUNDING = 2e-3
"""Of the way that the model went: a federated user rounds its update towards zero on the grid, central training each sum."""


def apart(there: np.ndarray, here: np.ndarray, start: np.ndarray) -> float:
    """How far two models are apart, as a part of the way from the first one."""
    return float(np.linalg.norm(there - here) / np.linalg.norm(here - start))


def printed(point: Point, folder: Path) -> dict:
    """The run configuration in the command that `federated` prints for `point`."""
    runs = folder / "runs.jsonl"
    tuning = replace(point, seed=0, split="validation")
    record = {"kind": "runs", "point": json.loads(shared_identity(tuning)), "accuracies": [0.5]}
    runs.write_text(json.dumps(record | {"learning_rates": [point.learning_rate]}) + "\n")
    done = CliRunner().invoke(__main__.app, ["federated", str(runs), "--data-dir", str(folder)])
    assert done.exit_code == 0, done.output
    words = shlex.split(done.output)
    return tomllib.loads("\n".join(shlex.split(words[words.index("--run-config") + 1], posix=False)))


def federated(config: dict, folder: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The last model of the app under `config`."""
    released: list[np.ndarray] = []
    load = server_app.load_arrays

    def keep(model, arrays) -> None:
        released.append(np.concatenate([array.numpy().ravel() for array in arrays.values()]))
        load(model, arrays)

    monkeypatch.setattr(server_app, "load_arrays", keep)
    config = DEFAULTS | config | {"results": str(folder / "result.json")}
    grid = FakeGrid(
        {i: FakeNode(client_app.app, config={"partition-id": i, "num-partitions": 2}) for i in range(2)}, config
    )
    server_app.app(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config))
    return released[-1]


def central(point: Point, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The model at the end of the central run."""
    trained: list[np.ndarray] = []

    def keep(model, *_) -> float:
        trained.append(flatten(model).numpy())
        return 0.0

    monkeypatch.setattr(experiment, "evaluate", keep)
    run_points([point], {identity(point.setup): calibrate_setup(point.setup)})
    return trained[0]


@pytest.mark.parametrize("sampling", ["none", "balls-in-bins"])
def test_the_same_models(sampling, tmp_path, monkeypatch) -> None:
    point = replace(POINT, setup=replace(SETUP, sampling=sampling))
    there, here = federated(printed(point, tmp_path), tmp_path, monkeypatch), central(point, monkeypatch)
    start = flatten(get_task("digits").model(1000)).numpy()
    assert apart(there, here, start) < ROUNDING


def test_the_same_models_with_momentum_and_a_schedule(tmp_path, monkeypatch) -> None:
    point = replace(POINT, momentum=0.9, schedule="cosine", learning_rate=0.3)
    there, here = federated(printed(point, tmp_path), tmp_path, monkeypatch), central(point, monkeypatch)
    start = flatten(get_task("digits").model(1000)).numpy()
    assert apart(there, here, start) < ROUNDING
    assert apart(there, central(replace(point, momentum=0.0), monkeypatch), start) > 20 * ROUNDING
    assert apart(there, central(replace(point, schedule="linear"), monkeypatch), start) > 20 * ROUNDING


def test_tuned_points_are_trained_by_the_app_and_set_beside_their_central_runs(tmp_path) -> None:
    """Only the budget that is asked for is trained, and nothing twice."""
    sweep, output = tmp_path / "sweep.jsonl", tmp_path / "sweep-federated.jsonl"
    other = replace(POINT, setup=replace(SETUP, epsilon=8.0))
    points = [POINT, *(replace(point, seed=0, split="validation") for point in (POINT, other))]
    calibrations = {identity(point.setup): calibrate_setup(point.setup) for point in points}
    central, *tuning = [record for point in points for record in run_points([point], calibrations)]
    sweep.write_text("".join(json.dumps(record) + "\n" for record in [*calibrations.values(), central, *tuning]))
    command = ["federate", str(sweep), "--output", str(output), "--seeds", "2", "--epsilon", "1"]
    for _ in range(2):
        done = CliRunner().invoke(__main__.app, command)
        assert done.exit_code == 0, done.output
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["point"]["seed"] for record in kept] == [1000, 1001]
    assert {record["point"]["setup"]["epsilon"] for record in kept} == {1.0}
    assert all(record["releases"] == 21 for record in kept)
    (row,) = beside(kept, ResultsFile(sweep).runs())  # seed 1001 has no central run
    assert (row.setup, row.seeds) == (SETUP, 1)
    assert row.central == central["accuracies"][0]
    assert row.federated == kept[0]["accuracy"]
    assert row.largest == pytest.approx(abs(row.federated - row.central))
    assert row.largest < 0.01
    made = fill("<!-- table: federated/sweep -->\n<!-- end -->\n", tmp_path)
    cells = made.splitlines()[-3].strip("| ").split(" | ")
    assert cells[:5] == ["`sweep`", "lambda-cgd:0.8", "none", "1", "1"]
    assert cells[5:] == [f"{100 * value:.2f}" for value in (row.central, row.federated, row.largest)]


def test_another_optimiser_has_no_command() -> None:
    with pytest.raises(ValueError, match="Flower's adam is not PyTorch's"):
        run_config(replace(POINT, optimizer="adam"), users=1260)


def test_with_poisson_sampling_only_the_draws_are_others(tmp_path, monkeypatch) -> None:
    point = replace(POINT, setup=replace(SETUP, mechanism="dp-sgd", sampling="poisson"))
    there = federated(printed(point, tmp_path), tmp_path, monkeypatch)
    start = flatten(get_task("digits").model(1000)).numpy()
    assert apart(there, central(point, monkeypatch), start) > 20 * ROUNDING

    def drawn(self, round: int) -> np.ndarray:
        users = cohort(
            point.setup.participation(), round, [str(i) for i in range(1260)], History(),
            cohort_size=60, key=NoiseKey.simulation(1000).choices,
        )  # fmt: skip
        assert users is not None
        return np.array(sorted(int(user) for user in users))

    monkeypatch.setattr(RoundBatches, "batch", drawn)
    assert apart(there, central(point, monkeypatch), start) < ROUNDING


def test_the_folder_of_the_data_goes_along(tmp_path) -> None:
    assert printed(POINT, tmp_path)["data-dir"] == str(tmp_path)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
