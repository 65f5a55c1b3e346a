"""The files for containers: the installed Flower has what they start, the SuperLink has no key, and their commands make a run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from documented_deployment import COMMANDS, followed

from fedcgd.ledger import verify
from fedcgd_simulations.flower_runs import APP, free_port

FILES = Path(__file__).resolve().parents[2] / "examples" / "containers"
SERVICES = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]
BIN = Path(sys.executable).parent


def pods() -> dict[str, dict]:
    """The pods of the Kubernetes files, by name."""
    documents = [
        one for name in ("kubernetes.yaml", "silo.yaml") for one in yaml.safe_load_all((FILES / name).read_text())
    ]
    return {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in documents if "template" in one["spec"]}


@pytest.mark.parametrize("program", ["flower-superlink", "flower-superexec", "flower-supernode"])
def test_the_installed_flower_has_the_options(program: str) -> None:
    known = subprocess.run([BIN / program, "--help"], capture_output=True, text=True, check=True).stdout
    commands = [service["command"] for service in SERVICES.values()] + [
        pod["containers"][0]["args"] for pod in pods().values()
    ]
    mine = [command for command in commands if command[0] == program]
    assert len(mine) >= 2
    for option in (word.split("=")[0] for command in mine for word in command[1:]):
        assert re.search(rf"{option}\b", known), option


def test_no_image_runs_as_root_and_the_keepers_is_of_packages_with_hashes() -> None:
    page = (FILES.parents[1] / "docs" / "guides" / "keepers.md").read_text()
    (keeper,) = re.findall(r"```dockerfile\n(.*?)```", page, re.DOTALL)
    for image in (keeper, (FILES / "Dockerfile").read_text()):
        lines = image.splitlines()
        (user,) = (number for number, line in enumerate(lines) if line.startswith("USER "))
        made = lines[user].split()[1]
        assert made != "root"
        assert any("useradd" in line and made in line.split() for line in lines[:user])
        assert not any(line.startswith("RUN") for line in lines[user:])
    assert "--require-hashes" in keeper


def test_the_image_is_of_the_package_alone_and_no_key_is_copied_or_committed() -> None:
    """`COPY . /source` took the keys along that the page has made in this folder, and the whole environment of Python."""
    copied = [line.split()[1:-1] for line in (FILES / "Dockerfile").read_text().splitlines() if line.startswith("COPY")]
    package = {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "fedcgd", "strategies"}
    assert {name for names in copied for name in names if names[0] != "--from=build"} == package
    secrets = [
        line.split("file: ")[1].strip(" }")
        for line in (FILES / "compose.yaml").read_text().splitlines()
        if "{file: " in line
    ]
    assert len(secrets) == 7
    for name in ("ca.key", "silo0.key.pub", *secrets):
        ignored = subprocess.run(["git", "check-ignore", "-q", f"examples/containers/{name}"], cwd=FILES.parents[1])
        assert ignored.returncode == 0, name


def test_nobody_but_the_server_app_has_the_volume_of_the_key() -> None:
    with_key = [name for name, service in SERVICES.items() if "run:/srv/run" in service.get("volumes", [])]
    assert with_key == ["server-app"]
    mounted = {
        name: {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]} for name, pod in pods().items()
    }
    assert [name for name, paths in mounted.items() if "/srv/run" in paths] == ["server-app"]
    assert all(service["cap_drop"] == ["ALL"] and service["read_only"] for service in SERVICES.values())


@pytest.mark.slow
@pytest.mark.flower
@pytest.mark.timeout(900)
def test_the_commands_of_the_services_make_a_run(tmp_path: Path) -> None:
    """Each service's command as a process of this machine, with its secrets and volumes in one folder, after docs/deploy.md."""
    settings, certificates, link, *_ = COMMANDS.findall((FILES.parents[1] / "docs" / "deploy.md").read_text())
    port = free_port()

    def service(name: str, *more: str) -> str:
        command = shlex.join([*SERVICES[name]["command"], *more])
        for theirs, ours in {
            "/run/secrets/silo.key": f"{tmp_path}/{name}.key", "/run/secrets/superexec": f"{tmp_path}/superexec.secret",
            "/run/secrets": str(tmp_path), "/srv/link": str(tmp_path), "superlink:9443": f"127.0.0.1:{port}",
            "0.0.0.0": "127.0.0.1", "--port=9443": f"--port={port}",
        }.items():  # fmt: skip
            command = command.replace(theirs, ours)
        return f"{command} > {name}.log 2>&1 &"

    script = ["set -eu", settings, certificates, "head -c 32 /dev/urandom > superexec.secret", service("superlink")]
    script += [link[link.index("cat >") :], service("server-app")]
    for silo in ("silo0", "silo1", "silo2"):
        script.append(f"flwr supernode register {silo}.key.pub production --name {silo}")
        script.append(service(silo, "--host=127.0.0.1", f"--port={free_port()}"))
    run_config = "rounds=2 participations=1 key-file='$PWD/noise.key' ledger='$PWD/run.db' results='$PWD/result.json'"
    script += [f'flwr run "$APP" production --run-config "{run_config}"', "until [ -f result.json ]; do sleep 1; done"]
    code, log, _ = followed("\n".join(script), tmp_path, {"PORT": str(port), "APP": str(APP)}, 800)
    assert code == 0, log
    found = verify(tmp_path / "run.db")
    assert (found.released, found.problems) == (2, ())
    assert (tmp_path / "state.db").stat().st_mode & 0o077 == 0
