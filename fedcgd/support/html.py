"""Values as HTML, for notebooks."""

from collections.abc import Mapping
from html import escape


def table(rows: Mapping[str, object]) -> str:
    """A table of two columns; names and values are escaped.

    Args:
        rows: name → value.

    >>> table({"ε": "≤ 2"})
    '<table><tr><th>ε</th><td>≤ 2</td></tr></table>'
    """
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows.items())
    return f"<table>{''.join(cells)}</table>"
