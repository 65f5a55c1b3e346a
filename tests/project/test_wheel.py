"""The wheel holds the two packages and nothing else, and is one of Python alone where there is no compiler."""

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fedcgd

ROOT = Path(__file__).resolve().parents[2]


def built(tree: Path, folder: Path, **variables: str) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, tree]
    finished = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


def test_only_the_packages_are_in_it(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {"fedcgd", "fedcgd_flower"} <= tops
    assert all(top in ("fedcgd", "fedcgd_flower") or top.endswith(".dist-info") for top in tops)
    assert {"fedcgd/py.typed", "fedcgd_flower/py.typed"} <= set(names)
    level = "x86-64-v3" if platform.machine() == "x86_64" else platform.machine()
    assert {f"fedcgd/native/vector_kernels-{level}.shared", f"fedcgd/noise/normals-{level}.shared"} <= set(names)
    assert platform.machine() in wheel.name


def test_its_description_is_the_readme_and_every_link_leads_somewhere(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    found = email.message_from_bytes(archive.read(name))
    text = found.get_payload(decode=True).decode()
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'\b(?:src|srcset)="([^"]+)"', text)
    assert len(links) == len(re.findall(r"\]\(|\bsrc(?:set)?=", readme)) > 40
    assert [link for link in links if not link.startswith("https://")] == []
    ours = f"https://github.com/fedcgd/fedcgd/blob/v{fedcgd.__version__}/"
    paths = [link.removeprefix(ours).partition("#")[0] for link in links if link.startswith(ours)]
    pictures = [link.partition(f"/v{fedcgd.__version__}/")[2] for link in links if "raw.githubusercontent" in link]
    assert len(paths) > 40
    assert len(pictures) == 2
    assert [path for path in paths + pictures if not (ROOT / path).exists()] == []
    assert text.partition("\n")[0] == readme.partition("\n")[0]


def test_without_a_compiler_it_is_a_wheel_of_python_alone(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for folder in ("fedcgd", "strategies"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("*.shared"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    path = built(tree, tmp_path, CC="no-such-compiler")
    assert path.name.endswith("-py3-none-any.whl")
    assert not any(name.endswith(".shared") for name in zipfile.ZipFile(path).namelist())
