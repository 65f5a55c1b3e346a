"""Commands of programs that are not installed: each is a function, whose parameters are its options."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, is_dataclass, make_dataclass
from typing import Any

from fedcgd.cli.declare import command
from fedcgd.cli.usage import CarefulCommand, CarefulGroup


def of_function(function: Callable[..., None], name: str | None = None) -> CarefulCommand:
    """The command whose options are the parameters of `function`; for one that is a dataclass, its fields."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    shared: Any = tuple(each.annotation for each in parameters if is_dataclass(each.annotation))
    own = {each.name: each for each in parameters if each.annotation not in shared}
    options = make_dataclass(
        function.__name__,
        [(each.name, each.annotation, field(default=_default(each))) for each in own.values()],
        bases=shared,
        namespace={"__doc__": function.__doc__},
        frozen=True,
        kw_only=True,
    )

    def run(given: Any) -> None:
        function(*[given] * len(shared), **{name: getattr(given, name) for name in own})

    return command(name, options, run)


def _default(parameter: inspect.Parameter) -> Any:
    return MISSING if parameter.default is inspect.Parameter.empty else parameter.default


def group_of(functions: Mapping[str, Callable[..., None]], *, help: str) -> CarefulGroup:
    """Commands by their names, each of a function."""
    return CarefulGroup(commands={name: of_function(function, name) for name, function in functions.items()}, help=help)
