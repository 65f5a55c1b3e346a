"""The example app before and after: few lines differ, the page shows them, and both run as they stand."""

import difflib
import importlib
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from command_line import run
from fake_grid import FakeGrid, FakeNode
from flwr.app import Context, RecordDict

from fedcgd.noise.keys import NoiseKey
from fedcgd_simulations.flower_runs import flower_environment, free_port, local_superlink, stop

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
def _app(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(EXAMPLES / f"flower_{request.param}")
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "digits_app"]:
        del sys.modules[name]


@pytest.mark.parametrize("_app", ["before", "after"], indirect=True)
@pytest.mark.usefixtures("_app")
def test_both_apps_run(request: pytest.FixtureRequest) -> None:
    client, server, task = (
        importlib.import_module(f"digits_app.{name}") for name in ("client_app", "server_app", "task")
    )
    nodes = {i: FakeNode(client.app, config={"partition-id": i, "num-partitions": NODES}) for i in range(NODES)}
    server.app(FakeGrid(nodes, CONFIG), Context(1, 0, {}, RecordDict(), dict(CONFIG)))
    check_model(Path(), task.Net())
    if request.node.callspec.params["_app"] == "after":
        check_ledger(Path(), rounds=2)


@pytest.mark.parametrize("_app", ["after"], indirect=True)
@pytest.mark.usefixtures("_app")
def test_the_private_app_learns() -> None:
    """As printed, but for processes: at ε = 8 the example ended at guessing while it had ten users."""
    client, server, task = (
        importlib.import_module(f"digits_app.{name}") for name in ("client_app", "server_app", "task")
    )
    config = tomllib.loads((EXAMPLES / "flower_after" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    [count] = re.findall(r"num-supernodes=(\d+)", PAGE[: PAGE.index("## The nodes")])
    partitions = {"num-partitions": int(count)}
    nodes = {i: FakeNode(client.app, config={"partition-id": i} | partitions) for i in range(int(count))}
    server.app(FakeGrid(nodes, config), Context(1, 0, {}, RecordDict(), config))
    model = task.Net()
    model.load_state_dict(torch.load("final_model.pt", weights_only=True))
    assert task.test(model, task.load_test_data())[1] > 0.75
    found = run("ledger", "verify", "run.db", "--json")
    assert json.loads(found.stdout)["guarantee"]["epsilon"] < 8.001


def test_a_copy_with_a_name_of_its_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the commands of the page, but for the last."""
    [commands] = re.findall(r"^```bash\n(cp -r .*?)^flwr run my-app ", PAGE, re.MULTILINE | re.DOTALL)
    shutil.copytree(EXAMPLES / "flower_after", tmp_path / "examples" / "flower_after")
    subprocess.run(["bash", "-e"], input=commands, text=True, cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "my-app")
    app = tomllib.loads((tmp_path / "my-app" / "pyproject.toml").read_text())
    assert app["project"]["name"] == "my-app"
    components = app["tool"]["flwr"]["app"]["components"].values()
    server, client = (importlib.import_module(name.split(":")[0]).app for name in components)
    nodes = {i: FakeNode(client, config={"partition-id": i, "num-partitions": NODES}) for i in range(NODES)}
    server(FakeGrid(nodes, CONFIG), Context(1, 0, {}, RecordDict(), dict(CONFIG)))
    check_ledger(tmp_path, rounds=2)
    assert not any(name.startswith("digits_app") for name in sys.modules)
    for name in [name for name in sys.modules if name.split(".")[0] == "my_app"]:
        del sys.modules[name]


def check_model(folder: Path, net: torch.nn.Module) -> None:
    saved = torch.load(folder / "final_model.pt", weights_only=True)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(saved, strict=True)
    assert not torch.equal(saved["conv.weight"], start["conv.weight"])
    assert all(torch.isfinite(value).all() for value in saved.values())


def check_ledger(folder: Path, rounds: int) -> None:
    NoiseKey.from_file(folder / "noise.key")  # for nobody else's eyes, or this raises
    done = run("ledger", "verify", folder / "run.db", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["released"] == rounds


def flwr_run(environment: dict[str, str], when: str, federation: list[str]) -> str:
    done = subprocess.run(
        ["flwr", "run", str(EXAMPLES / f"flower_{when}"), *federation, "--stream"],
        env=environment,
        cwd=environment["FLWR_HOME"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout + done.stderr


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_as_printed_in_simulation(when: str, tmp_path: Path) -> None:
    with local_superlink(tmp_path) as environment:
        [federation] = re.findall(r'^flwr run examples/flower_after .*--federation-config "(.*)"$', PAGE, re.MULTILINE)
        shown = flwr_run(environment, when, ["--federation-config", federation])
    assert (tmp_path / "final_model.pt").exists(), shown[-5000:]
    if when == "after":
        check_ledger(tmp_path, rounds=10)
        assert shown.count("counts once") == 1
    check_model(tmp_path, make_net())


def make_net() -> torch.nn.Module:
    sys.path.insert(0, str(EXAMPLES / "flower_before"))
    try:
        return importlib.import_module("digits_app.task").Net()
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.split(".")[0] == "digits_app"]:
            del sys.modules[name]


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_as_printed_on_a_real_superlink(tmp_path: Path) -> None:
    """Ten SuperNodes, each told by its configuration who it is."""
    environment = flower_environment(tmp_path) | {"OMP_NUM_THREADS": "1"}
    fleet = free_port()
    (tmp_path / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{fleet}"\ninsecure = true\n'
    )
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("wb"))

        def begin(*command: str) -> None:
            process = subprocess.Popen(
                command, env=environment, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(stop, process)

        begin("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(fleet))
        time.sleep(10)
        for i in range(NODES):
            begin(
                *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{fleet}", "--port", str(free_port())),
                *("--node-config", f"partition-id={i} num-partitions={NODES}"),
            )
        shown = flwr_run(environment, "after", ["here", "--run-config", "nodes-per-round=5 num-server-rounds=5"])
        deadline = time.monotonic() + 600
        while not (tmp_path / "final_model.pt").exists() and time.monotonic() < deadline:
            time.sleep(2)
    assert (tmp_path / "final_model.pt").exists(), shown[-3000:] + (tmp_path / "log").read_text()[-3000:]
    check_model(tmp_path, make_net())
    check_ledger(tmp_path, rounds=5)
