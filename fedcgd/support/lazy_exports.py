"""Names of a package that are loaded when they are first used, so that importing it costs next to nothing (PEP 562)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from fedcgd.support.extras import missing_package


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of `package`, whose names are in the modules `homes` of it. A home of a name's own name is a module.

    Raises AttributeError, when called, for a name that is in none, and ModuleNotFoundError, which says what to install, for one
    whose extra is not there.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
        try:
            module = import_module(f"{package}.{homes[name]}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("fedcgd"):
                raise
            raise ModuleNotFoundError(f"{package}.{name}: {missing_package(error)}", name=error.name) from None
        value = module if homes[name] == name else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load
