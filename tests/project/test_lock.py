"""The lock: every requirement has one version and hashes, fits the ranges of pyproject.toml, and comes from no named index."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = {path.stem: path.read_text() for path in sorted((ROOT / "requirements").glob("*.txt"))}
PYTHONS = ("3.11", "3.12", "3.13")


def entries(content: str) -> list[tuple[Requirement, int]]:
    """(requirement, number of its hashes), in the order of the file."""
    joined = re.sub(r" *\\\n *", " ", re.sub(r"^#.*\n", "", content, flags=re.MULTILINE))
    parts = [line.partition(" --hash=") for line in joined.splitlines()]
    return [(Requirement(named), (mark + rest).count("--hash=sha256:")) for named, mark, rest in parts]


def locked(python: str) -> dict[str, str]:
    """Version by name on Linux with this Python, from `dev.txt` and `cuda.txt`."""
    environment = {"python_version": python, "python_full_version": f"{python}.5", "sys_platform": "linux"}
    environment |= {
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
    }
    found: dict[str, str] = {}
    for name in ("dev", "cuda"):
        for requirement, _ in entries(FILES[name]):
            if requirement.marker is None or requirement.marker.evaluate(environment):
                assert requirement.name not in found
                (one,) = requirement.specifier
                found[requirement.name] = one.version
    return found


def wanted() -> list[Requirement]:
    """What the project asks for with every extra, its references to own extras aside."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return [one for part in lists for one in map(Requirement, part) if one.name != PROJECT["name"]]


def test_there_are_the_files_that_make_reads() -> None:
    assert FILES.keys() == {"cpu", "cuda", "dev"}
    for name in FILES:
        assert f"requirements/{name}.txt" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("name", FILES)
def test_each_has_one_version_and_hashes_and_no_index(name: str) -> None:
    for requirement, hashes in entries(FILES[name]):
        assert [one.operator for one in requirement.specifier] == ["=="], requirement
        assert hashes, requirement
        assert requirement.url is None
    assert not re.search(r"https?:|file:|--(extra-)?index-url|--find-links", FILES[name])


@pytest.mark.parametrize("python", PYTHONS)
def test_the_ranges_hold_what_is_locked(python: str) -> None:
    found = locked(python)
    for one in wanted():
        version = found[canonicalize_name(one.name)]
        assert one.specifier.contains(version, prereleases=True), f"{one} does not allow {version}: make lock"


def test_pytorch_without_cuda_is_of_the_same_version_and_there_for_every_python() -> None:
    ((torch, hashes),) = entries(FILES["cpu"])
    assert str(torch.specifier) == f"=={locked('3.11')['torch']}+cpu"
    assert hashes == len(PYTHONS)
    assert not any(name.startswith(("nvidia-", "cuda-")) for name in (one.name for one, _ in entries(FILES["dev"])))
