"""Commands from dataclasses: a field is an option or an argument, as its annotation says, and the docstring is the help.

A docstring's last section, `Options:`, is the help of the fields, `name: text` each; groups of options are base classes.
On Click alone. What a command does is imported when it is called, so that its help costs next to nothing.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import click

from fedcgd.cli.usage import CarefulCommand


class Option:
    """What the command line says of a field: `Annotated[int, Option(min=1)]` is `--name-of-the-field`, at least 1.

    Args:
        names: the option's, where they are not made of the field's.
        min: the least of a whole number.
        check: called with the value that was given, returns the one that is taken.
        settings: passed on to Click, such as `metavar`, `type`, and a `help` that is made.
    """

    def __init__(
        self, *names: str, min: int | None = None, check: Callable[[Any], Any] | None = None, **settings: Any
    ) -> None:
        self.names, self.min, self.check, self.settings = names, min, check, settings


class Argument(Option):
    """As `Option`, for a field that is given by its place."""


class WholeNumber(click.types.IntParamType):
    """A whole number of at least `least`, written 1000000, 1e6 or 1_000_000."""

    name = "integer"

    def __init__(self, least: int | None) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number. Raises click.BadParameter for a fraction, and for one that is too small."""
        number = _whole(value)
        if number is None:
            self.fail(f"a whole number such as 1000 or 1e6, got {value!r}", param, ctx)
        if self.least is not None and number < self.least:
            self.fail(f"a whole number of at least {self.least}, got {number}", param, ctx)
        return number


def _whole(text: str | int) -> int | None:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    exact = number.is_integer() and abs(number) <= 2**53  # what is larger must be written out
    return int(number) if exact else None


class _DescribedArgument(click.Argument):
    """An argument that is in the help, as options are."""

    def __init__(self, *args: Any, help: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.meaning = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self.meaning


def command(name: str | None, options: type, run: Callable[[Any], int | None]) -> CarefulCommand:
    """The command `name`: what is typed becomes an `options`, a dataclass, and `run` is called with it.

    What `run` returns is the exit code; None is 0.
    """
    hints, texts = get_type_hints(options, include_extras=True), _texts(options)
    own = [_parameter(each.name, hints[each.name], each.default, texts.get(each.name)) for each in fields(options)]
    own.sort(key=lambda parameter: not parameter.required)
    return CarefulCommand(name, params=own, help=texts[""], callback=lambda **values: run(options(**values)))


def _texts(options: type) -> dict[str, str]:
    """The help of each field, those of the groups too, and under "" that of the command."""
    found: dict[str, str] = {}
    for group in reversed(options.__mro__):
        found[""], _, section = inspect.cleandoc(group.__doc__ or "").partition("\n\nOptions:\n")
        entries = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)[1:]
        found |= {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}
    return found


def _parameter(name: str, annotation: Any, default: Any, text: str | None) -> click.Parameter:
    annotated, about = get_args(annotation) if get_origin(annotation) is Annotated else (annotation, Option())
    [kind] = [each for each in get_args(annotated) if each is not NoneType] if _is_optional(annotated) else [annotated]
    several = get_origin(kind) is list
    if several:
        [kind] = get_args(kind)
    settings: dict[str, Any] = {"type": _type(kind, about.min), "required": default is MISSING, "help": text}
    if default is not MISSING:
        settings["default"] = default
    if several or about.check:
        settings["callback"] = lambda ctx, parameter, value: (about.check or _as_list)(value)
    if isinstance(about, Argument):
        return _DescribedArgument([name], nargs=-1 if several else 1, **settings | about.settings)
    names = [name, *(about.names or [f"--{name.replace('_', '-')}"])]
    if kind is bool:
        settings |= {"is_flag": True}
    elif default not in (MISSING, None, ""):
        settings |= {"show_default": True}
    return click.Option(names, multiple=several, **settings | about.settings)


def _is_optional(annotated: Any) -> bool:
    return NoneType in get_args(annotated)


def _as_list(value: Sequence[Any]) -> list[Any] | None:
    return list(value) or None


def _type(kind: Any, least: int | None) -> Any:
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    return {int: WholeNumber(least), Path: click.Path(path_type=Path)}.get(kind, kind)
