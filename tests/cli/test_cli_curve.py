"""`fedcgd curve`: from a model and public examples to a spectrum, and to a mechanism file that every other command takes."""

import json
from pathlib import Path

import command_line
import pytest
from click.testing import Result

from fedcgd import LambdaCGD, Participation
from fedcgd.optimisation import catalogue
from fedcgd.optimisation.mechanism_json import read_mechanism
from fedcgd.quadratic import Quadratic, Spectrum

MODULE = '''
import torch
from torch import nn
from torch.nn import functional
from fedcgd.curvature.public import Public

def classes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return Public(model, functional.cross_entropy, torch.randn(30, 6), classes=3)

def nothing():
    return 3
'''  # fmt: skip
RUN = ["--rounds", "24", "--separation", "8", "--learning-rate", "0.5"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the user's module in it, of a name that no other test has imported."""
    (tmp_path / f"{tmp_path.name}_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDCGD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def module(tmp_path: Path) -> str:
    return f"{tmp_path.name}_model"


def run(*words: str) -> Result:
    return command_line.run("curve", *words)


def test_from_a_users_model_to_noise_that_every_command_takes(module: str) -> None:
    words = [f"{module}:classes", "-o", "spectrum.json", "--eigenvalues", "5", "--clip-norm", "0.3", "--json"]
    result = run(*words, "--mechanism", "noise-curve:4", *RUN, "--mechanism-file", "noise.json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    spectrum = Spectrum.load("spectrum.json")
    assert figures["dimension"] == spectrum.dimension == 6 * 8 + 8 + 8 * 3 + 3
    assert figures["largest"] == spectrum.largest > 0
    assert figures["mechanism"] == "noise-curve:4"
    assert (figures["measured_on"]["examples"], figures["measured_on"]["clip_norm"]) == (30, 0.3)
    others = (json.loads(run(*words, *more).stdout) for more in (["--clip-norm", "9"], ["--pretraining-epochs", "0"]))
    assert len({figures["largest"], *(other["largest"] for other in others)}) == 3
    assert figures["measured_on"]["labels"] == "random"
    assert figures["measured_on"]["source"] == f"{module}:classes"
    who = Participation(rounds=24, min_separation=8)
    expected = catalogue.mechanism("noise-curve:4", who, curvature=Quadratic(spectrum, 0.5))
    assert read_mechanism("noise.json") == expected
    budget = ["--rounds", "24", "--separation", "8", "--epsilon", "2", "--delta", "1e-5", "--json"]
    calibrated = command_line.run("account", "--mechanism", "file:noise.json", *budget)
    assert json.loads(calibrated.stdout)["mechanism"] == "noise-curve"


def test_a_spectrum_serves_for_many_runs(module: str) -> None:
    run(f"{module}:classes", "-o", "spectrum.json", "--eigenvalues", "5")
    again = run("--spectrum", "spectrum.json", "--mechanism", "lambda-cgd", *RUN, "--mechanism-file", "noise.json")
    assert again.exit_code == 0, again.output
    fitted = read_mechanism("noise.json")
    assert isinstance(fitted, LambdaCGD)
    assert f"lambda-cgd:{fitted.lam}" in again.stdout
    assert "--mechanism file:noise.json" in again.stdout
    assert "examples" in again.stdout


def test_a_task_of_the_simulations_is_measured_without_its_labels() -> None:
    words = ["--task", "digits", "--eigenvalues", "3", "--pretraining-epochs", "1", "--examples", "40", "--json"]
    found = json.loads(run(*words).stdout)
    assert (found["dimension"], found["measured_on"]["examples"]) == (650, 40)
    assert found["measured_on"]["public"] == "held-out"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "one of MODULE:FUNCTION, --task and --spectrum"),
        (["{module}"], "a function is written MODULE:FUNCTION, got '{module}'"),
        (["{module}:odd"], "{module} has no 'odd'"),
        (["{module}:nothing"], "returned a int, not a fedcgd.curvature.public.Public"),
        (["no_such_module:classes"], "there is no module no_such_module"),
        (["--spectrum", "none.json"], "none.json"),
        (["--spectrum", "{module}.py"], "holds no spectrum"),
        (["{module}:classes", "--rounds", "3"], "are for a --mechanism to be fitted; give one"),
        (["{module}:classes", "--mechanism", "noise-curve:4", *RUN[:-1], "1e6"], "below 2/μ"),
        (["{module}:classes", "--mechanism", "noise-curve:4"], "give its --rounds and its --learning-rate"),
    ],
)
def test_mistakes_are_explained(words: list[str], says: str, module: str) -> None:
    result = run(*(word.format(module=module) for word in words))
    assert result.exit_code == 2, result.output
    assert says.format(module=module) in " ".join(result.stderr.split())
    assert not result.stdout


def test_the_simulations_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcgd.cli.curve.TASKS", "fedcgd_simulations_gone.public:public_examples")
    result = run("--task", "digits")
    assert result.exit_code == 2
    assert "folder simulations" in " ".join(result.stderr.split())
