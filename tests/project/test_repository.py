"""What stands beside the code is true of it: paths that CONTRIBUTING.md names, the version to cite, forms that parse."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

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


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda form: form.name
)
def test_forms_for_issues_have_what_github_asks_of_them(form: Path) -> None:
    fields = yaml.safe_load(form.read_text())
    if form.name == "config.yml":
        assert all({"name", "url", "about"} <= set(link) for link in fields["contact_links"])
        return
    assert {"name", "description", "body"} <= set(fields)
    ids = [part["id"] for part in fields["body"] if part["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
    assert all(part["attributes"] for part in fields["body"])


def make_test_pythons(pythons: str, path: str) -> subprocess.CompletedProcess[str]:
    """What `make test-pythons` would do."""
    command = ["make", "-n", "test-pythons", f"PYTHONS={pythons}", "VENV=new"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PATH": path})


def test_interpreters_are_found_behind_shims_that_do_not_run(tmp_path: Path) -> None:
    shims, versions = tmp_path / "shims", tmp_path / "versions" / "3.99.1" / "bin"
    for folder in (shims, versions):
        folder.mkdir(parents=True)
    for name, does in (("python3.99", "exit 127"), ("pyenv", f"echo {tmp_path}")):
        (shims / name).write_text(f"#!/bin/sh\n{does}\n")
        (shims / name).chmod(0o755)
    (versions / "python3.99").symlink_to(sys.executable)
    ran = make_test_pythons("python3.99 python3.98", f"{shims}:{os.environ['PATH']}")
    assert ran.returncode == 0, ran.stderr
    assert f"{versions}/python3.99 -m venv new-python3.99" in ran.stdout
    assert "python3.98 is not installed" in ran.stdout


def test_no_interpreter_is_an_error_that_says_how_to_name_one() -> None:
    ran = make_test_pythons("python3.97 python3.98", os.environ["PATH"])
    assert ran.returncode != 0
    assert "PYTHONS=" in ran.stdout


def test_the_table_of_what_to_use_is_the_same_on_each_first_page() -> None:
    def table(page: str) -> str:
        text = (ROOT / page).read_text()
        start = text.index("| what you can keep secret |")
        return re.sub(r"\]\([^)]*\)", "]", text[start : text.index("\n\n", start)])

    assert table("README.md") == table("docs/index.md") == table("docs/tutorials/opacus.md")
