"""The paper's trainings on tiny files in the true formats: run, and gone on with."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from cifar10_files import write_python
from click.testing import CliRunner
from imdb_files import write_imdb

from fedcgd_experiments import paper_studies, runtime
from fedcgd_experiments.__main__ import app
from fedcgd_experiments.central import check_steps
from fedcgd_experiments.comparison import compare
from fedcgd_experiments.paper_studies import EXAMPLES, PAPER_STUDIES, paper_study
from fedcgd_experiments.plots import lambdas
from fedcgd_experiments.point import CentralPoint
from fedcgd_experiments.results import Results, known
from fedcgd_experiments.study import Log, missing
from fedcgd_experiments.tables import Found
from fedcgd_simulations.tasks import get_task

pytestmark = pytest.mark.usefixtures("threads_as_they_were", "own_cache")


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


def test_the_papers_own_values_need_no_tuning() -> None:
    """Table 3 of arXiv:2601.22334: seven methods at six ε, three seeds."""
    study = PAPER_STUDIES["table-3"]
    points = missing(study, {})
    assert len(points) == 126
    assert {(p.split, p.clip_norm, p.epochs, p.steps) for p in points} == {("test", 8.0, 10, 352)}
    found = {(p.mechanism, p.sampling, p.epsilon): p.learning_rate for p in points if p.seed == 1000}
    assert found["lambda-cgd:0.95", "balls-in-bins", 4.0] == 0.5
    assert found["lambda-cgd:0.8", "balls-in-bins", 0.25] == 0.05
    assert found["lambda-cgd:0.977", "balls-in-bins", 2.0] == 0.2  # BandInvMF of two bands
    assert found["dp-sgd", "poisson", 0.5] == 0.08
    assert found["bisr:16", "balls-in-bins", 0.5] == 0.1


def test_every_lambda_has_rates_of_its_own_and_a_place_in_a_picture(data: Path, tmp_path: Path, monkeypatch) -> None:
    study = replace(
        PAPER_STUDIES["figure-2-cifar10-1024"], settings=({"epsilon": 4.0, "epochs": 10},), tests=(1000, 1001)
    )
    assert len(study.arms) == 8
    for arm in study.arms:
        points = study.points(arm, study.settings[0])
        assert {p.mechanism for p in points} == {arm}
        assert len({p.learning_rate for p in points}) == 4
    monkeypatch.setitem(PAPER_STUDIES, study.name, study)
    results = Results(tmp_path / f"{study.name}.jsonl")
    while todo := missing(study, known(results.rows(), CentralPoint)):
        accuracy = {p: 0.5 + 0.1 * float(p.mechanism.partition(":")[2] or 0) + p.seed % 10 / 100 for p in todo}
        claim = {"noise_multiplier": 1.0, "adjacency": "a", "method": "m", "seconds": 1.0}
        results.append([asdict(p) | claim | {"accuracy": accuracy[p]} for p in todo])
    figure = lambdas(Found.read(tmp_path, study.name))
    [line] = [container.lines[0] for container in figure.axes[0].containers]
    assert line.get_xdata().tolist() == [0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.975]
    assert line.get_ydata()[[0, -1]] == pytest.approx([50.5, 60.25])
    done = CliRunner().invoke(app, ["plot", "--results", str(tmp_path), "--output", str(tmp_path / "plots")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "plots" / f"{study.name}.png").exists()
