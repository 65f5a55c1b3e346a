"""The paper's trainings on tiny files in the true formats: planned from what is measured, run, and gone on with."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cifar10_files import write_python
from imdb_files import write_imdb
from typer.testing import CliRunner

from fedcgd_experiments import paper, runtime
from fedcgd_experiments.paper import STAGES, Cost, Stage, chosen, cost_name, measure, measured
from fedcgd_experiments.results import Results
from fedcgd_simulations.tasks import get_task

HEAVY = (
    pytest.mark.slow,
    pytest.mark.timeout(900),
)  # a busy core takes minutes for models of a hundred million weights

TINY = Stage(
    name="tiny", shows="nothing", task="cifar10", model="cnn", batch=45, epochs=1, mechanisms=("dp-sgd", "lambda-cgd:0.5"),
    epsilons=(8.0,), rates=(0.05, 0.1), tuning_seeds=2, test_seeds=2,
)  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """CIFAR-10 with 50 training pictures, IMDB with 20 reviews."""
    write_python(tmp_path / "data" / "cifar-10-batches-py")
    write_imdb(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_stage_is_planned_run_and_gone_on_with(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "STAGES", (TINY,))
    monkeypatch.setattr(paper, "CANDIDATES", 2)
    monkeypatch.setattr(paper, "FINALISTS", 1)

    def here(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        """What a process of its own would print."""
        done = CliRunner().invoke(paper.app, words[3:])
        return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)

    monkeypatch.setattr(paper.subprocess, "run", here)
    words = ["--data-dir", str(data), "--results", str(tmp_path / "out"), "--physical-batch", "16"]
    done = CliRunner().invoke(paper.app, ["run", *words])
    assert done.exit_code == 0, done.output
    assert "about" in done.output
    assert "hours" in done.output
    (cost,) = json.loads((tmp_path / "out" / "costs.json").read_text()).values()
    assert cost["examples"] == 45
    assert cost["memory"] > 2**26  # PyTorch alone has more
    assert "ε = 8, lambda-cgd: " in done.output
    rows = Results(tmp_path / "out" / "tiny.jsonl").rows()
    tested = [row for row in rows if row["split"] == "test"]
    assert {row["mechanism"] for row in tested} == {"dp-sgd", "lambda-cgd:0.5"}
    assert len(tested) == 4
    assert len(rows) == TINY.trainings
    assert all(0.05 <= row["learning_rate"] <= 0.1 for row in rows)
    before = (tmp_path / "out" / "tiny.jsonl").read_text()
    monkeypatch.setattr(paper.subprocess, "run", lambda *_, **__: pytest.fail("it was measured again"))
    again = CliRunner().invoke(paper.app, ["run", *words])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "out" / "tiny.jsonl").read_text() == before


def test_hours_are_steps_times_what_a_step_took() -> None:
    cost = Cost(step=0.5, besides=4.0, examples=100, memory=0)
    assert TINY.trainings == 2 * (20 + 3 * 1 + 2)  # candidates, finalists on the other tuning seed, tests
    assert cost.hours(TINY) == pytest.approx(50 * (4.0 + 3 * 0.5) / 3600)
    assert cost.hours(replace(TINY, epochs=10)) == pytest.approx(50 * (4.0 + 30 * 0.5) / 3600)


def test_what_is_measured_is_a_step(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training takes 3 s and 2 s a step; the first one, which warms up, more."""
    warm: list[int] = []

    def pretend(task, model, batch, steps, data_dir, physical_batch) -> float:
        warm.append(steps)
        return 3.0 + 2.0 * steps + (10.0 if len(warm) == 1 else 0.0)

    monkeypatch.setattr(paper, "_train", pretend)
    cost = measure("cifar10", "cnn", 20, data_dir=str(data), physical_batch=4)
    assert (cost.step, cost.besides, cost.examples) == (2.0, 3.0, 45)


@pytest.mark.parametrize(
    ("task", "model"),
    [
        ("cifar10", "cnn"),
        ("imdb", "bert-tiny"),
        *(pytest.param("imdb", model, marks=HEAVY) for model in ("lstm", "bert-base")),
        *(pytest.param("cifar10", model, marks=HEAVY) for model in ("wideresnet-40", "vit-b-16")),
    ],
)
@pytest.mark.filterwarnings("ignore:NO PRETRAINED WEIGHTS")
def test_each_model_can_be_measured(task: str, model: str, data: Path) -> None:
    cost = measure(task, model, 4, data_dir=str(data), physical_batch=2)
    assert cost.memory > 0
    assert cost.examples == {"cifar10": 45, "imdb": 18}[task]


def test_a_measurement_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ValueError: CIFAR-10 not found")
    monkeypatch.setattr(paper.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"cifar10 cnn in batches of 45 could not be measured: ValueError: CIFAR-10"):
        measured([TINY], tmp_path / "costs.json", data_dir=str(tmp_path), physical_batch=4)
    assert not (tmp_path / "costs.json").exists()


def test_stages_are_chosen_by_how_they_begin() -> None:
    assert {stage.name for stage in chosen(["figure-8"])} == {"figure-8", "figure-8-poisson"}
    assert chosen(None) == STAGES
    with pytest.raises(Exception, match="no stage begins with figure-9"):
        chosen(["figure-9"])


def test_every_figure_with_trainings_has_a_stage_and_every_stage_a_model() -> None:
    shown = {word for stage in STAGES for word in stage.shows.replace(",", " ").split()}
    assert {"2", "3", "4", "7", "8"} <= shown
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    for stage in STAGES:
        get_task(stage.task, model=stage.model)  # it raises for a model that there is not
        assert cost_name(stage).startswith(stage.task)
    # Figure 1 and Tables 1 and 2 time these.
    timed = {"cnn", "wideresnet-40", "vit-b-16", "vit-l-16", "vit-h-14", "lstm", "bert-tiny", "bert-base", "bert-large"}
    assert timed <= set(runtime.MODELS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_plans_times_and_draws(data: Path, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "simulations" / "paper.sh"
    environment = os.environ | {"PHYSICAL_BATCH": "4", "MODELS": "cnn bert-tiny", "RUNTIME_BATCH": "4", "TURNS": "2"}
    plan = subprocess.run(
        ["bash", str(script), str(data), str(tmp_path / "out"), "figure-2-cifar10-128"],
        env=environment | {"PLAN": "1", "COLUMNS": "200"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert plan.returncode == 0, plan.stderr
    assert "figure-2-cifar10-128" in plan.stdout
    assert "hours on" in plan.stdout
    done = subprocess.run(
        ["bash", str(script), str(data), str(tmp_path / "out"), "runtime", "figure-5"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    timed = [json.loads(line) for line in (tmp_path / "out" / "runtime.jsonl").read_text().splitlines()]
    assert [record["model"] for record in timed] == ["cnn", "bert-tiny"]
    drawn = {path.name for path in (tmp_path / "out" / "plots").iterdir()}
    assert {"paper-correlation.png", "paper-normalisation.png", "runtime.png"} <= drawn
    without = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert (without.returncode, "DATA" in without.stdout) == (2, True)
