"""The simulation app in this process, with two nodes."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_grid import FakeGrid, FakeNode
from flwr.app import Context, RecordDict

from fedcgd_simulations import client_app, server_app

APP = Path(__file__).resolve().parents[2] / "simulations"
DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
"""The app's run configuration."""


def released_by_the_app(
    config: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """(the models that it releases under `config`, flat, the initial one first; its figures)."""
    released: list[np.ndarray] = []
    load = server_app.load_arrays

    def keep(model, arrays) -> None:
        released.append(np.concatenate([array.numpy().ravel() for array in arrays.values()]))
        load(model, arrays)

    config = DEFAULTS | config | {"results": str(folder / "result.json")}
    nodes = {i: FakeNode(client_app.app, config={"partition-id": i, "num-partitions": 2}) for i in range(2)}
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    with monkeypatch.context() as patched:
        patched.setattr(server_app, "load_arrays", keep)
        server_app.app(FakeGrid(nodes, config), context)
    return released, json.loads((folder / "result.json").read_text())
