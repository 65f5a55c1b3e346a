"""What MkDocs does for this site beyond its plugins: pictures from benchmarks/, and the page of the command line."""

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
    return page.replace("# `fedcgd`\n\n", "", 1)
