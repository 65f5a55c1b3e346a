"""The tasks: each module of this package is one, and defines `task(model, data_dir)`."""

import pkgutil
from importlib import import_module
from pathlib import Path

from fedcgd_simulations.task import Task

NAMES = tuple(sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__)))


def get_task(name: str, *, model: str | None = None, data_dir: str | Path | None = None) -> Task:
    """The task `name`, with the named model (None: its default) and data from `data_dir` (None: usual places).

    Nothing is read before `load`. Raises ValueError for an unknown task or model.
    """
    if name not in NAMES:
        raise ValueError(f"unknown task {name!r}; the tasks are {', '.join(NAMES)}")
    made = import_module(f"{__name__}.{name.replace('-', '_')}").task(model, None if not data_dir else Path(data_dir))
    if not isinstance(made, Task):
        raise TypeError(f"task {name!r} made a {type(made).__name__}, not a Task")
    return made
