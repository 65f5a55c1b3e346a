"""Pieces of the pages that `fedcgd report` and `fedcgd watch` write, as HTML that needs no other file."""

import re
from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e26; --soft: #4c515e; --line: #c9cdd8; --good: #eef8f0; --bad: #fdf0ef; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ee; --soft: #a9afbd; --line: #464b59; --good: #12291a; --bad: #331716; }
  body { background: #15171d; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.8rem; margin: 0; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid var(--line); }
.small { color: var(--soft); font-size: .9rem; }
.verdict { padding: .7rem 1rem; border-left: .4rem solid; margin: 1rem 0; }
.good { border-color: #1a7f37; background: var(--good); }
.bad { border-color: #b3261e; background: var(--bad); }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0; }
.figures div { flex: 1 1 9rem; border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .9rem; }
.figures strong { display: block; font-size: 1.6rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
tbody th { width: 13rem; }
td { overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
.wide td { overflow-wrap: break-word; }
li { margin: .35rem 0; }
@media print {
  body { margin: 0; max-width: none; font-size: 11px; }
  h1 { font-size: 20px; }
  h2 { font-size: 15px; margin-top: 1.2rem; }
  .figures { flex-wrap: nowrap; }
  .figures strong { font-size: 16px; }
  .wide { overflow: visible; }
  tr, li, .figures div { break-inside: avoid; }
  h2, h2 + p { break-after: avoid; }
  section.first { break-after: page; }
  .verdict { print-color-adjust: exact; }
  @page { margin: 16mm; }
}
"""


def grid(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a head, which scrolls where it does not fit."""
    head = "".join(f"<th scope='col'>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def bullets(items: Sequence[str]) -> str:
    """Items with dots; nothing for none."""
    return f"<ul>{''.join(f'<li>{text(item)}</li>' for item in items)}</ul>" if items else ""


def text(words: str) -> str:
    """A text for people, in which `code` between backticks is set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(words))
