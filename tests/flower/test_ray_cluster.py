"""A simulation on a Ray cluster of two nodes: all users take part, or, where one node lacks the app's code, none do.

The documentation's programs run on it too: nodes where there are CPUs, with code that Ray brings, and the key with the server.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fedcgd.ledger import verify
from fedcgd_simulations import flower_runs
from fedcgd_simulations.flower_runs import flower_environment, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.flower,
    pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="each node's own folder is found on Linux"),
]

# Flower gives its import path to all nodes, and on one machine they would all find the app. This folder is each process's own.
CODE = "/proc/self/cwd/code"
APP = """
import os, time
from pathlib import Path
import numpy as np
import ray
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from fedcgd_flower import host_users, sequential_training

app = ClientApp()

def users(context):
    time.sleep(2)  # so that both of Ray's nodes are asked
    return [f"u{i}" for i in range(context.node_config["partition-id"], 12, 2)]

def train(model, user, config, context):
    time.sleep(0.5)
    (Path(os.environ["SEEN"]) / f"{user}.{ray.get_runtime_context().get_node_id()}").touch()
    return ArrayRecord({"w": Array(model["w"].numpy() + np.float32(1))})

host_users(app, users, sequential_training(train))
"""
SERVER = """
import sys
import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from fedcgd import LambdaCGD, NoiseKey, Participation, Plan
from fedcgd_flower import CorrelatedNoise
from cluster_app import app

server = ServerApp()

@server.main()
def main(grid, context):
    participation = Participation(rounds=6, min_separation=3)  # the users of one node would do
    plan = Plan(mechanism=LambdaCGD(0.8), participation=participation, clip_norm=0.5, noise_multiplier=2.0, delta=1e-5)
    strategy = CorrelatedNoise(FedAvg(), plan, cohort_size=2, key=NoiseKey.simulation(7), patience=20.0, ledger=sys.argv[1])
    strategy.start(grid, ArrayRecord({"w": Array(np.zeros(6, np.float32))}))

run_simulation(server, app, num_supernodes=2, backend_config={"client_resources": {"num_cpus": 1}})
"""


def test_the_users_of_both_nodes_take_part(tmp_path: Path) -> None:
    run, seen = simulate(tmp_path, code_on_second=True)
    assert run.returncode == 0, run.stdout
    users, nodes = zip(*(name.split(".") for name in seen), strict=True)
    assert sorted(users) == sorted(f"u{i}" for i in range(12))
    assert len(set(nodes)) == 2
    found = verify(tmp_path / "run.db")
    assert (found.problems, found.released) == ((), 6)


def test_without_the_code_on_the_second_node_no_round_begins(tmp_path: Path) -> None:
    run, seen = simulate(tmp_path, code_on_second=False)
    assert run.returncode != 0
    assert re.search(r"^ValueError: after \d+ s: ", run.stdout, re.MULTILINE), run.stdout
    assert seen == []


PAGE = (Path(__file__).parents[2] / "docs" / "simulations.md").read_text()
FILES = dict(re.findall(r'^```python title="(\S+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))


def test_the_programs_of_the_page_bring_the_code_to_where_the_cpus_are_and_the_key_nowhere(tmp_path: Path) -> None:
    trained = "    return ArrayRecord("
    assert trained in FILES["app/people.py"]
    seen = (
        "    import os, pathlib, ray\n"
        "    (pathlib.Path(os.environ['SEEN']) / user).write_text(ray.get_runtime_context().get_node_id())\n"
    )
    (tmp_path / "seen").mkdir()
    for name in ("server/app", "first", "second"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "server" / "app" / "people.py").write_text(FILES["app/people.py"].replace(trained, seen + trained))
    (tmp_path / "server" / "on_a_cluster.py").write_text(FILES["on_a_cluster.py"])
    environment = flower_environment(tmp_path / "home") | {"SEEN": str(tmp_path / "seen")}
    with ray_cluster(environment, {tmp_path / "first": 0, tmp_path / "second": 1}) as (address, ray_folder):
        path = f"app{os.pathsep}{environment.get('PYTHONPATH', '')}"
        run = run_program(
            "on_a_cluster.py", tmp_path / "server", environment | {"RAY_ADDRESS": address, "PYTHONPATH": path}
        )
        assert run.returncode == 0, run.stdout
        assert {path.name for path in ray_folder.rglob("people.py")} == {"people.py"}
        assert [path for name in ("noise.key*", "run.db*") for path in ray_folder.rglob(name)] == []
    users = {path.name: path.read_text() for path in (tmp_path / "seen").iterdir()}
    assert set(users) == {f"user {i}" for i in range(12)}
    assert len(set(users.values())) == 1
    found = verify(tmp_path / "server" / "run.db")
    assert (found.problems, found.released, found.run.simulated) == ((), 6, False)
    assert (tmp_path / "server" / "noise.key").exists()


def simulate(folder: Path, *, code_on_second: bool) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """How the server's program ended, and what the users' training left: USER.NODE OF RAY."""
    (folder / "seen").mkdir()
    (folder / "server.py").write_text(SERVER)
    for name, has_code in (("server", True), ("first", True), ("second", code_on_second)):
        (folder / name / "code").mkdir(parents=True)
        if has_code:
            (folder / name / "code" / "cluster_app.py").write_text(APP)
    environment = flower_environment(folder / "home") | {"SEEN": str(folder / "seen")}
    with ray_cluster(environment, {folder / "first": 1, folder / "second": 1}) as (address, _):
        path = f"{CODE}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        environment |= {"RAY_ADDRESS": address, "PYTHONPATH": path}
        run = run_program(str(folder / "server.py"), folder / "server", environment, str(folder / "run.db"))
    return run, [path.name for path in (folder / "seen").iterdir()]


def run_program(
    program: str, folder: Path, environment: dict[str, str], *given: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, program, *given],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )


@contextmanager
def ray_cluster(environment: dict[str, str], folders: dict[Path, int]) -> Iterator[tuple[str, Path]]:
    """A node for each folder, where it runs, of so many CPUs; yields the cluster's address and the folder that Ray writes to."""
    port = free_port()
    address, mark = f"127.0.0.1:{port}", f"{os.getpid()}-{port}"
    options = ["--object-store-memory=80000000", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    with ExitStack() as stack:
        # Ray's sockets lie there, and their paths must be short.
        ray_folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
        stack.callback(flower_runs._end_marked, f"{flower_runs._MARK}={mark}")
        for number, (folder, cpus) in enumerate(folders.items()):
            where = [f"--address={address}"]
            if not number:
                where = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={ray_folder}"]
            subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", "start", f"--num-cpus={cpus}", *where, *options],
                env=environment | {flower_runs._MARK: mark},
                cwd=folder,
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=120,
            )
        yield address, Path(ray_folder)
