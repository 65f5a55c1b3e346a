"""What others send or hand over: sizes are bounded before anything is read, values have their types, texts stay on one line.

Every request, record and file of somebody else comes in by one of these, so that what is malformed is a `MalformedError` (a
`ValueError`) here, and nothing later need ask what it got.
"""

import json
import unicodedata
import zlib
from collections.abc import Callable, Mapping
from typing import Any

_MOST_TEXT = 500  # characters of a text that is shown
_LARGEST = 2**63  # whole numbers beyond are none that a count, a round or a size could be


class MalformedError(ValueError):
    """What somebody sent is not what it should be; the text says where, and is clean."""


def clean(text: object, most: int = _MOST_TEXT) -> str:
    """`text` as one line that is itself wherever it is shown: no control characters, no line breaks, nothing invisible.

    Args:
        text: of somebody else.
        most: characters that are kept.

    >>> clean("refused\\n2026-01-01 INFO released \\x1b[31mred")
    'refused 2026-01-01 INFO released \\ufffd[31mred'
    """
    line = "".join(map(_shown, str(text)[: most + 1]))
    return line if len(line) <= most else f"{line[:most]}…"


def _shown(character: str) -> str:
    if character.isspace():
        return " "
    return "\ufffd" if unicodedata.category(character)[0] == "C" else character


def inflate(packed: bytes, most: int, what: str) -> bytes:
    """What zlib packed, at most so many bytes. Raises MalformedError if `what` has more, or cannot be unpacked."""
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(packed, most + 1)
    except zlib.error as error:
        raise MalformedError(f"{what} cannot be unpacked: {error}") from error
    if len(found) > most or not inflater.eof:
        raise MalformedError(f"{what} cannot be unpacked: it is cut off, or has more than {most} bytes")
    return found


def parse_json(text: str | bytes, form: Any, what: str, *, most: int = 2**26) -> Any:
    """The JSON value of a text, of this form (`conform`).

    Args:
        text: of somebody else.
        form: what it must be.
        what: what messages call it.
        most: the length up to which it is read.

    Raises:
        MalformedError: for anything else.
    """
    if len(text) > most:
        raise MalformedError(f"{what} has {len(text)} characters, and at most {most} are read")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{what} is no JSON: {clean(error)}") from error
    return conform(value, form, what)


def conform(value: Any, form: Any, what: str) -> Any:
    """`value`, if it is of this form.

    Args:
        value: of somebody else.
        form: a type (`float` takes any finite number, `int` whole ones below 2⁶³ in size); `[form]` for a list; a mapping from
            names to forms, in which `str` stands for all other names, and a form `Optional(…)` for what may be left out; a tuple
            of forms, of which one must fit; None for None; `object` for what is not looked at.
        what: what messages call it.

    Raises:
        MalformedError: for anything else.
    """
    if form is object:
        return value
    if isinstance(form, Mapping):
        return _conform_mapping(value, form, what)
    if isinstance(form, list):
        if isinstance(value, list | tuple):
            return [conform(one, form[0], f"an entry of {what}") for one in value]
    elif isinstance(form, tuple):
        for one in form:
            try:
                return conform(value, one, what)
            except MalformedError:
                continue
    elif form is None:
        if value is None:
            return None
    elif _FITS[form](value):
        return value
    raise MalformedError(f"{what} is {clean(repr(value), 60)}, and must be {_told(form)}")


class Optional:
    """Of an entry of a mapping that may be left out."""

    def __init__(self, form: Any) -> None:
        self.form = form


def _conform_mapping(value: Any, form: Mapping[Any, Any], what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise MalformedError(f"{what} is {clean(repr(value), 60)}, and must be a JSON object")
    others = form.get(str)
    if others is None and (unknown := sorted(value.keys() - form.keys())):
        raise MalformedError(f"{what} has {clean(unknown[0], 60)!r}, which is not known")
    for name, wanted in form.items():
        if name is not str and name not in value and not isinstance(wanted, Optional):
            raise MalformedError(f"{what} has no {name!r}")
    found = {}
    for name, one in value.items():
        wanted = form.get(name, others)
        wanted = wanted.form if isinstance(wanted, Optional) else wanted
        found[name] = conform(one, wanted, f"{clean(name, 60)} of {what}")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e308 <= value <= 1e308  # false for NaN


_FITS: dict[Any, Callable[[Any], bool]] = {
    int: lambda value: type(value) is int and -_LARGEST < value < _LARGEST,
    float: _is_number,
    str: lambda value: isinstance(value, str),
    bytes: lambda value: isinstance(value, bytes),
    bool: lambda value: isinstance(value, bool),
    dict: lambda value: isinstance(value, dict),
    list: lambda value: isinstance(value, list),
}


def _told(form: Any) -> str:
    if isinstance(form, list):
        return "a list"
    if isinstance(form, tuple):
        return " or ".join(map(_told, form))
    return _WORDS.get(form, "a JSON object")


_WORDS = {
    None: "nothing",
    float: "a finite number",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    list: "a list",
}
