"""Weights that a model ties are one array: `state_dict()` lists them twice, and as two they were clipped and noised twice."""

import numpy as np
import pytest
import torch
from fake_grid import FakeGrid, FakeNode
from flower_runs import hosting, make, names
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedcgd_flower import (
    IncompleteRunError,
    arrays_of,
    clipped_update_mod,
    load_arrays,
    sequential_training,
)
from fedcgd_flower.layout import Layout, tied_arrays

EMBEDDING, HEAD = "embedding.weight", "head.weight"


class Tied(nn.Module):
    """A small language model, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight


def train_as_usual(arrays: ArrayRecord) -> ArrayRecord:
    model = Tied()
    model.load_state_dict(arrays.to_torch_state_dict())
    model.head(model.embedding(torch.arange(7))).square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.01).step()
    return ArrayRecord(model.state_dict())


def nodes_with_the_mod() -> FakeGrid:
    app = ClientApp(mods=[clipped_update_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": train_as_usual(message.content["arrays"])}), reply_to=message)

    return FakeGrid({i + 1: FakeNode(app, config={"user-id": user}) for i, user in enumerate(names(12))})


def test_nodes_refuse_to_train_tied_weights_twice_and_say_how_to_train_them_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = make()
    with pytest.raises(IncompleteRunError, match=r"\(tied weights\).*What helps: .*initial_arrays=arrays_of\(model\)"):
        strategy.start(nodes_with_the_mod(), ArrayRecord(Tied().state_dict()))
    assert set(strategy.dropped) == {"tied weights"}
    assert f"the arrays {[EMBEDDING, HEAD]} are one tensor of the model" in caplog.text  # on the node


def test_users_of_a_pool_are_refused_too(caplog: pytest.LogCaptureFixture) -> None:
    training = sequential_training(lambda model, user, config, context: train_as_usual(model))
    with pytest.raises(IncompleteRunError, match="left out"):
        make().start(FakeGrid({1: hosting(names(12), training)}), ArrayRecord(Tied().state_dict()))
    assert f"the arrays {[EMBEDDING, HEAD]} are one tensor of the model" in caplog.text


def test_the_remedy_trains_them_once() -> None:
    app = ClientApp(mods=[clipped_update_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = Tied()
        load_arrays(model, message.content["arrays"])
        model.head(model.embedding(torch.arange(7))).square().sum().backward()
        torch.optim.SGD(model.parameters(), 0.01).step()
        return Message(RecordDict({"arrays": arrays_of(model)}), reply_to=message)

    grid = FakeGrid({i + 1: FakeNode(app, config={"user-id": user}) for i, user in enumerate(names(12))})
    result = make().start(grid, arrays_of(Tied()))
    assert result.complete
    assert list(result.arrays) == [EMBEDDING]


LAYOUT = Layout(("a", "b"), ((2, 2), (2, 2)), ("float32", "float32"))
ONE, OTHER = np.array([1.0, 2, 3, 4], np.float32), np.array([1.0, 2, 3, 5], np.float32)


@pytest.mark.parametrize(
    ("trained", "sent", "found"),
    [
        ([ONE, ONE], np.zeros(8, np.float32), ("a", "b")),
        ([ONE, OTHER], np.zeros(8, np.float32), None),  # copies to begin with, as a transformer's layers often are
        ([ONE, ONE], np.concatenate([ONE, ONE]), None),  # not trained at all
        ([ONE, ONE], np.concatenate([ONE, OTHER]), ("a", "b")),  # noised apart in the last round
        ([ONE * 0 + 2, ONE * 0 + 2], np.zeros(8, np.float32), None),  # a norm's weights, which decayed alike
    ],
)
def test_what_is_evidence_of_one_tensor(trained, sent, found) -> None:
    assert tied_arrays(trained, sent, LAYOUT) == found
