"""What stands beside the code is true of it: paths that CONTRIBUTING.md names, the version to cite, what is locked."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import fedcgd

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("", "fedcgd", "strategies", "simulations")
PATH = re.compile(r"`((?:fedcgd|strategies|simulations|tests|docs)/[\w/.]*|[\w/]+/\w+\.py)`")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "README.md"])
def test_every_path_that_is_named_is_there(page: str) -> None:
    named = PATH.findall((ROOT / page).read_text())
    assert [path for path in named if not any((ROOT / folder / path).exists() for folder in FOLDERS)] == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "README.md", "CHANGELOG.md"])
def test_every_link_within_the_repository_leads_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_what_to_cite_is_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (fedcgd.__version__, PROJECT["license"])
    assert f"## {fedcgd.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_a_release_is_published_by_a_tag_alone_and_by_no_token() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    jobs = yaml.safe_load(workflow)["jobs"]
    publish = jobs["publish"]
    assert (publish["if"], publish["environment"]["name"]) == ("github.event_name == 'push'", "pypi")
    assert [name for name, job in jobs.items() if "write" in job["permissions"].values()] == ["publish"]
    assert "secrets." not in workflow
    used = [step.get("uses", "").partition("@")[0] for step in publish["steps"]]
    assert {"actions/attest-build-provenance", "actions/attest-sbom", "pypa/gh-action-pypi-publish"} <= set(used)


def test_the_ranges_hold_what_is_installed_and_the_lock_names_no_index() -> None:
    """pip itself refuses a lock without hashes, or with two versions of a package."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for one in (Requirement(text) for part in lists for text in part):
        if one.name != PROJECT["name"] and (one.marker is None or one.marker.evaluate()):
            assert one.specifier.contains(version(one.name), prereleases=True), f"{one}: make lock"
    for lock in (ROOT / "requirements").glob("*.txt"):
        assert not re.search(r"https?:|file:|--(extra-)?index-url|--find-links", lock.read_text())
