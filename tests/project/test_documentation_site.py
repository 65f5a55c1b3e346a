"""The documentation site: it builds without a warning, asks no other host for anything, and leaves no public name unexplained."""

import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
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


class Links(HTMLParser):
    """What a browser would fetch by itself on opening a page, and the headings and pictures on it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.unnamed: list[str] = []
        self.titles = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and values.get("src"):
            self.fetched.append(values["src"] or "")
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.fetched.append(values.get("href") or "")
        if tag == "img" and not (values.get("alt") or "").strip():
            self.unnamed.append(values.get("src") or "")
        self.titles += tag == "h1"


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


def test_tutorials_are_notebooks_too_with_what_their_code_prints(site: Path) -> None:
    for name in ("choosing", "opacus", "reviewing"):
        page = (DOCS / "tutorials" / f"{name}.md").read_text()
        notebook = json.loads((site / "tutorials" / f"{name}.ipynb").read_text())
        assert notebook["nbformat"] == 4
        install, *code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert re.fullmatch(r'%pip install --quiet "fedcgd(\[\w+\])? @ git\+https://\S+"', install["source"])
        assert [cell["source"] for cell in code] == [
            text.strip("\n") for text in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
        ]
        printed = [output["text"] for cell in code for output in cell["outputs"]]
        assert printed == re.findall(r"^```output\n(.*?)^```$", page, re.M | re.S)
        assert f'href="{name}.ipynb"' in (site / "tutorials" / f"{name}.html").read_text()


@pytest.mark.filterwarnings("ignore:another run of this process")  # the tutorial of Opacus explains it
@pytest.mark.parametrize("stored", sorted((ROOT / "examples" / "notebooks").iterdir()), ids=lambda path: path.stem)
def test_notebooks_that_colab_opens_are_those_of_the_site_and_run_in_any_folder(
    stored: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they are not those of the site, write them again: `python docs/site/notebooks.py`."""
    assert stored.read_text() == (site / "tutorials" / stored.name).read_text()
    assert f"/blob/main/examples/notebooks/{stored.name}" in (site / "tutorials" / f"{stored.stem}.html").read_text()
    cells = json.loads(stored.read_text())["cells"]
    text = "".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith(("https://", "#"))] == []
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "notebook"}
    for cell in [cell for cell in cells if cell["cell_type"] == "code"][1:]:  # without the one that installs
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(cell["source"], stored.name, "exec"), names)
        assert printed.getvalue() == "".join(output["text"] for output in cell["outputs"]) or not cell["outputs"]


def test_no_page_of_the_site_asks_another_host_for_anything(site: Path) -> None:
    pages = {page: Links(page.read_text()) for page in site.rglob("*.html")}
    assert any(links.fetched for links in pages.values())
    foreign = [(page.name, url) for page, links in pages.items() for url in links.fetched if "//" in url]
    assert foreign == []
    styles = [style.read_text() for style in site.rglob("*.css")]
    assert not [style for style in styles if re.search(r"url\(['\"]?(https?:)?//", style)]


def test_every_page_has_one_title_and_every_picture_says_what_it_shows(site: Path) -> None:
    pages = {page: Links(page.read_text()) for page in site.rglob("*.html") if page.name != "404.html"}
    assert [page.name for page, links in pages.items() if links.titles != 1] == []
    assert [(page.name, links.unnamed) for page, links in pages.items() if links.unnamed] == []


# The theme's page and code backgrounds: white and #f5f5f5; hsl(225, 15 %, 14 %) and hsl(225, 15 %, 18 %).


def documented_modules() -> list[str]:
    return sorted({name for page in (DOCS / "reference").glob("*.md") for name in REFERENCE.findall(page.read_text())})


def protocol_members() -> set[str]:
    """What classes of the packages may have without inheriting it, such as the methods of `Mechanism`."""
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("fedcgd", "fedcgd_flower")]
    protocols = {value for module in loaded for value in vars(module).values() if getattr(value, "_is_protocol", False)}
    return {member for protocol in protocols for member in vars(protocol)}


def public_parts(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions and classes that a module exports, or else that are its own, with the members that classes add."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    explained = protocol_members()
    for name in getattr(module, "__all__", None) or own:
        value = getattr(module, name)
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        yield name, value
        inherited = explained.union(*map(vars, value.__mro__[1:])) if inspect.isclass(value) else set()
        for member, part in vars(value).items() if inspect.isclass(value) else ():
            is_part = isinstance(part, FunctionType | classmethod | staticmethod | property)
            if is_part and not member.startswith("_") and member not in inherited:
                yield f"{name}.{member}", part if isinstance(part, property) else getattr(value, member)


def takes_arguments(part: Any) -> bool:
    if not callable(part) or getattr(part, "_is_protocol", False):
        return False
    try:
        return bool({*inspect.signature(part).parameters} - {"self"})
    except ValueError:  # of a builtin
        return False


@pytest.mark.parametrize("name", ["fedcgd", *documented_modules()])
def test_every_public_name_has_a_docstring_that_explains_its_arguments(name: str) -> None:
    home, _, last = name.rpartition(".")
    named = getattr(importlib.import_module(home), last, None) if home else None
    if isinstance(named, FunctionType):  # a function that is named by itself
        parts = [(last, named)]
    else:
        module = importlib.import_module(name)
        assert module.__doc__
        parts = list(public_parts(module))
    assert [label for label, part in parts if not inspect.getdoc(part)] == []
    taking = [(label, part) for label, part in parts if takes_arguments(part)]
    explained = re.compile("Args:|Attributes:")
    assert [label for label, part in taking if not explained.search(inspect.getdoc(part) or "")] == []


def test_the_reference_lists_every_name_of_the_package_itself() -> None:
    page = (DOCS / "reference" / "python.md").read_text()
    assert [name for name in fedcgd.__all__ if f"[`{name}`]" not in page] == []


def drawing() -> Any:
    """docs/pictures/draw.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("draw", PICTURES / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    return draw


def test_pictures_are_drawn_the_same_each_time_and_each_is_used_with_its_meaning(tmp_path: Path) -> None:
    draw = drawing()
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        draw.draw(folder)
    drawn = sorted(picture.name for picture in (tmp_path / "a").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in drawn)
    assert drawn == sorted(picture.name for picture in PICTURES.glob("*.svg"))
    used = {Path(target).name: text for page in DOCS.rglob("*.md") for text, target in IMAGE.findall(page.read_text())}
    assert [name for name in drawn if len(used.get(name, "")) < 40] == []
