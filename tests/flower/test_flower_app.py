"""An ordinary Flower app with one line more: whole state_dicts, every way to give the mod, other mods beside it."""

import itertools

import numpy as np
import pytest
import torch
from fake_grid import FakeGrid, FakeNode, is_training
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client import mod as old
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, arrays_size_mod, fixedclipping_mod, message_size_mod
from flwr.serverapp.strategy import FedAdam, FedAvg
from plans import make_plan
from torch import nn

from fedcgd import LambdaCGD, NoiseKey, Participation
from fedcgd_flower import ClippedUpdateMod, CorrelatedNoise, arrays_of, clipped_update_mod, load_arrays
from fedcgd_flower.layout import Layout, cast_as_trained
from fedcgd_flower.users import configured_user

LOCAL_DP = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)


class Net(nn.Module):
    """BatchNorm with its counter, and a layer that is frozen."""

    def __init__(self, norm: str = "batch") -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4) if norm == "batch" else nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs):
        return self.head(self.norm(self.frozen(inputs)))


def make_net(norm: str = "batch") -> Net:
    torch.manual_seed(0)
    return Net(norm)


TRAINABLE = [name for name, parameter in make_net().named_parameters() if parameter.requires_grad]


def ordinary_app(norm: str, seen: list, *, mods=None, train_mods=None) -> ClientApp:
    """As `flwr new` makes it: state_dicts in and out, examples counted, an evaluate function."""
    app = ClientApp() if mods is None else ClientApp(mods=mods)

    @app.train(**({} if train_mods is None else {"mods": train_mods}))
    def train(message: Message, context) -> Message:
        model = make_net(norm)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=True)
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=generator)).square().sum().backward()
            optimizer.step()
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 8, "loss": 1.0})}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context) -> Message:
        model = make_net(norm)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=True)
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 8, "accuracy": 0.5})}), reply_to=message)

    return app


def nodes(app: ClientApp, count: int = 4) -> FakeGrid:
    return FakeGrid(
        {i: FakeNode(app, config={"partition-id": i, "num-partitions": count}) for i in range(1, count + 1)}
    )


def strategy(inner=None, *, rounds: int = 2, noise_multiplier: float = 1e-3, **options) -> CorrelatedNoise:
    plan = make_plan(
        LambdaCGD(0.5), Participation(rounds=rounds, min_separation=1), clip_norm=0.5, noise_multiplier=noise_multiplier
    )
    defaults = {"key": NoiseKey.simulation(1), "cohort_size": 4, "patience": 0.0, "min_answers": 4, "expected_users": 4}
    return CorrelatedNoise(inner or FedAvg(), plan, **defaults | options)


FORMS = {
    "for the app": {"mods": [clipped_update_mod]},
    "for the train function": {"train_mods": [clipped_update_mod]},
    "beside harmless mods": {"mods": [message_size_mod, clipped_update_mod], "train_mods": [arrays_size_mod]},
    "with a user": {"mods": [ClippedUpdateMod(user=lambda context: f"silo {context.node_config['partition-id']}")]},
}


@pytest.mark.parametrize("form", FORMS)
def test_one_line_makes_an_ordinary_app_private(form: str) -> None:
    seen: list = []
    grid = nodes(ordinary_app("group", seen, **FORMS[form]))
    run = strategy(FedAdam(), trainable=TRAINABLE)
    start = make_net("group").state_dict()
    result = run.start(grid, ArrayRecord(start))
    assert run.releases == 2
    assert not run.dropped
    assert len(seen) == 8
    final = result.arrays.to_torch_state_dict()
    assert list(final) == list(start)
    make_net("group").load_state_dict(final, strict=True)
    for name in start:
        assert torch.equal(final[name], start[name]) == (name not in TRAINABLE), name
    assert not result.evaluate_metrics_clientapp  # what clients measure has no noise


def test_a_state_dict_is_no_array_record() -> None:
    with pytest.raises(TypeError, match="got OrderedDict"):
        strategy().start(nodes(ClientApp()), make_net().state_dict())


def test_an_app_with_its_own_names_of_records_finds_them() -> None:
    """FedAvg(arrayrecord_key=…, configrecord_key=…) of an app that had them before it was made private."""
    app = ClientApp(mods=[clipped_update_mod])
    seen: list = []

    @app.train()
    def train(message: Message, context) -> Message:
        model = message.content["weights"].to_torch_state_dict()
        seen.append(message.content["how"]["lr"])
        new = {name: value + 1 for name, value in model.items()}
        return Message(RecordDict({"weights": ArrayRecord(new)}), reply_to=message)

    run = strategy(FedAvg(arrayrecord_key="weights", configrecord_key="how"))
    run.start(nodes(app), ArrayRecord({"w": torch.zeros(3)}), train_config=ConfigRecord({"lr": 0.5}))
    assert (run.releases, seen) == (2, [0.5] * 8)


def test_fixed_statistics_counters_and_frozen_parameters_stay_those_of_the_start() -> None:
    start = make_net().state_dict()
    start["norm.running_mean"] += 0.25
    seen: list = []
    grid = nodes(ordinary_app("batch", seen, mods=[clipped_update_mod]))
    final = strategy(trainable=TRAINABLE).start(grid, ArrayRecord(start)).arrays.to_torch_state_dict()
    for name in start:
        assert torch.equal(final[name], start[name]) == (name not in TRAINABLE), name
    assert final["norm.num_batches_tracked"].dtype == torch.int64
    assert all(torch.equal(state["norm.running_mean"], start["norm.running_mean"]) for state in seen)
    # Nothing but the trained numbers is sent: 4 + 4 weights of the norm, 8 + 2 of the head.
    for request in filter(is_training, grid.sent):
        assert request.content["model"]["flat"].shape == (18,)
        assert list(request.content["carried"]) == ["flat"]


def test_batch_norm_is_refused_with_the_remedy_before_anything_is_sent() -> None:
    grid = nodes(ordinary_app("batch", [], mods=[clipped_update_mod]))
    with pytest.raises(ValueError, match=r"norm\.running_mean.*GroupNorm.*trainable="):
        strategy().start(grid, ArrayRecord(make_net().state_dict()))
    assert not list(filter(is_training, grid.sent))
    with pytest.raises(ValueError, match="trainable names"):
        strategy(trainable=["body"]).start(grid, ArrayRecord(make_net("group").state_dict()))


OLD_DP = old.LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)


@pytest.mark.parametrize(
    "mod",
    [
        LOCAL_DP,
        fixedclipping_mod,
        adaptiveclipping_mod,
        OLD_DP,
        old.fixedclipping_mod,
        old.adaptiveclipping_mod,
        old.secagg_mod,
        old.secaggplus_mod,
    ],
    ids=["local", "fixed", "adaptive", "old local", "old fixed", "old adaptive", "secagg", "secagg+"],
)
@pytest.mark.parametrize("where", ["before", "after", "for the train function"])
def test_another_privacy_mod_is_refused_at_once(mod, where: str, caplog: pytest.LogCaptureFixture) -> None:
    mods = {
        "before": {"mods": [mod, clipped_update_mod]},
        "after": {"mods": [clipped_update_mod, mod]},
        "for the train function": {"mods": [clipped_update_mod], "train_mods": [mod]},
    }[where]
    grid = nodes(ordinary_app("group", [], **mods))
    run = strategy()
    with pytest.raises(ValueError, match="there"):
        run.start(grid, ArrayRecord(make_net("group").state_dict()), num_rounds=1)
    assert run.releases == 0
    assert not list(filter(is_training, grid.sent))
    expected = "as the first of its mods" if where == "before" else "another mod for privacy inside clipped_update_mod"
    assert expected in caplog.text


def changes_update(content: RecordDict, change) -> None:
    content["update"] = ArrayRecord({"flat": Array(change(content["update"]["flat"].numpy()))})


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda content: changes_update(content, lambda sent: sent * 2), "altered reply"),
        (lambda content: changes_update(content, lambda sent: sent + np.float64(0.1)), "wrong type"),
        (lambda content: content.update({"metrics": MetricRecord({"loss": 0.25})}), "altered reply"),
        (lambda content: content["fedcgd"].update({"loss": 0.25}), "altered reply"),
    ],
    ids=["doubles", "noises", "a record more", "a number more"],
)
def test_a_reply_that_a_mod_changed_after_clipping_is_dropped(change, cause: str, caplog) -> None:
    """Flower's LocalDpMod before clipped_update_mod once made 0.04, 0.23, … of +0.1, and nobody was told."""

    def changes(message: Message, context, call_next) -> Message:
        reply = call_next(message, context)
        if is_training(message):
            change(reply.content)
        return reply

    run = strategy()
    grid = nodes(ordinary_app("group", [], mods=[changes, clipped_update_mod]))
    run.start(grid, ArrayRecord(make_net("group").state_dict()), num_rounds=1)
    assert run.dropped == {cause: 4}
    assert ("before clipped_update_mod" in caplog.text) == (cause == "altered reply")


def test_only_the_server_apps_own_questions_reach_other_functions() -> None:
    """CorrelatedNoise sends no evaluation and no query: what a node replies to those, the server app has asked for itself."""
    app = ordinary_app("group", [], mods=[clipped_update_mod])

    @app.query()
    def query(message: Message, context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"age": 81})}), reply_to=message)

    grid = nodes(app)
    strategy().start(grid, ArrayRecord(make_net("group").state_dict()))
    assert {message.metadata.message_type for message in grid.sent} == {"train"}
    asked = Message(RecordDict(), dst_node_id=1, message_type="query")
    [reply] = grid.send_and_receive([asked])
    assert reply.content["metrics"] == MetricRecord({"age": 81})


def test_a_node_without_an_id_says_so(caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid({1: FakeNode(ordinary_app("group", [], mods=[clipped_update_mod]))})
    with pytest.raises(ValueError, match="there"):
        strategy().start(grid, ArrayRecord(make_net("group").state_dict()), num_rounds=1)
    assert "--node-config 'user-id=" in caplog.text


def test_the_modes_of_an_id() -> None:
    for config, user in (({"user-id": "ann", "partition-id": 0}, "ann"), ({"partition-id": 0}, "0"), ({}, None)):
        context = Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})
        assert configured_user(context) == user


def test_half_precision_is_no_update() -> None:
    """A model that a node holds in 16 bits is rounded; rounding must not count as training, or leave no room for it."""
    for dtype, sent in itertools.product(
        (torch.float16, torch.bfloat16), (torch.float16, torch.bfloat16, torch.float32)
    ):
        model = make_net("group").to(sent)
        nn.init.constant_(model.norm.weight, 1000.3)
        app = ClientApp(mods=[clipped_update_mod])

        @app.train()
        def train(message: Message, context, dtype=dtype) -> Message:
            model = make_net("group").to(dtype)
            load_arrays(model, message.content["arrays"])
            with torch.no_grad():
                model.head.bias += 0.25
            return Message(RecordDict({"arrays": arrays_of(model)}), reply_to=message)

        run = strategy(rounds=2, noise_multiplier=0.01)
        final = run.start(nodes(app), arrays_of(model)).arrays
        assert not run.dropped
        moved = {
            name: final[name].numpy() - array.numpy().astype(np.float32) for name, array in arrays_of(model).items()
        }
        np.testing.assert_allclose(moved["head.bias"], 0.5, atol=0.03)
        for name in TRAINABLE[:-1]:
            np.testing.assert_allclose(moved[name], 0, atol=0.03)
        load_arrays(model, final)  # also into 16 bits


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_a_model_trained_in_16_bits_is_rounded_as_torch_rounds_it(half: torch.dtype) -> None:
    bits = np.random.default_rng(0).integers(2**32, size=100_000, dtype=np.uint64).astype(np.uint32)
    model = bits.view(np.float32)[np.isfinite(bits.view(np.float32))]
    rounded = torch.from_numpy(model).to(half).float().numpy()
    layout = Layout(("w",), (model.shape,), ("float32",))
    np.testing.assert_array_equal(cast_as_trained(model, [rounded], layout), rounded)
    assert cast_as_trained(model, [model], layout) is model


STATE = make_net("group").state_dict()


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (ArrayRecord(STATE | {"head.bias": torch.zeros(3)}), "'head.bias'"),
        (ArrayRecord({f"module.{name}": value for name, value in STATE.items()}), "'module.frozen.weight'"),
        (MetricRecord({"loss": 1.0}), "missing from []"),
    ],
    ids=["another shape", "other names", "no arrays"],
)
def test_a_reply_of_another_model_is_told_as_that(record, told: str, caplog: pytest.LogCaptureFixture) -> None:
    """Not as a failed training: the node's log names the arrays, and the server's says what to do."""
    app = ClientApp(mods=[clipped_update_mod])
    app.train()(lambda message, context: Message(RecordDict({"replied": record}), reply_to=message))
    run = strategy(min_answers=0)
    run.start(nodes(app), ArrayRecord(STATE), num_rounds=1)
    assert run.dropped == {"wrong arrays": 4}
    assert told in caplog.text
    assert "whole model" in caplog.text


def test_helpers_name_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"parameter 'norm\.weight'"):
        load_arrays(make_net(), ArrayRecord({"head.weight": Array(np.zeros((2, 4), np.float32))}))


def test_an_app_of_the_earlier_api_is_told_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """It ended in a KeyError in the node's log, and in "training failed" on the server."""

    class Numbers(NumPyClient):
        def fit(self, parameters, config):
            pytest.fail("it reads other messages")

    app = ClientApp(client_fn=lambda context: Numbers().to_client(), mods=[clipped_update_mod, message_size_mod])
    run = strategy(patience=0)
    with pytest.raises(ValueError, match="Flower's earlier"):
        run.start(nodes(app), ArrayRecord({"w": torch.zeros(3)}))
