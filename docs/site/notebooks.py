"""Tutorials as Jupyter notebooks. As a script it writes those of examples/notebooks/, which Colab opens from the repository."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
FOLDER = ROOT / "examples" / "notebooks"
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
IN_COLAB = ("choosing", "opacus", "pure_step")
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXTRA = re.compile(r'pip install "\.(\[\w+\])"')
RELATIVE_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def notebook(name: str) -> str | None:
    """The tutorial as a notebook that begins by installing the library; None if its page shows no output.

    Args:
        name: of the page, without its suffix.
    """
    markdown = (TUTORIALS / f"{name}.md").read_text()
    if "```output" not in markdown:
        return None
    extra = EXTRA.search(markdown)
    install = f'%pip install --quiet "fedcgd{extra[1] if extra else ""} @ git+{URLS["Source"]}"\n'
    cells = _cells(f"```python\n{install}```\n{markdown}")
    content = {"nbformat": 4, "nbformat_minor": 5, "metadata": KERNEL, "cells": cells}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def colab(name: str) -> str:
    """Where Colab opens the notebook of the tutorial.

    Args:
        name: of the page, without its suffix.
    """
    repository = URLS["Source"].removeprefix("https://github.com/")
    return f"https://colab.research.google.com/github/{repository}/blob/main/{FOLDER.relative_to(ROOT)}/{name}.ipynb"


def _cells(markdown: str) -> list[dict[str, Any]]:
    """The page as cells, with the outputs that it shows."""
    cells: list[dict[str, Any]] = []

    def add(kind: str, source: str, **more: Any) -> None:
        if source.strip():
            cell = {"cell_type": kind, "source": source.strip("\n"), "metadata": {}, "id": f"cell-{len(cells)}"}
            cells.append(cell | more)

    end = 0
    for block in FENCED.finditer(markdown):
        add("markdown", RELATIVE_LINK.sub(_absolute, markdown[end : block.start()]))
        end = block.end()
        match block[1]:
            case "python":
                add("code", block[2], outputs=[], execution_count=None)
            case "output":
                cells[-1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": block[2]}]
            case _:
                add("markdown", block[0])
    add("markdown", RELATIVE_LINK.sub(_absolute, markdown[end:]))
    return cells


def _absolute(link: re.Match[str]) -> str:
    """A notebook lies elsewhere than its page: links to other pages go to the site, those to other files to the repository."""
    target = (TUTORIALS / link[1]).resolve().relative_to(ROOT)
    if target.parts[0] == "docs":
        url = URLS["Documentation"] + str(target.relative_to("docs")).replace(".md", ".html")
    else:
        url = f"{URLS['Source']}/blob/main/{target}"
    return f"]({url}{link[2] or ''})"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in IN_COLAB:
        (FOLDER / f"{each}.ipynb").write_text(notebook(each) or "")
