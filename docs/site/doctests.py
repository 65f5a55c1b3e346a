"""Examples in docstrings (`>>>`) are shown as Python, not as a quotation."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put examples between fences."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of every module, class, function and attribute that has any."""
        if obj.docstring and ">>>" in obj.docstring.value:
            obj.docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
