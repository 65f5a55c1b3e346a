"""What stands beside the code is true of it: paths that CONTRIBUTING.md names, the version to cite, forms that parse."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedcgd

ROOT = Path(__file__).resolve().parents[2]
PATH = re.compile(r"`((?:fedcgd|strategies|simulations|tests|docs)/[\w/.]*)`")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "README.md"])
def test_every_path_that_is_named_is_there(page: str) -> None:
    named = PATH.findall((ROOT / page).read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "README.md", "CHANGELOG.md"])
def test_every_link_within_the_repository_leads_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_what_to_cite_is_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (cited["version"], cited["license"]) == (fedcgd.__version__, project["license"])
    assert f"## {fedcgd.__version__}" in (ROOT / "CHANGELOG.md").read_text()


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs_of(workflow: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(workflow.read_text())["jobs"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_do_no_more_than_they_say_and_use_what_is_pinned(workflow: Path) -> None:
    whole = yaml.safe_load(workflow.read_text())
    assert whole["permissions"] == {}
    for job in whole["jobs"].values():
        assert job["permissions"]
        assert job["timeout-minutes"] <= 180
        for step in job["steps"]:
            if "checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False
    used = re.findall(r"uses: (.*)", workflow.read_text())
    assert used
    assert [one for one in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)] == []


def test_what_workflows_call_is_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "".join(workflow.read_text() for workflow in WORKFLOWS)
    called = {word for line in re.findall(r"run: make ([a-z -]+)", text) for word in line.split()}
    [matrix] = re.findall(r"target: \[(.*)\]", text)
    called |= set(matrix.split(", "))
    assert len(called) >= 6
    assert called <= targets
    assert all((ROOT / path).exists() for path in re.findall(r"\b(?:tools|tests)/[\w/.]+", text))


def test_a_release_is_published_by_a_tag_alone_and_by_no_token() -> None:
    jobs = jobs_of(ROOT / ".github" / "workflows" / "release.yml")
    publish = jobs["publish"]
    assert (publish["if"], publish["environment"]["name"]) == ("github.event_name == 'push'", "pypi")
    assert [name for name, job in jobs.items() if "write" in job["permissions"].values()] == ["publish"]
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()
    used = [step.get("uses", "").partition("@")[0] for step in publish["steps"]]
    assert {"actions/attest-build-provenance", "actions/attest-sbom", "pypa/gh-action-pypi-publish"} <= set(used)
