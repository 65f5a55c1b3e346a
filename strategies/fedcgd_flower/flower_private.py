"""Every name of Flower that we use and that Flower does not document: what a new version may take away, in one place.

`tests/flower/test_flower_private.py` has a test for each, which says which one is gone. All else comes from `flwr.app`,
`flwr.clientapp`, `flwr.serverapp` and `flwr.simulation`.
"""

import traceback
from collections.abc import Iterator
from logging import ERROR, INFO, WARNING
from typing import Any

from flwr.supercore import log

__all__ = [
    "SIMULATION_GRID",
    "is_simulation",
    "log",
    "log_error",
    "log_failure",
    "log_info",
    "log_warning",
    "mods_after",
]

SIMULATION_GRID = "InMemoryGrid"
"""The class of `flwr.superlink.grid` that a ServerApp is given in a simulation.

By name: to import it, a node would load a server.
"""


def log_info(text: str) -> None:
    """Tell the operator, in Flower's own log."""
    log(INFO, "fedcgd: %s", text)


def log_warning(text: str) -> None:
    """Tell the operator what needs a look."""
    log(WARNING, "fedcgd: %s", text)


def log_error(text: str) -> None:
    """Tell the operator what has failed on this node."""
    log(ERROR, "fedcgd: %s", text)


def log_failure(what: str, error: Exception) -> None:
    """Tell the operator where code of the app has raised `error`, without its text, which may quote a user's data."""
    log_error(f"{what} failed with {type(error).__name__} at\n{''.join(traceback.format_tb(error.__traceback__))}")


def is_simulation(grid: object) -> bool:
    """Whether the nodes of `grid` are simulated ones."""
    return any(kind.__name__ == SIMULATION_GRID for kind in grid.__class__.__mro__)


def mods_after(call_next: Any) -> Iterator[Any]:
    """The mods that Flower calls after the one that was given `call_next`: it chains them by closures over `_mod` and `_ffn`."""
    following = call_next
    while (code := getattr(following, "__code__", None)) is not None and "_mod" in code.co_freevars:
        held = dict(zip(code.co_freevars, (cell.cell_contents for cell in following.__closure__), strict=True))
        yield held["_mod"]
        following = held.get("_ffn")
