"""Pieces of the report page: its style, tables and drawings, as HTML that needs no other file."""

import io
import re
from collections.abc import Sequence
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e26; --soft: #4c515e; --line: #c9cdd8; }
:root { --good: #eef8f0; --bad: #fdf0ef; --code: #f3f4f8; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ee; --soft: #a9afbd; --line: #464b59; --good: #12291a; --bad: #331716; --code: #22252f; }
  body { background: #15171d; }
  figure svg { filter: invert(1) hue-rotate(180deg); }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.8rem; margin: 0; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid var(--line); }
.promise { font-size: 1.1rem; }
.small, figcaption { color: var(--soft); font-size: .9rem; }
.verdict { padding: .7rem 1rem; border-left: .4rem solid; margin: 1rem 0; }
.good { border-color: #1a7f37; background: var(--good); }
.bad { border-color: #b3261e; background: var(--bad); }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0; }
.figures div { flex: 1 1 9rem; border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .9rem; }
.figures strong { display: block; font-size: 1.6rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
thead th { border-bottom: 2px solid #8a8f9c; }
tbody th { font-weight: 600; width: 15rem; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td { overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
.wide td { overflow-wrap: break-word; }
.wide td, .wide th { padding: .3rem .45rem; }
figure { margin: 1rem 0; }
figure svg { width: 100%; height: auto; }
code, pre { font: .88em ui-monospace, monospace; }
pre { background: var(--code); padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere; }
li { margin: .35rem 0; }
@media (max-width: 30rem) {
  tbody th { width: 8rem; }
  .wide { font-size: .8rem; }
  .wide td, .wide th { padding: .3rem .2rem; }
}
@media print {
  body { margin: 0; max-width: none; font-size: 11px; }
  h1 { font-size: 20px; }
  h2 { font-size: 15px; margin-top: 1.2rem; }
  .promise { font-size: 12px; }
  .small, figcaption { font-size: 10px; }
  .figures { flex-wrap: nowrap; gap: .5rem; }
  .figures div { flex-basis: 0; padding: .3rem .6rem; }
  .figures strong { font-size: 16px; }
  details { display: none; }
  .wide { overflow: visible; }
  figure, tr, li, .figures div { break-inside: avoid; }
  h2, h2 + p, figure + figure { break-after: avoid; }
  section.first { break-after: page; }
  .verdict, .figures div { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  @page { margin: 16mm; }
}
"""


def axes_of(height: float) -> tuple[Any, Any]:
    """A figure of this height in inches, and its axes; along x are rounds or how many, which are whole."""
    from matplotlib.figure import Figure  # takes a second, and only this page needs it
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.5, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def figure_html(figure: Any, meaning: str, caption: str) -> str:
    """`figure` as SVG that says `meaning` to who cannot see it, with a caption."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": meaning, "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    drawn = buffer.getvalue()
    svg = drawn[drawn.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(meaning)}"', 1)
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def table_html(rows: Sequence[tuple[str, str]]) -> str:
    """Rows of a name and a value."""
    body = "".join(f"<tr><th scope='row'>{escape(name)}</th><td>{text_html(value)}</td></tr>" for name, value in rows)
    return f"<table><tbody>{body}</tbody></table>"


def grid_html(titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table with a head; the columns `numbers` are aligned to the right."""

    def cell(tag: str, column: int, value: str) -> str:
        scope = " scope='col'" if tag == "th" else ""
        return f"<{tag}{scope}{' class=number' if column in numbers else ''}>{escape(value)}</{tag}>"

    head = "".join(cell("th", column, title) for column, title in enumerate(titles))
    body = "".join("<tr>" + "".join(cell("td", column, v) for column, v in enumerate(row)) + "</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def text_html(text: str) -> str:
    """A text for people, in which `code` between backticks is set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def list_html(items: Sequence[str]) -> str:
    """Items with dots."""
    return "<ul>" + "".join(f"<li>{text_html(item)}</li>" for item in items) + "</ul>"


def day(moment: str | None) -> str:
    """2026-11-21 23:59:59 from the ledger's ISO text, which is UTC."""
    return escape((moment or "–").replace("T", " ")[:19])
