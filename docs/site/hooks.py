"""What MkDocs does for this site beyond its plugins: plots, the page of the command line, tutorials as notebooks."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import click
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebooks import IN_COLAB, colab, notebook

from fedcgd import __version__
from fedcgd.cli import app
from fedcgd.optimisation.table import TABLE, Row

ROOT = Path(__file__).resolve().parents[2]
PLOTS = "benchmarks/results/plots"
REPOSITORY = "https://github.com/fedcgd/fedcgd/blob/main"
EXAMPLE = re.compile(r"^Example: (.+(?:\n+.+)*)$", re.MULTILINE)
COMMANDS_HERE = "<!-- commands -->"
# The theme wraps tables when a page is open; what scrolls is reached by the keyboard too.
WIDE = (
    'addEventListener("load",()=>document.querySelectorAll(".md-typeset__scrollwrap,.md-typeset p:has(>img)")'
    ".forEach(each=>each.tabIndex=0))"
)
FORMULA = re.compile(r'<(?:span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</(?:span|div)>', re.DOTALL)


def on_config(config: Any) -> None:
    """The version, where the theme shows the repository."""
    config.repo_name = f"fedcgd {__version__}"


def on_files(files: Files, config: Any) -> Files:
    """Add the plots of the experiments, which lie outside of docs/, and the tutorials as notebooks."""
    for plot in sorted((ROOT / PLOTS).iterdir()):
        files.append(File.generated(config, f"plots/{plot.name}", abs_src_path=str(plot)))
    for page in sorted((ROOT / "docs" / "tutorials").glob("*.md")):
        if content := notebook(page.stem):
            files.append(File.generated(config, f"tutorials/{page.stem}.ipynb", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to those plots work in the repository as well as here; a tutorial offers its notebook; a page has the commands."""
    if COMMANDS_HERE in markdown:
        markdown = markdown.partition(COMMANDS_HERE)[0] + command_line()
    name = Path(page.file.src_uri).stem
    if page.file.src_uri.startswith("tutorials/") and notebook(name):
        in_colab = f" · [Open it in Colab]({colab(name)})" if name in IN_COLAB else ""
        markdown += f"\n\n[This page as a notebook]({name}.ipynb){{download}}{in_colab}\n"
    return _outside(page.file.src_uri).sub(rf"]({REPOSITORY}/\1", markdown.replace(f"](../{PLOTS}/", "](plots/"))


def _outside(page: str) -> re.Pattern[str]:
    """Links of a page of docs/ to files of the repository that are no pages of this site."""
    up = re.escape("../" * (page.count("/") + 1))
    return re.compile(rf"\]\({up}((?:benchmarks|examples|simulations|tests|tools|CONTRIBUTING|SECURITY)[^)]*)")


def command_line() -> str:
    """The commands with their help, and the table of mechanisms that `--mechanism` names."""
    links = "".join(
        f"* [`fedcgd {name}`](#fedcgd-{name}): {command.get_short_help_str(200)}\n"
        for name, command in app.commands.items()
    )
    rows = "".join(f"| `{row.spelling}` | {row.help} | {_number(row)} |\n" for row in TABLE.values())
    mechanisms = f"## Mechanisms\n\n| `--mechanism` | what it is | numbers |\n|---|---|---|\n{rows}\n"
    return f"{links}\n{mechanisms}" + "\n".join(_section(app.commands[name], f"fedcgd {name}") for name in app.commands)


def _number(row: Row) -> str:
    return "; ".join(f"{each.symbol}: {each.meaning}" for each in row.parameters) or "none"


def _section(command: click.Command, words: str, depth: int = 2) -> str:
    """Heading, help, usage and options of a command, and of those below it."""
    context, anchor = click.Context(command, info_name=words, **command.context_settings), words.replace(" ", "-")
    text = EXAMPLE.sub(_as_code, command.help or "")
    usage = f"```console\n$ {words} {' '.join(command.collect_usage_pieces(context))}\n```"
    records = (parameter.get_help_record(context) for parameter in command.get_params(context))
    options = "".join(f"* `{names}`: {help}\n" for names, help in filter(None, records))
    inner = getattr(command, "commands", {})
    links = "".join(f"* [`{name}`](#{anchor}-{name})\n" for name in inner)
    below = "".join(_section(each, f"{words} {name}", depth + 1) for name, each in inner.items())
    return f"{'#' * depth} `{words}` {{#{anchor}}}\n\n{text}\n\n{usage}\n\n{options}\n{links}\n{below}"


def _as_code(example: re.Match[str]) -> str:
    """The example, of one line or more, as one command."""
    return f"```console\n$ {' '.join(example[1].split())}\n```"


def on_page_content(html: str, **_: Any) -> str:
    """Formulas as MathML, which browsers set by themselves."""
    return FORMULA.sub(_set, html)


def _set(formula: re.Match[str]) -> str:
    """A formula; one of a line of its own scrolls where it is wider than a phone."""
    text = unescape(formula[2])
    if formula[1] == "[":
        return f'<div class="formula" tabindex="0">{convert(text, display="block")}</div>'
    return convert(text)


def on_post_page(output: str, **_: Any) -> str:
    """Names for what the theme leaves without one: the search, and icons that open it and the navigation."""
    search = 'data-md-component="search" role="dialog"'
    output = output.replace(search, f'{search} aria-label="Search"')
    for target, name in (("__search", "Search"), ("__drawer", "Navigation")):
        output = re.sub(
            rf'(<label class="md-\w+ md-icon") for="{target}"', rf'\1 title="{name}" for="{target}"', output
        )
    # A palette's label has its words twice, and `aria-label` belongs on what has a role; stars of the repository would be
    # asked of another host.
    output = re.sub(r'(<label [^>]*title="[^"]*"[^>]*?) aria-label="[^"]*"', r"\1", output)
    output = output.replace(' data-md-component="source"', "")
    for catcher in ("md-search__overlay", "md-overlay"):  # closes what is open when somebody clicks beside it: no words
        output = output.replace(f'<label class="{catcher}"', f'<label class="{catcher}" aria-hidden="true"')
    return output.replace("</body>", f"<script>{WIDE}</script></body>")
