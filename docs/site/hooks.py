"""What MkDocs does for this site beyond its plugins: pictures from benchmarks/, and the page of the command line."""

import re
from pathlib import Path
from typing import Any

from click import Context
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

from fedcgd.cli import COMMANDS, load
from fedcgd.optimisation.catalogue import TABLE, Row

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
    """The commands, their help as Typer has it, and the table of mechanisms that `--mechanism` names."""
    links = "".join(f"* [`fedcgd {name}`](#fedcgd-{name}): {text}\n" for name, (_, text) in COMMANDS.items())
    rows = "".join(f"| `{row.spelling}` | {row.help} | {_number(row)} |\n" for row in TABLE.values())
    mechanisms = f"## Mechanisms\n\n| `--mechanism` | what it is | number |\n|---|---|---|\n{rows}\n"
    pages = (
        get_docs_for_click(obj=command, ctx=Context(command, info_name=name), indent=1, name=name, call_prefix="fedcgd")
        for name, command in ((name, load(name)) for name in COMMANDS)
    )
    return f"{links}\n{mechanisms}" + "\n".join(map(_with_links, pages))


def _number(row: Row) -> str:
    return f"{row.parameter.symbol}: {row.parameter.meaning}" if row.parameter else "none"


def _with_links(page: str) -> str:
    """Headings with anchors that can be told from the command, and examples as code."""
    page = re.sub(r"^(##+ `(.+)`)$", lambda m: f"{m[1]} {{#{m[2].replace(' ', '-')}}}", page, flags=re.MULTILINE)
    page = re.sub(r"^Example: (.+)$", r"```console\n$ \1\n```", page, flags=re.MULTILINE)
    parent = re.match(r"## `(.+?)`", page)
    link = rf"* [`\1`](#{parent[1].replace(' ', '-') if parent else 'fedcgd'}-\1)"
    head, found, commands = page.partition("**Commands**:")
    listed, heading, rest = commands.partition("\n##")
    return head + found + re.sub(r"^\* `(\S+)`: .*$", link, listed, flags=re.MULTILINE) + heading + rest


def on_post_page(output: str, **_: Any) -> str:
    """A name for the search, which the theme leaves without one."""
    search = 'data-md-component="search" role="dialog"'
    return output.replace(search, f'{search} aria-label="Search"')
