"""What MkDocs does for this site beyond its plugins: pictures from benchmarks/, and the page of the command line."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PLOTS = "benchmarks/results/plots"
HEADING = "# Command line\n\nEvery command explains itself with `--help`; this page is made from the same text.\n\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the plots of the experiments, which lie outside of docs/, and the reference of the command line."""
    for plot in sorted((ROOT / PLOTS).iterdir()):
        files.append(File.generated(config, f"plots/{plot.name}", abs_src_path=str(plot)))
    files.append(File.generated(config, "reference/command_line.md", content=HEADING + command_line()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to those plots work in the repository as well as here."""
    return markdown.replace(f"](../{PLOTS}/", "](plots/")


def command_line() -> str:
    """The help of all commands as Markdown, by Typer."""
    command = [sys.executable, "-m", "typer", "fedcgd.cli", "utils", "docs", "--name", "fedcgd"]
    page = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    page = page.replace("# `fedcgd`\n\n", "", 1)
    page = re.sub(r"^(## `(.+)`)$", lambda m: f"{m[1]} {{#{m[2].replace(' ', '-')}}}", page, flags=re.MULTILINE)
    page = re.sub(r"^Example: (.+)$", r"```console\n$ \1\n```", page, flags=re.MULTILINE)
    sections = re.split(r"^(?=##? )", page, flags=re.MULTILINE)
    return "".join(_with_links(section) for section in sections)


def _with_links(section: str) -> str:
    """Names of commands link to their section, in place of the first words of its text."""
    title = re.match(r"## `(.+)`", section)
    parent = title[1] if title else "fedcgd"
    head, found, commands = section.partition("**Commands**:")
    link = rf"* [`\1`](#{parent.replace(' ', '-')}-\1)"
    return head + found + re.sub(r"^\* `(\S+)`: .*$", link, commands, flags=re.MULTILINE)


def on_post_page(output: str, **_: Any) -> str:
    """A name for the search, which the theme leaves without one."""
    search = 'data-md-component="search" role="dialog"'
    return output.replace(search, f'{search} aria-label="Search"')
