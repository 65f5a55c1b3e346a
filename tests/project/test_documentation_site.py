"""The documentation site: it builds without a warning, asks no other host for anything, and leaves no public name unexplained."""

import importlib
import inspect
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import fedcgd

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures"
IMAGE = re.compile(r"!\[(.*?)\]\(([^)#\s]+)(?:#\S+)?\)", re.DOTALL)
REFERENCE = re.compile(r"^::: (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_without_a_warning_and_has_every_page(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS)).with_suffix(".html").is_file()
    assert "fedcgd account" in (site / "reference" / "command_line.html").read_text()


@pytest.mark.parametrize("stored", sorted((ROOT / "examples" / "notebooks").iterdir()), ids=lambda path: path.stem)
def test_a_tutorial_is_a_notebook_too_with_what_its_code_prints(stored: Path, site: Path) -> None:
    """If the stored one, which Colab opens, is not the site's, write it again: `python docs/site/notebooks.py`."""
    page = (DOCS / "tutorials" / f"{stored.stem}.md").read_text()
    assert stored.read_text() == (site / "tutorials" / stored.name).read_text()
    html = (site / "tutorials" / f"{stored.stem}.html").read_text()
    assert f'href="{stored.name}"' in html
    assert f"/blob/main/examples/notebooks/{stored.name}" in html
    cells = json.loads(stored.read_text())["cells"]
    install, *code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert re.fullmatch(r'%pip install --quiet "fedcgd(\[\w+\])? @ git\+https://\S+"', install["source"])
    sources, printed = (re.findall(rf"^```{kind}\n(.*?)^```$", page, re.M | re.S) for kind in ("python", "output"))
    assert [cell["source"] for cell in code] == [text.strip("\n") for text in sources]
    assert [output["text"] for cell in code for output in cell["outputs"]] == printed
    text = "".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith(("https://", "#"))] == []


def documented_modules() -> list[str]:
    return sorted({name for page in (DOCS / "reference").glob("*.md") for name in REFERENCE.findall(page.read_text())})


def public_parts(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions and classes that a module exports, or else that are its own, with the members that classes define."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    for name in getattr(module, "__all__", None) or own:
        value = getattr(module, name)
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
            yield name, value
            inherited = set().union(*map(vars, value.__mro__[1:])) if inspect.isclass(value) else set()
            for member in vars(value).keys() - inherited if inspect.isclass(value) else ():
                part = getattr(value, member)
                if not member.startswith("_") and (inspect.isroutine(part) or isinstance(part, property)):
                    yield f"{name}.{member}", part


def takes_arguments(part: Any) -> bool:
    if not callable(part) or getattr(part, "_is_protocol", False):
        return False
    try:
        return bool({*inspect.signature(part).parameters} - {"self"})
    except ValueError:  # of a builtin
        return False


@pytest.mark.parametrize("name", documented_modules())
def test_every_public_name_has_a_docstring_that_explains_its_arguments(name: str) -> None:
    home, _, last = name.rpartition(".")
    named = getattr(importlib.import_module(home), last, None) if home else None
    if isinstance(named, FunctionType):  # a function that is named by itself
        parts = [(last, named)]
    else:
        module = importlib.import_module(name)
        assert module.__doc__
        parts = list(public_parts(module))
    # What several classes have, such as the methods of a mechanism, one of them explains.
    for pattern, asked in ((".", parts), ("Args:|Attributes:", [each for each in parts if takes_arguments(each[1])])):
        explained = {label.split(".")[-1] for label, part in parts if re.search(pattern, inspect.getdoc(part) or "")}
        assert [label for label, _ in asked if label.split(".")[-1] not in explained] == []


def test_the_reference_lists_every_name_of_the_package_itself() -> None:
    page = (DOCS / "reference" / "python.md").read_text()
    assert [name for name in fedcgd.__all__ if f"[`{name}`]" not in page] == []


def test_each_picture_is_drawn_and_used_with_its_meaning(tmp_path: Path) -> None:
    runpy.run_path(str(PICTURES / "draw.py"))["draw"](tmp_path)
    drawn = sorted(picture.name for picture in tmp_path.iterdir())
    assert drawn == sorted(picture.name for picture in PICTURES.glob("*.svg"))
    used = {Path(target).name: text for page in DOCS.rglob("*.md") for text, target in IMAGE.findall(page.read_text())}
    assert [name for name in drawn if len(used.get(name, "")) < 40] == []
