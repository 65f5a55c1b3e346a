"""Each name of Flower that we use and Flower does not document: if a new version takes one away, its test says which."""

import logging

import flwr.supercore
import flwr.superlink.grid
import pytest
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedcgd_flower.flower_private import SIMULATION_GRID, log
from fedcgd_flower.grid import kind_of


def test_flwr_supercore_log_writes_to_flowers_logger(caplog: pytest.LogCaptureFixture) -> None:
    assert hasattr(flwr.supercore, "log"), (
        "flwr.supercore.log is gone: in flower_private, use logging.getLogger('flwr').log"
    )
    with caplog.at_level(logging.INFO, logger="flwr"):
        log(logging.INFO, "a %s", "line")
    assert [(entry.name, entry.getMessage()) for entry in caplog.records] == [("flwr", "a line")]


def test_flwr_superlink_grid_has_the_grid_of_a_simulation() -> None:
    kind = getattr(flwr.superlink.grid, SIMULATION_GRID, None)
    assert kind is not None, f"flwr.superlink.grid.{SIMULATION_GRID} is gone: a simulation is not recognised any more"
    assert issubclass(kind, Grid)
    assert kind_of(object.__new__(kind)).is_simulation
    assert not kind_of(object.__new__(flwr.superlink.grid.HttpGrid)).is_simulation


def test_a_message_can_be_made_outside_of_a_run() -> None:
    """Simulations in one process, benchmarks and these tests set the identity that a Message asks for."""
    for name in ("task_id", "run_id", "node_id"):
        assert hasattr(TaskIdentity, name), f"flwr.supercore.task_identity.TaskIdentity.{name} is gone"
