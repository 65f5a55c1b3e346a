"""Each name of Flower that we use and Flower does not document: if a new version takes one away, its test says which."""

import logging

import flwr.supercore
import flwr.superlink.grid
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedcgd_flower.flower_private import SIMULATION_GRID, is_client_fn, log, mods_after
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


def test_mods_are_chained_by_closures_over_mod_and_ffn() -> None:
    """Without them a privacy mod of Flower's behind ours would go unnoticed."""
    found = []

    def first(message, context, call_next):
        found.extend(mods_after(call_next))
        return call_next(message, context)

    def second(message, context, call_next):
        return call_next(message, context)

    def third(message, context, call_next):
        return call_next(message, context)

    app = ClientApp(mods=[first, second])

    @app.train(mods=[third])
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    message.metadata.__dict__["_message_id"] = "m"
    app(message, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={}))
    assert found == [second, third], "Flower chains mods in another way now: closures over _mod and _ffn are gone"


def test_a_client_fn_is_found_behind_the_mods_by_the_name_it_is_closed_over_by() -> None:
    found = []

    def mod(message, context, call_next):
        found.append(is_client_fn(call_next))
        return Message(RecordDict(), reply_to=message)

    earlier = ClientApp(client_fn=lambda context: pytest.fail("not called"), mods=[mod, lambda m, c, n: n(m, c)])
    app = ClientApp(mods=[mod, lambda m, c, n: n(m, c)])
    app.train()(lambda message, context: Message(RecordDict(), reply_to=message))
    for each in (earlier, app):
        message = Message(RecordDict(), dst_node_id=1, message_type="train")
        message.metadata.__dict__["_message_id"] = "m"
        each(message, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={}))
    assert found == [True, False], "Flower handles a client_fn in another way now"


def test_a_message_can_be_made_outside_of_a_run() -> None:
    """Simulations in one process, benchmarks and these tests set the identity that a Message asks for."""
    for name in ("task_id", "run_id", "node_id"):
        assert hasattr(TaskIdentity, name), f"flwr.supercore.task_identity.TaskIdentity.{name} is gone"
