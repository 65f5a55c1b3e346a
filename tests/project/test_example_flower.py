"""The example app before and after: few lines differ, the page shows them, and both run as they stand."""

import difflib
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import pytest
import torch
from command_line import figures
from fake_grid import FakeGrid, FakeNode
from flwr.app import Context, RecordDict

from fedcgd.noise.keys import NoiseKey

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "guides" / "flower.md").read_text()
CONFIG = {"num-server-rounds": 2, "nodes-per-round": 5, "local-epochs": 1, "learning-rate": 0.1}
NODES = 10


def changes(file: str) -> list[str]:
    """The lines of a file of the app that differ, as `diff` shows them."""
    before, after = ((EXAMPLES / f"flower_{when}" / file).read_text().splitlines() for when in ("before", "after"))
    shown = difflib.unified_diff(before, after, n=0, lineterm="")
    return [line for line in shown if line[0] in "+-" and not line.startswith(("+++", "---"))]


def files() -> list[str]:
    found = [
        {str(path.relative_to(EXAMPLES / f"flower_{when}")) for path in (EXAMPLES / f"flower_{when}").rglob("*.py")}
        for when in ("before", "after")
    ]
    assert found[0] == found[1]
    return [*sorted(found[0]), "pyproject.toml"]


def test_few_lines_differ_and_the_page_shows_them() -> None:
    changed = {file: changes(file) for file in files()}
    assert sum(line.startswith("+") for lines in changed.values() for line in lines) <= 8
    shown = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert "".join(shown).splitlines() == [line for lines in changed.values() for line in lines]


@pytest.fixture
def run_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Runs the app of a folder in this process, with so many nodes; its module `task`."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)

    def run_it(folder: Path, package: str = "digits_app", nodes: int = NODES, config: dict = CONFIG) -> ModuleType:
        monkeypatch.syspath_prepend(folder)
        parts = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"]
        client, server = (resolve_name(parts[name]) for name in ("clientapp", "serverapp"))
        hosts = {i: FakeNode(client, config={"partition-id": i, "num-partitions": nodes}) for i in range(nodes)}
        server(FakeGrid(hosts, config), Context(1, 0, {}, RecordDict(), dict(config)))
        return importlib.import_module(f"{package}.task")

    yield run_it
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("digits_app", "my_app"):
            del sys.modules[name]


def test_the_private_app_learns(run_app: Callable[..., ModuleType]) -> None:
    """As printed, but for processes: at ε = 8 the example ended at guessing while it had ten users."""
    folder = EXAMPLES / "flower_after"
    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    [count] = re.findall(r"num-supernodes=(\d+)", PAGE[: PAGE.index("## The nodes")])
    task = run_app(folder, nodes=int(count), config=config)
    model = task.Net()
    model.load_state_dict(torch.load("final_model.pt", weights_only=True))
    assert task.test(model, task.load_test_data())[1] > 0.75
    assert figures("ledger", "verify", "run.db")["guarantee"]["epsilon"] < 8.001


def test_a_copy_with_a_name_of_its_own_runs(tmp_path: Path, run_app: Callable[..., ModuleType]) -> None:
    """By the commands of the page, but for the last."""
    [commands] = re.findall(r"^```bash\n(cp -r .*?)^flwr run my-app ", PAGE, re.MULTILINE | re.DOTALL)
    shutil.copytree(EXAMPLES / "flower_after", tmp_path / "examples" / "flower_after")
    subprocess.run(["bash", "-e"], input=commands, text=True, cwd=tmp_path, check=True)
    app = tomllib.loads((tmp_path / "my-app" / "pyproject.toml").read_text())
    assert app["project"]["name"] == "my-app"
    assert {name.split(".")[0] for name in app["tool"]["flwr"]["app"]["components"].values()} == {"my_app"}
    run_app(tmp_path / "my-app", "my_app")
    NoiseKey.from_file(tmp_path / "my.key")  # for nobody else's eyes, or this raises
    assert figures("ledger", "verify", "my.db")["released"] == 2
    assert not any(name.startswith("digits_app") for name in sys.modules)
