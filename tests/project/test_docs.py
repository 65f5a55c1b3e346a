"""Every example in the README and the documents runs, and prints what is written under it."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedcgd.cli import app

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = [
    ROOT / "README.md",
    ROOT / "tests/README.md",
    ROOT / "tools/dependencies.md",
    *sorted((ROOT / "benchmarks/reports").glob("*.md")),
]
PAGES = [*OUTSIDE, *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(
    r'^```\w+ title="(\S+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL
)  # a file of an app: another test runs the app


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and source of each block of the page that is not a file."""
    return FENCE.findall(FILE.sub("", page.read_text()))


@pytest.mark.filterwarnings("ignore:another run of this process")  # the tutorial of Opacus says so
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_run_in_any_folder_and_print_what_is_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block stands alone, but for tutorials: there a block goes on where the one before it ended."""
    monkeypatch.chdir(tmp_path)
    found = blocks(page)
    names: dict[str, object] = {}
    for index, (language, source) in enumerate(found):
        if language != "python":
            continue
        if page.parent.name != "tutorials" or not names:
            names = {"__name__": "example"}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"{page.name}, block {index}", "exec"), names)
        following = found[index + 1] if index + 1 < len(found) else ("", "")
        if following[0] == "output":
            assert printed.getvalue() == following[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_shell_examples_name_commands_and_options_that_exist(page: Path) -> None:
    for language, source in blocks(page):
        if language != "sh":
            continue
        for line in source.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["fedcgd"]:
                continue
            inner = [word for word in words[2:3] if words[1] in ("keeper", "ledger")]  # commands of these
            help_text = CliRunner().invoke(app, [words[1], *inner, "--help"], env={"COLUMNS": "200"}).output
            for option in (word for word in words if word.startswith("--")):
                assert option in help_text, f"{page.name}: {line}"
