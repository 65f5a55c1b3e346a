"""The paper's trainings on tiny files in the true formats: run, and gone on with."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from cifar10_files import write_python
from imdb_files import write_imdb
from typer.testing import CliRunner

from fedcgd_experiments import paper, runtime
from fedcgd_experiments.central import check_steps
from fedcgd_experiments.paper import EXAMPLES, STAGES, Stage, chosen
from fedcgd_experiments.results import Results
from fedcgd_simulations.tasks import get_task

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


def test_a_stage_is_run_and_gone_on_with(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "STAGES", (TINY,))
    monkeypatch.setattr(paper, "EXAMPLES", {"cifar10": 45})
    monkeypatch.setattr(paper, "CANDIDATES", 2)
    monkeypatch.setattr(paper, "FINALISTS", 1)
    words = ["--data-dir", str(data), "--results", str(tmp_path / "out"), "--physical-batch", "16"]
    done = CliRunner().invoke(paper.app, words)
    assert done.exit_code == 0, done.output
    assert "ε = 8, lambda-cgd: " in done.output
    rows = Results(tmp_path / "out" / "tiny.jsonl").rows()
    tested = [row for row in rows if row["split"] == "test"]
    assert {row["mechanism"] for row in tested} == {"dp-sgd", "lambda-cgd:0.5"}
    assert len(tested) == 4
    assert len(rows) == 2 * (2 + 1 + 2)  # candidates, the finalist on the other tuning seed, tests
    assert all(0.05 <= row["learning_rate"] <= 0.1 for row in rows)
    before = (tmp_path / "out" / "tiny.jsonl").read_text()
    again = CliRunner().invoke(paper.app, words)
    assert again.exit_code == 0, again.output
    assert (tmp_path / "out" / "tiny.jsonl").read_text() == before


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
        check_steps(
            EXAMPLES[stage.task], -(-EXAMPLES[stage.task] // stage.batch)
        )  # it raises for steps that cannot be made
    # Figure 1 and Tables 1 and 2 time these.
    timed = {"cnn", "wideresnet-40", "vit-b-16", "vit-l-16", "vit-h-14", "lstm", "bert-tiny", "bert-base", "bert-large"}
    assert timed <= set(runtime.MODELS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_times_and_draws(data: Path, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "simulations" / "paper.sh"
    environment = os.environ | {"PHYSICAL_BATCH": "4", "MODELS": "cnn bert-tiny", "RUNTIME_BATCH": "4", "TURNS": "2"}
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
