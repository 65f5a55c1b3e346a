"""The paper's trainings on tiny files in the true formats: run, and gone on with."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from cifar10_files import write_python
from click.testing import CliRunner
from imdb_files import write_imdb

from fedcgd_experiments import paper_studies, runtime
from fedcgd_experiments.__main__ import _chosen, app
from fedcgd_experiments.central import check_steps
from fedcgd_experiments.comparison import compare
from fedcgd_experiments.paper_studies import EXAMPLES, PAPER_STUDIES, paper_study
from fedcgd_experiments.point import CentralPoint
from fedcgd_experiments.results import Results
from fedcgd_experiments.study import Log
from fedcgd_simulations.tasks import get_task

pytestmark = pytest.mark.usefixtures("threads_as_they_were")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """CIFAR-10 with 50 training pictures, IMDB with 20 reviews."""
    write_python(tmp_path / "data" / "cifar-10-batches-py")
    write_imdb(tmp_path / "data")
    return tmp_path / "data"


def test_a_study_is_run_and_gone_on_with(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_studies, "EXAMPLES", {"cifar10": 45})
    study = paper_study(
        "tiny", "nothing", task="cifar10", model="cnn", batch=45, epochs=1, mechanisms=("dp-sgd", "lambda-cgd:0.5"),
        epsilons=(8.0,),
    )  # fmt: skip
    study = replace(
        study, axes={"learning_rate": Log(0.05, 0.1)}, candidates=2, finalists=1, tuning=(0, 1), tests=(1000, 1001)
    )
    monkeypatch.setitem(PAPER_STUDIES, "tiny", study)
    words = ["run", "tiny", "--data-dir", str(data), "--results", str(tmp_path / "out"), "--physical-batch", "16"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "| lambda-cgd | " in done.output
    assert "ε at δ = 1e-05; adjacency: zero out one user; sampling: none" in done.output
    rows = Results(tmp_path / "out" / "tiny.jsonl").rows()
    tested = [row for row in rows if row["split"] == "test"]
    assert {row["mechanism"] for row in tested} == {"dp-sgd", "lambda-cgd:0.5"}
    assert len(tested) == 4
    assert len(rows) == 2 * (2 + 1 + 2)  # candidates, the finalist on the other tuning seed, tests
    assert all(0.05 <= row["learning_rate"] <= 0.1 for row in rows)
    before = (tmp_path / "out" / "tiny.jsonl").read_text()
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0, again.output
    assert (tmp_path / "out" / "tiny.jsonl").read_text() == before


def test_figures_are_chosen_by_how_they_begin() -> None:
    assert [study.name for study in _chosen(["figure-8"])] == ["figure-8-poisson", "figure-8"]
    assert not any(study.name in PAPER_STUDIES for study in _chosen(None))
    with pytest.raises(Exception, match="unknown study figure-9; the studies are digits"):
        _chosen(["figure-9"])


def test_every_figure_with_trainings_has_a_study_and_every_study_a_model() -> None:
    shown = {word for study in PAPER_STUDIES.values() for word in study.title.replace(",", " ").split()}
    assert {"2", "3", "4", "7", "8"} <= shown
    for study in PAPER_STUDIES.values():
        point = study.points(next(iter(study.arms)), study.settings[0])[0]
        assert isinstance(point, CentralPoint)
        get_task(point.task, model=point.model)  # it raises for a model that there is not
        check_steps(EXAMPLES[point.task], point.steps)  # it raises for steps that cannot be made
    assert PAPER_STUDIES["figure-4"].secret("blt") == "sampling"
    assert compare(PAPER_STUDIES["figure-4"], []) == []  # no baseline among its arms
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
