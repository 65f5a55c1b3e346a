"""Models, each a function that draws its initial weights from torch's global generator."""

from collections.abc import Callable, Mapping

from torch import nn

Factory = Callable[[], nn.Module]


def choose(task: str, model: str | None, factories: Mapping[str, Factory]) -> Factory:
    """The factory of `model`, or the first one for None. Raises ValueError naming the models of `task`."""
    name = model or next(iter(factories))
    if name not in factories:
        raise ValueError(f"unknown model {name!r} for task {task!r}; its models are {', '.join(factories)}")
    return factories[name]
