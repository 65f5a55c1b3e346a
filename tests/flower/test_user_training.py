"""The node's side: sums of clipped updates, over exactly the users that were asked and are hosted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_grid import FakeGrid, FakeNode
from flower_requests import NodeSum, read_train_reply
from flower_runs import hosting
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

from fedcgd.noise.quantisation import Lattice
from fedcgd_flower import ClippedUpdateMod, clipped_update_mod, host_users, one_gradient_step, sequential_training
from fedcgd_flower.clipping import Clipping
from fedcgd_flower.grid import send_and_receive
from fedcgd_flower.layout import Layout
from fedcgd_flower.messages import TrainTask, train_message
from fedcgd_flower.user_training import LocalTask
from fedcgd_flower.users import HostedUsers, read_users_reply, users_query

STEP = 2.0**-24
LAYOUT = Layout(("w",), ((3,),), ("float32",))
TARGETS = {"ann": [3.0, 0, 0], "bob": [0, 0.3, 0], "cat": [0, 0, -4.0], "dan": [np.nan, 0, 0]}


def ask(grid: FakeGrid, node_id: int, users: tuple[str, ...], *, clip_norm: float = 1.0) -> NodeSum | str:
    """The node's sum, in units of the model."""
    task = TrainTask(
        round=0,
        attempt=0,
        clipping=Clipping(clip_norm=clip_norm, grid=Lattice(STEP)),
        users=users,
        layout=LAYOUT,
        node=node_id,
    )
    message = train_message(np.zeros(3, np.float32), ConfigRecord({"server-round": 1}), task)
    [reply] = send_and_receive(grid, [message], timeout=0.0)
    result = read_train_reply(reply, task)
    return NodeSum(Lattice(STEP).from_steps(result.update), result.answered) if isinstance(result, NodeSum) else result


def towards_target(model: ArrayRecord, user: str, config, context) -> ArrayRecord:
    """Local training that ends at the user's target."""
    if user == "eve":
        raise RuntimeError("private text")
    return ArrayRecord({"w": Array(np.asarray(TARGETS[user], np.float32))})


def pool(users=("ann", "bob", "cat", "dan", "eve")) -> FakeNode:
    return hosting(users, sequential_training(towards_target))


@pytest.mark.parametrize(
    ("hosted", "asked", "total", "answered"),
    [
        # ann (3, 0, 0) → (1, 0, 0); bob is inside the ball; cat (0, 0, −4) → (0, 0, −1)
        (TARGETS, ("ann", "bob", "cat"), [1, 0.3, -1], 3),
        ([*TARGETS, "eve"], ("dan", "bob", "eve"), [0, 0.3, 0], 1),  # not finite, and fails
        (["bob"], ("ann", "bob"), [0, 0.3, 0], 1),  # a node does not speak for users that it does not host
    ],
)
def test_a_sum_is_of_each_hosted_users_clipped_update(hosted, asked, total, answered: int) -> None:
    result = ask(FakeGrid({1: pool(hosted)}), 1, asked)
    np.testing.assert_allclose(result.update, total, rtol=1e-6)
    assert result.answered == answered


CONTEXT = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def fails(context) -> list[str]:
    raise KeyError(f"patient {4000 + 711}")


@pytest.mark.parametrize(
    ("users", "problem", "logged"),
    [
        (lambda context: ["ann", 17], "no ids", "is int"),
        (lambda context: np.array([17, 18]), "no ids", "one is int64"),  # a column of a table
        (lambda context: ["ann", ""], "no ids", "one is an empty text"),
        (lambda context: ["ann", float("nan")], "no ids", "one is float"),  # a row without an id
        (lambda context: ["ann", None], "no ids", "one is NoneType"),
        (lambda context: "ann", "no ids", "got str"),  # each letter would be a user
        (lambda context: b"ann", "no ids", "got bytes"),
        (lambda context: None, "no ids", "got NoneType"),
        (fails, "users failed", "in fails"),
    ],
)
def test_a_node_that_names_no_ids_says_so_and_no_id(users, problem: str, logged: str, caplog) -> None:
    app = ClientApp()
    host_users(app, users, sequential_training(towards_target))
    reply = app(users_query(1), CONTEXT)
    assert read_users_reply(reply) == problem
    assert dict(reply.content["fedcgd"]) == {"problem": problem}
    assert logged in caplog.text
    assert not {"17", "4711"} & set(caplog.text.replace("such as '17'", "").replace("['17']", "").split())


@pytest.mark.parametrize("users", ["ann", b"ann", fails])
def test_no_letter_of_a_text_is_trained_as_a_user(users) -> None:
    """A server that asks for letters, or for whom it was told before, is answered for nobody."""
    node = FakeNode(ClientApp())
    host_users(node.app, users if callable(users) else lambda context: users, sequential_training(towards_letter))
    result = ask(FakeGrid({1: node}), 1, ("a", "n"))
    assert (result.answered, result.update.any()) == (0, False)


def towards_letter(model: ArrayRecord, user: str, config, context) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.ones(3, np.float32))})


def test_a_node_says_in_its_log_that_it_named_other_users_before(caplog: pytest.LogCaptureFixture) -> None:
    calls = iter([["ann", "bob"], ["ann"]])
    app = ClientApp()
    host_users(app, lambda context: next(calls), sequential_training(towards_target))
    assert read_users_reply(app(users_query(1), CONTEXT)) == HostedUsers(("ann", "bob"))
    assert ask(FakeGrid({1: FakeNode(app)}), 1, ("ann", "bob")).answered == 1
    assert "users(context) names" in caplog.text


def test_the_id_of_a_single_user_has_to_be_a_text(caplog: pytest.LogCaptureFixture) -> None:
    app = ClientApp(mods=[ClippedUpdateMod(user=lambda context: 17)])  # type: ignore[arg-type,return-value]
    app.train()(lambda message, context: message)
    assert read_users_reply(app(users_query(1), CONTEXT)) == "no ids"
    assert "is int" in caplog.text


@pytest.mark.parametrize("kind", ["pool", "mod"])
def test_who_is_named_twice_in_a_request_does_not_weigh_twice(kind: str) -> None:
    """Under masks nobody else could see it: five times in a request was five clip norms."""
    users = ("ann",) * 5
    task = TrainTask(
        round=0, attempt=0, clipping=Clipping(clip_norm=1.0, grid=Lattice(STEP)), users=("ann",), layout=LAYOUT, node=1
    )
    message = train_message(np.zeros(3, np.float32), ConfigRecord({"server-round": 1}), task)
    message.content["fedcgd"]["users"] = list(users)
    node = pool() if kind == "pool" else mod_node(lambda message, context: pytest.fail("nothing is trained"))
    with pytest.raises(ValueError, match="named twice"):
        node.app(message, CONTEXT)


def test_gradient_steps_count_the_users_within_the_norm_as_the_plain_loop_does() -> None:
    """The update is minus the gradient; what is counted has no sign to change."""
    inputs = {"ann": torch.tensor([3.0, 0, 0]), "bob": torch.tensor([0, 0.3, 0]), "cat": torch.tensor([0, 0, 0.4])}
    step = one_gradient_step(lambda flat, x: (flat * x).sum(), lambda asked, context: (inputs[asked[0]][None],))
    loop = sequential_training(lambda model, user, config, context: ArrayRecord({"w": Array(-inputs[user].numpy())}))
    work = LocalTask(
        model=np.zeros(3, np.float32),
        layout=LAYOUT,
        users=tuple(inputs),
        clipping=Clipping(clip_norm=1.0, grid=Lattice(STEP), indicator=1000),
        config=ConfigRecord(),
    )
    for clipped_sum in (step, loop):
        total, answered = clipped_sum(work, CONTEXT)
        np.testing.assert_allclose(total[:3] * STEP, [-1, -0.3, -0.4], rtol=1e-6)
        assert (int(total[3]), answered) == (1000, 3)  # two are within the norm, and one is not
        total, answered = clipped_sum(replace(work, users=()), CONTEXT)
        assert (total.any(), answered) == (False, 0)


def mod_node(train) -> FakeNode:
    app = ClientApp()
    app.train(mods=[clipped_update_mod])(train)
    return FakeNode(app, config={"user-id": "ann"})


@pytest.mark.parametrize(("mods", "users"), [([LocalDpMod(1.0, 1.0, 1.0, 1e-5)], ("ann",)), ([], ("ann", "bob"))])
def test_mod_refuses_beside_another_privacy_mod_and_for_two_users(mods, users) -> None:
    """Whoever asks: the server does not, as the node has told it what it is."""
    app = ClientApp()
    app.train(mods=[clipped_update_mod, *mods])(lambda message, context: pytest.fail("nothing is trained"))
    assert isinstance(ask(FakeGrid({1: FakeNode(app, config={"user-id": "ann"})}), 1, users), str)


@pytest.mark.parametrize("kind", ["mod", "pool"])
def test_what_training_raises_stays_on_the_node_with_its_text(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Flower would send "ValueError: …" with the text to the server."""
    arrived = []

    def keep(request, reply):
        arrived.append(reply)
        return reply

    def fail(*_):
        raise ValueError(f"patient {4000 + 711} has the flu")

    node = mod_node(fail) if kind == "mod" else hosting(["ann"], fail)
    node.tamper = keep
    assert ask(FakeGrid({1: node}), 1, ("ann",)) == "training failed"
    assert arrived[0].error.reason == "training failed"
    assert "4711" not in str(arrived[0]) + caplog.text
    assert "in fail" in caplog.text  # where to look


def test_a_user_whose_training_raises_is_logged_by_where_and_without_the_text(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_):
        torch.zeros(2) + torch.zeros(4000 + 711)  # the library's own lines are not where to look

    result = ask(FakeGrid({1: hosting(["ann"], sequential_training(fail))}), 1, ("ann",))
    assert isinstance(result, NodeSum)
    assert not result.answered
    line = fail.__code__.co_firstlineno + 1
    assert f"failed with RuntimeError at {__file__}, line {line}" in caplog.text
    assert "4711" not in caplog.text
    assert "ann" not in caplog.text


@pytest.mark.parametrize(
    ("replied", "named"), [(ArrayRecord({"w": Array(np.zeros(4, np.float32))}), "(4,)"), ({"w": 1}, "dict")]
)
def test_the_log_of_a_pool_says_how_a_replied_model_differs(replied, named: str, caplog) -> None:
    result = ask(FakeGrid({1: hosting(["ann"], sequential_training(lambda *_: replied))}), 1, ("ann",))
    assert isinstance(result, NodeSum)
    assert not result.answered
    assert named in caplog.text
