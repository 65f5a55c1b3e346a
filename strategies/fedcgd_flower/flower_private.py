"""Every name of Flower that we use and that Flower does not document: what a new version may take away, in one place.

`tests/flower/test_flower_private.py` and `test_flower_app.py` fail if one is gone. All else comes from `flwr.app`,
`flwr.clientapp`, `flwr.serverapp` and `flwr.simulation`.
"""

import traceback
from collections.abc import Iterator
from logging import ERROR, INFO, WARNING
from typing import Any

from flwr.supercore import log as log

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


def mods_after(call_next: Any) -> Iterator[Any]:
    """The mods that Flower calls after the one that was given `call_next`: it chains them by closures over `_mod` and `_ffn`."""
    following = call_next
    while "_mod" in (held := _held(following)):
        yield held["_mod"]
        following = held.get("_ffn")


def is_client_fn(call_next: Any) -> bool:
    """Whether what Flower calls last is a `client_fn` of its earlier API, by the name that its handler closes over."""
    following = call_next
    while "_ffn" in (held := _held(following)):
        following = held["_ffn"]
    return "client_fn" in held


def is_privacy_mod(mod: object) -> bool:
    """Whether `mod` is one of Flower's that clip, add noise or mask, of either API; by name, so that nothing is loaded."""
    kinds = [mod, *type(mod).__mro__]
    return any(
        str(getattr(kind, "__module__", "")).startswith(("flwr.client.mod", "flwr.clientapp.mod"))
        and getattr(kind, "__name__", "") in _PRIVACY_MODS
        for kind in kinds
    )


_PRIVACY_MODS = {"LocalDpMod", "fixedclipping_mod", "adaptiveclipping_mod", "secagg_mod", "secaggplus_mod"}


def _held(function: Any) -> dict[str, Any]:
    """What a function closes over, by name."""
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return {} if code is None else {n: c.cell_contents for n, c in zip(code.co_freevars, closure or (), strict=True)}
