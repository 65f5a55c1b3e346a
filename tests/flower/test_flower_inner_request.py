"""What an inner strategy sends reaches every user of a round as it is, or is refused by name before anybody is asked."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_grid import FakeGrid, FakeNode, is_training
from flower_runs import SIZE, make, names, two_nodes
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from shared import record

from fedcgd_flower import clipped_update_mod


class Configures(FedAvg):
    """FedAvg whose messages are changed, each with its number, after they were made."""

    def __init__(self, change: Callable[[int, Message], object]) -> None:
        super().__init__(min_train_nodes=4)
        self.change = change

    def configure_train(self, server_round, arrays, config, grid):
        messages = []
        for number, message in enumerate(super().configure_train(server_round, arrays, config, grid)):
            own = Message(
                RecordDict(dict(message.content)),
                dst_node_id=message.metadata.dst_node_id,
                message_type=message.metadata.message_type,
            )
            messages.append(self.change(number, own) or own)
        return messages


def put(key: str, value: Callable[[int], object]) -> Callable[[int, Message], None]:
    return lambda number, message: message.content.__setitem__(key, value(number))


REFUSED = {
    "rates": put("config", lambda number: ConfigRecord({"lr": float(number)})),
    "control variates": put("c", lambda _: record(np.ones(SIZE))),
    "another model": put("arrays", lambda _: record(np.ones(SIZE))),
    "no model": lambda _, message: message.content.__delitem__("arrays"),
    "own records": lambda number, message: put(f"only {number}", lambda _: ConfigRecord({"a": 1}))(number, message),
    "a second configuration": put("settings", lambda _: ConfigRecord({"head": "linear"})),
    "scores": put("scores", lambda _: MetricRecord({"best": 0.5})),
    "own type": lambda _, message: Message(message.content, dst_node_id=1, message_type="train.lora"),
    "no training": lambda _, message: Message(message.content, dst_node_id=1, message_type="query"),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_sent_is_refused_by_name_before_anybody_is_asked(change, tmp_path: Path) -> None:
    """It was dropped in silence: all got the first node's rate, and nobody the control variates."""
    grid, evaluated = two_nodes(), []
    with pytest.raises(ValueError, match=r"Configures (tells|sends)"):
        make(Configures(change), ledger=tmp_path / "run.db").start(
            grid, record(np.zeros(SIZE)), evaluate_fn=lambda release, arrays: evaluated.append(release)
        )
    assert not grid.sent
    assert not evaluated


def test_a_strategy_that_asks_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="FedAvg asks"):
        make(FedAvg(fraction_train=0.0)).start(two_nodes(), record(np.zeros(SIZE)))


def mod_node(user: str, seen: list[RecordDict], reply: dict | None = None) -> FakeNode:
    app = ClientApp(mods=[clipped_update_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(message.content)
        [model] = message.content.array_records.values()
        content: dict = {"arrays": record(model["w"].numpy() + np.float32(1))} | (reply or {})
        return Message(RecordDict(content), reply_to=message)

    return FakeNode(app, config={"user-id": user})


def mod_grid(seen: list[RecordDict], **options) -> FakeGrid:
    return FakeGrid({i + 1: mod_node(user, seen, **options) for i, user in enumerate(names(12))})


def test_the_mod_lets_no_train_message_of_another_strategy_through() -> None:
    app = ClientApp(mods=[clipped_update_mod])
    app.train("lora")(lambda message, context: Message(message.content, reply_to=message))
    message = Message(RecordDict({"arrays": record(np.zeros(SIZE))}), dst_node_id=1, message_type="train.lora")
    message.metadata.__dict__["_message_id"] = "m"
    context = Context(run_id=1, node_id=1, node_config={"user-id": "u"}, state=RecordDict(), run_config={})
    with pytest.raises(ValueError, match="fedcgd's CorrelatedNoise"):
        app(message, context)


def test_a_second_record_of_arrays_in_a_reply_is_an_error_and_not_dropped(caplog: pytest.LogCaptureFixture) -> None:
    strategy = make()
    strategy.start(mod_grid([], reply={"c": record(np.ones(SIZE))}), record(np.zeros(SIZE)), num_rounds=1)
    assert strategy.dropped == {"wrong arrays": 4}
    assert "['arrays', 'c']" in caplog.text


def test_another_record_in_a_reply_is_named_in_the_nodes_log(caplog: pytest.LogCaptureFixture) -> None:
    make().start(mod_grid([], reply={"state": ConfigRecord({"a": 1})}), record(np.zeros(SIZE)), num_rounds=1)
    assert "records ['state']" in caplog.text


class Halves(FedAvg):
    """As Flower's advanced-pytorch: edits the configuration in place, which stays so for the rounds after."""

    calls = 0

    def configure_train(self, server_round, arrays, config, grid):
        self.calls += 1
        config["lr"] *= 0.5
        return super().configure_train(server_round, arrays, config, grid)


def rates_told(grid: FakeGrid) -> list[tuple[int, float]]:
    """(round, rate) of each try."""
    sent = [(m.content["fedcgd"]["round"], m.content["config"]["lr"]) for m in grid.sent if is_training(m)]
    return list(dict.fromkeys(sent))


def test_edits_of_the_configuration_stay_for_later_rounds_and_not_for_later_tries(tmp_path: Path) -> None:
    """0.5 ** round, however often a round is tried, and whether or not the run was resumed."""
    expected = [(t, 0.5 ** (t + 1)) for t in range(6)]
    config = ConfigRecord({"lr": 1.0})

    grid, inner = two_nodes(), Halves()
    make(inner).start(grid, record(np.zeros(SIZE)), train_config=config)
    assert rates_told(grid) == expected
    assert inner.calls == 6  # the question before the first round has left no trace
    assert dict(config) == {"lr": 1.0}

    failing = two_nodes()
    tries = {"left": 3}

    def tamper(request, reply):
        if is_training(request) and request.content["fedcgd"]["round"] == 1 and tries["left"] > 0:
            tries["left"] -= 1
            return None
        return reply

    for fake in failing.nodes.values():
        fake.tamper = tamper
    make(Halves(), min_answers=4).start(failing, record(np.zeros(SIZE)), train_config=config, timeout=0.0)
    assert tries["left"] == 0
    assert rates_told(failing) == expected

    resumed = two_nodes()
    for rounds in (2, 4):
        make(Halves(), ledger=tmp_path / "run.db").start(
            resumed, record(np.zeros(SIZE)), num_rounds=rounds, train_config=config
        )
    assert rates_told(resumed) == expected


@pytest.mark.parametrize("other", [{"lr": 8.0}, {"lr": 1.0, "epochs": 2}, {}, None], ids=repr)
def test_a_run_goes_on_with_the_configuration_it_began_with(tmp_path: Path, other: dict | None) -> None:
    """Another one was taken without a word: half of the run was trained otherwise than its record says."""
    grid, path = two_nodes(), tmp_path / "run.db"

    def start(config: dict | None, rounds: int) -> None:
        given = None if config is None else ConfigRecord(config)
        make(Halves(), ledger=path).start(grid, record(np.zeros(SIZE)), num_rounds=rounds, train_config=given)

    with pytest.raises(KeyError):  # nothing is released with it: the next one may be another
        start({"rate": 1.0}, 1)
    start({"lr": 1.0}, 2)
    with pytest.raises(ValueError, match="train_config is"):
        start(other, 1)
    start({"lr": 1.0}, 4)
    assert rates_told(grid) == [(r, 0.5 ** (r + 1)) for r in range(6)]


def test_the_same_arrays_in_other_objects_are_the_same_model() -> None:
    class Copies(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            copied = ArrayRecord({name: Array(array.numpy().copy()) for name, array in arrays.items()})
            return super().configure_train(server_round, copied, config, grid)

    strategy = make(Copies())
    strategy.start(two_nodes(), record(np.zeros(SIZE)))
    assert strategy.releases == 6
