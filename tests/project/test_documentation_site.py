"""The documentation site: it builds without a warning, asks no other host for anything, and leaves no public name unexplained."""

import importlib
import importlib.util
import inspect
import itertools
import json
import re
import subprocess
import sys
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
    for name in ("choosing", "opacus", "deployment", "reviewing"):
        page = (DOCS / "tutorials" / f"{name}.md").read_text()
        notebook = json.loads((site / "tutorials" / f"{name}.ipynb").read_text())
        assert notebook["nbformat"] == 4
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert [cell["source"] for cell in code] == [
            text.strip("\n") for text in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
        ]
        printed = [output["text"] for cell in code for output in cell["outputs"]]
        assert printed == re.findall(r"^```output\n(.*?)^```$", page, re.M | re.S)
        assert f'href="{name}.ipynb"' in (site / "tutorials" / f"{name}.html").read_text()


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


def test_headings_leave_no_level_out_and_every_icon_has_a_name(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        text = page.read_text()
        article = text[text.index("<article") : text.index("</article>")]
        levels = [int(level) for level in re.findall(r"<h([1-6])[ >]", article)]
        assert levels[0] == 1, page
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), page
        icons = re.findall(r'<label class="[^"]*md-icon[^"]*"[^>]*>', text)
        assert len(icons) >= 4
        assert [icon for icon in icons if "aria-label=" not in icon and "title=" not in icon] == [], page


def test_what_a_function_returns_is_one_row_however_long_the_text(site: Path) -> None:
    returns = re.compile(r'doc-section-title">Returns:</span>.*?<tbody>(.*?)</tbody>', re.DOTALL)
    rows = {
        table.count("<tr")
        for page in (site / "reference").glob("*.html")
        for table in returns.findall(page.read_text())
    }
    assert rows == {1}


def contrast(text: str, background: str) -> float:
    """WCAG 2.2's contrast of two colours, #rrggbb; `text` may have an alpha, #rrggbbaa."""
    below = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    alpha = int(text[7:9] or "ff", 16) / 255
    over = [alpha * int(text[i : i + 2], 16) / 255 + (1 - alpha) * b for i, b in zip((1, 3, 5), below, strict=True)]

    def luminance(colour: list[float]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    one, other = sorted((luminance(over), luminance(below)))
    return (other + 0.05) / (one + 0.05)


def test_contrast_is_wcags() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)  # the grey that just fails, as W3C tells
    assert contrast("#00000080", "#ffffff") == pytest.approx(contrast("#7f7f7f", "#ffffff"), rel=1e-2)


# The theme's page and code backgrounds: white and #f5f5f5; hsl(225, 15 %, 14 %) and hsl(225, 15 %, 18 %).
BACKGROUNDS = {"default": ("#ffffff", "#f5f5f5"), "slate": ("#1e2129", "#272b35")}


@pytest.mark.parametrize("scheme", BACKGROUNDS)
def test_the_colours_of_the_site_can_be_read(scheme: str) -> None:
    style = (DOCS / "site" / "extra.css").read_text()
    rules = re.findall(rf'^\[data-md-color-scheme="{scheme}"\]\S* {{(.*)}}$', style, re.MULTILINE)
    colours = dict(re.findall(r"--md-([\w-]+): (#[0-9a-f]{6,8})", " ".join(rules)))
    assert len(colours) >= 3
    page, code = BACKGROUNDS[scheme]
    low = {n: c for n, c in colours.items() if contrast(c, code if n.startswith("code-") else page) < 4.5}
    assert low == {}
    if scheme == "slate":  # links are in code as well
        assert contrast(colours["typeset-a-color"], code) >= 4.5


def test_the_colours_of_pictures_and_of_the_report_can_be_read() -> None:
    draw = drawing()
    for colours in (draw.LIGHT, draw.DARK):
        for words in (colours.ink, colours.plain, colours.ours, colours.secret):
            assert contrast(words, colours.page) >= 4.5
        assert contrast(colours.ink, colours.box) >= 4.5
        assert contrast(colours.faint, colours.page) >= 3  # lines, no words
    from fedcgd.cli.report_html import STYLE

    light, dark = STYLE.partition("@media screen and (prefers-color-scheme: dark)")[::2]
    for style, page in (
        (light, "#ffffff"),
        (dark.partition("@media")[0], *re.findall(r"body { background: (#\w+)", dark)),
    ):
        named = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", style))
        for words, background in (
            ("ink", page), ("soft", page), ("ink", named["good"]), ("ink", named["bad"]), ("ink", named["code"]),
        ):  # fmt: skip
            assert contrast(named[words], background) >= 4.5
    for drawn in ("#2257c9", "#c4500a", "#4c515e"):
        assert contrast(drawn, "#ffffff") >= 4.5


def documented_modules() -> list[str]:
    return sorted({name for page in (DOCS / "reference").glob("*.md") for name in REFERENCE.findall(page.read_text())})


@pytest.mark.parametrize("name", documented_modules())
def test_every_public_name_of_the_reference_has_a_docstring(name: str) -> None:
    home, _, last = name.rpartition(".")
    named = getattr(importlib.import_module(home), last, None) if home else None
    if isinstance(named, FunctionType):  # a function that is named by itself
        assert named.__doc__
        return
    assert undocumented(importlib.import_module(name)) == []


@pytest.mark.parametrize("name", ["fedcgd", *documented_modules()])
def test_every_public_name_explains_its_arguments(name: str) -> None:
    home, _, last = name.rpartition(".")
    named = getattr(importlib.import_module(home), last, None) if home else None
    if isinstance(named, FunctionType):  # a function that is named by itself
        assert "Args:" in (named.__doc__ or "")
        return
    assert unexplained(importlib.import_module(name)) == []


def test_a_name_that_does_not_explain_its_arguments_is_found() -> None:
    module = ModuleType("example")
    exec(
        "class C:\n  'C.'\n  def one(self, x):\n    'One.'\n  def none(self):\n    'None.'\n"
        "def f(x):\n  'F.'\ndef g(x):\n  'G.\\n\\nArgs:\\n  x: x.'\n",
        module.__dict__,
    )
    assert unexplained(module) == ["C.one", "f"]


def unexplained(module: ModuleType) -> list[str]:
    """Public names that take arguments and have no section about them; methods that a base class or protocol has are fine."""
    missing = []
    for name in public_names(module):
        value = getattr(module, name)
        if inspect.isfunction(value):
            members, explained = {name: value}, set()
        elif inspect.isclass(value):
            members = {} if getattr(value, "_is_protocol", False) else {name: value}
            members |= {
                f"{name}.{member}": getattr(part, "__func__", part)
                for member, part in vars(value).items()
                if not member.startswith("_") and isinstance(part, FunctionType | classmethod | staticmethod)
            }
            explained = {member for base in (*value.__mro__[1:], *protocols()) for member in vars(base)}
        else:
            continue
        for full, part in members.items():
            if full.rpartition(".")[2] in explained and "." in full:
                continue
            try:
                taken = [argument for argument in inspect.signature(part).parameters if argument not in ("self", "cls")]
            except ValueError:  # built-in
                continue
            text = inspect.getdoc(part) or ""
            if taken and "Args:" not in text and "Attributes:" not in text:
                missing.append(full)
    return missing


def test_the_reference_lists_every_name_of_the_package_itself() -> None:
    page = (DOCS / "reference" / "python.md").read_text()
    assert [name for name in fedcgd.__all__ if f"[`{name}`]" not in page] == []


def test_a_name_without_docstring_is_found() -> None:
    module = ModuleType("example")
    exec("class Documented:\n  'a'\n  def deed(self): ...\ndef function(): ...\n", module.__dict__)
    assert undocumented(module) == ["example", "Documented.deed", "function"]


def undocumented(module: ModuleType) -> list[str]:
    """Public names without a docstring: their own, an inherited one, or that of a protocol."""
    missing = [] if inspect.getdoc(module) and module.__doc__ else [module.__name__]
    for name in public_names(module):
        value = getattr(module, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if not value.__doc__:
            missing.append(name)
        if inspect.isclass(value):
            described = [*value.__mro__, *protocols()]
            members = [m for m, part in vars(value).items() if inspect.isroutine(part) or isinstance(part, property)]
            for member in members:
                texts = [vars(base)[member].__doc__ for base in described if member in vars(base)]
                if not member.startswith("_") and not any(texts):
                    missing.append(f"{name}.{member}")
    return missing


def public_names(module: ModuleType) -> list[str]:
    """What a module exports, or else what is its own."""
    exported: list[str] | None = getattr(module, "__all__", None)
    names = exported or [
        name for name, value in vars(module).items() if getattr(value, "__module__", module.__name__) == module.__name__
    ]
    return [name for name in names if not name.startswith("_")]


def protocols() -> list[type]:
    """What classes here may satisfy without inheriting from it, such as `Mechanism`."""
    package = [
        vars(module)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("fedcgd", "fedcgd_flower")
    ]
    return [value for names in package for value in list(names.values()) if getattr(value, "_is_protocol", False)]


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
