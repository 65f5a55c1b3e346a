"""What is clipped for an example is that example's alone, in all layers, and nothing else carries the example into the model."""

import itertools
from collections import UserDict
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from central_runs import MODES, Run, refused
from opacus.layers import DPLSTM
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedcgd.opacus import CrossExampleLeakError

SIZE = 16


class Mixing(nn.Module):
    """Layers, and a way to the outputs on which the rows of a batch meet."""

    def __init__(self, way, layers="out"):
        super().__init__()
        kinds = {"hidden": (nn.Linear, 6), "place": (nn.Embedding, 6), "out": (nn.Linear, 3)}
        for name in layers.split():
            kind, outputs = kinds[name]
            self.add_module(name, kind(SIZE if name == "place" else 6, outputs))
        self.way = way

    def forward(self, *inputs):
        return self.way(self, *inputs)


class Shortened(torch.autograd.Function):
    """The slopes of a batch together to length 1."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, slopes):
        return slopes / slopes.norm()


def first_by_a_number(model, x):
    order = x[:, 0].argsort()
    return model.out(torch.tanh(model.hidden(x[order])))[order.argsort()]


def shuffled(model, x):
    order = torch.tensor([0, *(1 + np.random.permutation(len(x) - 1))])
    return model.out(model.hidden(x[order]))[order.argsort()]


def some_rows_twice(model, x):
    hidden, some = torch.tanh(model.hidden(x)).clone(), x[:, 0] > 0
    hidden[some] = torch.tanh(model.hidden(hidden[some]))
    return model.out(hidden)


def last_row(model, x):
    hidden = model.hidden(x)
    return model.out(torch.cat([hidden[:-1], hidden[-1:] + hidden[-2:-1]]))


def second_output(model, x):
    outputs = model.out(x)
    return outputs, outputs - outputs.mean(0)


FLAT, SEQUENCES = (6,), (SIZE, 6)  # sequences as long as the batch is large
MIXING = {
    "statistics of inputs": (FLAT, "out", lambda model, x: model.out(x - x.mean(0))),
    "statistics of a second output": (FLAT, "out", second_output),
    "where gradients are made alone": (
        FLAT,
        "out",
        lambda model, x: model.out(x - x.mean(0) if torch.is_grad_enabled() else x),
    ),
    "on the way back": (FLAT, "hidden out", lambda model, x: model.out(Shortened.apply(torch.tanh(model.hidden(x))))),
    "one layer in another order": (FLAT, "hidden out", first_by_a_number),
    "all rows but the first, by numbers that are not torch's": (FLAT, "hidden out", shuffled),
    "some rows twice": (FLAT, "hidden out", some_rows_twice),
    "the last row": (FLAT, "hidden out", last_row),
    "a step in time for an example": (
        SEQUENCES,
        "hidden out",
        lambda model, x: model.out(torch.tanh(model.hidden(x.transpose(0, 1)))).mean(0),
    ),
    "a position for an example": (
        SEQUENCES,
        "hidden place out",
        lambda model, x: model.out(torch.tanh(model.hidden(x) + model.place(torch.arange(SIZE))).mean(1)),
    ),
}


def inputs_of(shape=FLAT):
    return 3 * torch.randn(SIZE, *shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("what", MIXING)
@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_mixes_rows_is_refused(mode, what, monkeypatch):
    np.random.seed(0)  # of some orders, one in forty, nothing is seen: the replaced rows are where they were
    shape, layers, way = MIXING[what]
    data = TensorDataset(inputs_of(shape), torch.arange(SIZE) % 3)
    run = Run(monkeypatch, data=data, batch=SIZE, model=Mixing(way, layers), mode=mode)
    for whole in (True, False):
        run.model.training = whole  # its layers are in train mode
        with pytest.raises(CrossExampleLeakError):
            run.train()
    assert run.sums == []


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.out = DPLSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, inputs, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.recurrent(packed)[1][0][-1])


@pytest.mark.parametrize("convert", [torch.as_tensor, torch.Tensor.tolist])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_sequences_that_were_packed_in_another_order_are_refused(mode, convert, monkeypatch):
    """The recurrent layer's rows are then in the order of lengths, and the others' in that of the batch."""
    torch.manual_seed(0)
    data = TensorDataset(3 * torch.randn(SIZE, 7, 6), torch.arange(SIZE) % 3, 1 + torch.arange(SIZE) % 7)
    run = Run(monkeypatch, data=data, batch=SIZE, model=Packed(), mode=mode)
    with pytest.raises(CrossExampleLeakError):
        run.train(lambda batch: run.module(batch[0], convert(batch[2])))


@pytest.mark.parametrize("kind", [UserDict, dict])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_given_no_tensor_of_the_batch_is_refused(mode, kind, monkeypatch):
    """As texts, or a tensor for each, that the model pads to the longest: no row can be replaced to see what the others do."""
    run = Run(monkeypatch, model=Mixing(lambda model, texts: model.out(torch.stack(texts["rows"]))), mode=mode)
    with pytest.raises(CrossExampleLeakError, match="be told"):
        run.train(lambda batch: run.module(kind(rows=list(batch[0]))))


GENERATOR, CALLS = torch.Generator().manual_seed(1), itertools.count()
UNLIKE = {"draws": lambda: torch.randn(6, generator=GENERATOR), "counts calls": lambda: next(CALLS) % 2}


@pytest.mark.parametrize("what", UNLIKE)
def test_a_model_that_does_not_repeat_itself_is_told_of(what, monkeypatch):
    """Its rows cannot be judged by what the model answers, but by the slopes."""
    drawing = Mixing(lambda model, x: model.out(x + UNLIKE[what]()))
    run = Run(monkeypatch, model=drawing, size=SIZE, batch=SIZE)
    with pytest.warns(UserWarning, match="cannot be"):
        run.train()
    assert run.released == 1


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_is_not_the_first_tensor_is_looked_at(mode, parts, mixes, monkeypatch):
    late = Mixing(lambda model, grid, x: model.out(x - mixes * x.mean(0)) + grid.sum())
    run = Run(monkeypatch, size=SIZE, batch=SIZE, epochs=1, model=late, mode=mode)

    def step(batch):
        for inputs, targets in zip(*(part.chunk(parts) for part in batch), strict=True):
            run.loss(run.module(torch.ones(5, 1), inputs), targets).backward()
        run.optimizer.step()

    with pytest.raises(CrossExampleLeakError) if mixes else nullcontext():
        run.train(step)


LOSSES = {
    "mean": (functional.cross_entropy, False),
    "root of the mean": (lambda outputs, targets: functional.cross_entropy(outputs, targets).sqrt(), True),
    "by how many count": (lambda outputs, targets: functional.cross_entropy(outputs, targets, ignore_index=1), True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_the_model_makes_is_judged(loss, mode, monkeypatch):
    """As those of Transformers do."""
    made, mixes = LOSSES[loss]
    data = TensorDataset(inputs_of(), torch.tensor([0, 1, 1, 2] * (SIZE // 4)))
    model = Mixing(lambda model, x, targets: {"loss": made(model.out(x), targets)})
    run = Run(monkeypatch, data=data, batch=SIZE, epochs=1, model=model, mode=mode)

    def step(batch):
        run.module(*batch)["loss"].backward()
        run.optimizer.step()

    with pytest.raises(CrossExampleLeakError) if mixes else nullcontext():
        run.train(step)
    assert run.released == (not mixes)


@pytest.mark.parametrize("mode", MODES)
def test_another_optimizer_finds_no_raw_gradients(mode, monkeypatch):
    """The cell that makes the optimizer is run again, and the one that makes it private is not."""
    run = Run(monkeypatch, mode=mode)
    before = [p.detach().clone() for p in run.model.parameters()]
    another = torch.optim.SGD(run.module.parameters(), lr=1.0)
    run.backward(next(iter(run.loader)))
    another.step()
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), before, strict=True))
    assert run.sums == []


def test_an_interrupt_while_a_round_begins_leaves_no_round(monkeypatch):
    """What an earlier batch has left is cleared away before there is a round that could release it."""
    run = Run(monkeypatch)
    run.train(lambda batch: (run.step(batch), run.backward(batch)), then=lambda: None)

    def interrupt():
        raise KeyboardInterrupt

    run.optimizer.on_batch = interrupt
    with pytest.raises(KeyboardInterrupt):
        next(iter(run.loader))
    with refused("no batch"):
        run.optimizer.step()
    del run.optimizer.on_batch
    run.train()
    assert run.released == 6
