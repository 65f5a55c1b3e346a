"""What is clipped for an example is that example's alone, in all layers, and nothing else carries the example into the model."""

import copy
import io

import numpy as np
import pytest
import torch
from central_runs import MODES, Run, examples, refused
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from torch import nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from fedcgd.opacus import CrossExampleLeakError

SIZE = 16


class TimeFirst(nn.Module):
    """Layers that take a step in time for an example, which cannot be told by counting if there are as many."""

    shape = (SIZE, 6)

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, inputs):
        return self.out(torch.tanh(self.hidden(inputs.transpose(0, 1)))).mean(0)


class AcrossTheBatch(nn.Module):
    """Attention with the batch where the sequence should be."""

    shape = (5, 6)

    def __init__(self):
        super().__init__()
        self.attention, self.out = DPMultiheadAttention(6, 1), nn.Linear(6, 3)

    def forward(self, inputs):
        return self.out(self.attention(inputs, inputs, inputs)[0].mean(1))


class Centred(nn.Module):
    """Statistics of the batch, by hand."""

    shape = (6,)

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)

    def forward(self, inputs):
        return self.out(inputs - inputs.mean(0))


class CentredOutput(Centred):
    def forward(self, inputs):
        outputs = self.out(inputs)
        return outputs - outputs.mean(0)


class Sorted(Centred):
    """Rows in another order in the second layer than in the first."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(6, 6)

    def forward(self, inputs):
        order = inputs[:, 0].argsort()
        return self.out(torch.tanh(self.hidden(inputs[order])))[order.argsort()]


class Two(Centred):
    """Two layers, for what may go wrong between them."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(6, 6)


class SomeRows(Two):
    """The hidden layer once more for some of the rows, which are then rows of other examples."""

    def forward(self, inputs):
        hidden = torch.tanh(self.hidden(inputs)).clone()
        some = inputs[:, 0] > 0
        hidden[some] = torch.tanh(self.hidden(hidden[some]))
        return self.out(hidden)


class Positions(nn.Module):
    """A row for each position, of which there are as many as examples: each is all examples' sum."""

    shape = (SIZE,)

    def __init__(self):
        super().__init__()
        self.place, self.hidden, self.out = nn.Embedding(SIZE, 4), nn.Linear(1, 4), nn.Linear(4, 3)

    def forward(self, inputs):
        return self.out(torch.tanh(self.hidden(inputs[..., None]) + self.place(torch.arange(SIZE))).mean(1))


class Prototypes(Centred):
    """A row for each class, as many as examples."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 6)

    def forward(self, inputs):
        return inputs @ self.hidden(torch.eye(SIZE, 4)).T + nn.functional.pad(self.out(inputs), (0, SIZE - 3))


class Shortened(torch.autograd.Function):
    """The slopes of a batch together to length 1."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, slopes):
        return slopes / slopes.norm()


class OnTheWayBack(Two):
    def forward(self, inputs):
        return self.out(Shortened.apply(torch.tanh(self.hidden(inputs))))


class SecondOutput(Centred):
    def forward(self, inputs):
        outputs = self.out(inputs)
        return outputs, outputs - outputs.mean(0)


class InTraining(Centred):
    """Where gradients are made, and not where somebody looks without them."""

    def forward(self, inputs):
        return self.out(inputs - inputs.mean(0) if torch.is_grad_enabled() else inputs)


class LastRow(Two):
    def forward(self, inputs):
        hidden = self.hidden(inputs)
        return self.out(torch.cat([hidden[:-1], hidden[-1:] + hidden[-2:-1]]))


class Shuffled(Two):
    """All rows but the first, by numbers that are not torch's."""

    def forward(self, inputs):
        order = torch.tensor([0, *(1 + np.random.permutation(len(inputs) - 1))])
        return self.out(self.hidden(inputs[order]))[order.argsort()]


class Remembering(Centred):
    """The mean of the batch before, in a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, inputs):
        outputs = self.out(inputs - self.mean)
        self.mean = inputs.mean(0).detach()
        return outputs


MIXING = [
    TimeFirst, AcrossTheBatch, Centred, CentredOutput, Sorted, SomeRows, Positions, Prototypes, OnTheWayBack, SecondOutput,
    InTraining, LastRow, Shuffled,
]  # fmt: skip


def inputs_of(model, scale=3.0):
    generator = torch.Generator().manual_seed(5)
    return scale * torch.randn(SIZE, *model.shape, generator=generator)


@pytest.mark.parametrize("model", MIXING)
@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_mixes_rows_is_refused(mode, model, monkeypatch):
    data = TensorDataset(inputs_of(model), torch.arange(SIZE) % 3)
    run = Run(monkeypatch, data=data, batch=SIZE, model=model(), mode=mode)
    for _ in range(2):
        with pytest.raises(CrossExampleLeakError):
            run.train()
    assert run.sums == []


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.out = DPLSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, inputs, lengths, sort=False):
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=sort)
        return self.out(self.recurrent(packed)[1][0][-1])


def packed_run(lengths, silent, sort, monkeypatch, mode, convert=torch.as_tensor):
    """The sum of a round in which example `silent` is silent."""
    torch.manual_seed(0)
    weights = torch.arange(SIZE) != silent
    inputs = 3 * torch.randn(SIZE, 7, 6)
    data = TensorDataset(inputs, torch.arange(SIZE) % 3, lengths, weights)
    run = Run(monkeypatch, data=data, batch=SIZE, epochs=1, model=Packed(), mode=mode, clip_norm=0.05, rate=0.0)

    def step(batch):
        inputs, targets, lengths, weights = batch
        losses = functional.cross_entropy(run.module(inputs, convert(lengths), sort), targets, reduction="none")
        (losses * weights).mean().backward()
        run.optimizer.step()

    run.train(step)
    return run.sums[0]


@pytest.mark.parametrize("convert", [torch.as_tensor, torch.Tensor.tolist])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_sequences_that_were_packed_in_another_order_are_refused(mode, convert, monkeypatch):
    """The recurrent layer's rows are then in the order of lengths, and the others' in that of the batch."""
    lengths = 1 + torch.arange(SIZE) % 7
    with pytest.raises(CrossExampleLeakError):
        packed_run(lengths, 0, False, monkeypatch, mode, convert)
    lengths = lengths.sort(descending=True).values
    everybody = packed_run(lengths, -1, True, monkeypatch, mode, convert)
    for silent in range(0, SIZE, 5):
        assert float((everybody - packed_run(lengths, silent, True, monkeypatch, mode, convert)).norm()) <= 0.05


def test_a_model_that_draws_random_numbers_is_not_refused(monkeypatch):
    """And the draws are those that there would be without the look at its rows."""
    model = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, 3))
    run = Run(monkeypatch, model=copy.deepcopy(model), size=SIZE, batch=SIZE)
    batch = next(iter(run.loader))
    torch.manual_seed(3)
    outputs = run.module(batch[0])
    torch.manual_seed(3)
    assert torch.equal(outputs, model(batch[0]))


def test_a_model_that_does_not_repeat_itself_is_told_of(monkeypatch):
    """Its rows cannot be judged by what the model answers, but by the slopes."""

    class Drawing(Two):
        generator = torch.Generator().manual_seed(1)

        def forward(self, inputs):
            return self.out(self.hidden(inputs) + torch.randn(6, generator=self.generator))

    run = Run(monkeypatch, model=Drawing(), size=SIZE, batch=SIZE)
    with pytest.warns(UserWarning, match="cannot be"):
        run.train()
    assert run.released == 1


class Late(Centred):
    """The batch is not the first tensor that the model is given."""

    def forward(self, grid, inputs):
        return super().forward(inputs) + grid.sum()


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_is_not_the_first_tensor_is_looked_at(mode, monkeypatch):
    run = Run(monkeypatch, size=SIZE, batch=SIZE, model=Late(), mode=mode)
    with pytest.raises(CrossExampleLeakError):
        run.train(lambda batch: run.module(torch.ones(5, 1), batch[0]))


class WithLoss(Centred):
    """A model that makes its loss itself, as those of Transformers do."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, inputs, targets):
        outputs = self.out(inputs)
        return {"loss": self.loss(outputs, targets), "logits": outputs}


LOSSES = {
    "mean": (functional.cross_entropy, False),
    "root of the mean": (lambda outputs, targets: functional.cross_entropy(outputs, targets).sqrt(), True),
    "by how many count": (lambda outputs, targets: functional.cross_entropy(outputs, targets, ignore_index=1), True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_the_model_makes_is_judged(loss, mode, monkeypatch):
    made, mixes = LOSSES[loss]
    data = TensorDataset(inputs_of(Centred), torch.tensor([0, 1, 1, 2] * (SIZE // 4)))
    run = Run(monkeypatch, data=data, batch=SIZE, epochs=1, model=WithLoss(made), mode=mode)

    def step(batch):
        run.module(*batch)["loss"].backward()
        run.optimizer.step()

    if mixes:
        with pytest.raises(CrossExampleLeakError):
            run.train(step)
    else:
        run.train(step)
    assert run.released == (not mixes)


class Sometimes(Centred):
    """Across the batch where an example is far out."""

    def forward(self, inputs):
        return self.out(inputs - inputs.mean(0) if bool((inputs > 1e3).any()) else inputs)


def test_later_batches_are_looked_at_too(monkeypatch):
    data = TensorDataset(torch.randn(40, 6), torch.arange(40) % 3)
    data.tensors[0][Run(monkeypatch, data=data, batch=4, epochs=1).loader.batch_sampler.rows(9)] += 2e3
    run = Run(monkeypatch, data=data, batch=4, epochs=1, model=Sometimes())
    with pytest.raises(CrossExampleLeakError):
        run.train()
    assert run.released == 9


class Recurrent(nn.Module):
    """A recurrent layer, which finds the batch in the second dimension by itself."""

    shape = (SIZE, 6)

    def __init__(self):
        super().__init__()
        self.recurrent, self.out = DPGRU(6, 5, batch_first=False), nn.Linear(5, 3)

    def forward(self, inputs):
        return self.out(self.recurrent(inputs.transpose(0, 1))[0][-1])


class Attention(AcrossTheBatch):
    """As long as the batch is large."""

    shape = (SIZE, 6)

    def __init__(self):
        super().__init__()
        self.attention = DPMultiheadAttention(6, 1, batch_first=True)


@pytest.mark.parametrize("model", [Recurrent, Attention])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_sequences_as_long_as_the_batch_are_not_refused(mode, model, monkeypatch):
    data = TensorDataset(inputs_of(model), torch.arange(SIZE) % 3)
    run = Run(monkeypatch, data=data, batch=SIZE, model=model(), mode=mode)
    run.train()
    assert run.released == 1


def test_an_output_of_steps_in_time_is_not_taken_for_rows(monkeypatch):
    """With batch_first=False an output as long as the batch has an example in each of its rows, and mixes none."""
    data = TensorDataset(torch.randn(SIZE, SIZE, 6), torch.arange(SIZE) % 3)
    run = Run(monkeypatch, data=data, batch=SIZE, batch_first=False)
    inputs, targets = next(iter(run.loader))
    run.backward(
        (inputs.transpose(0, 1), targets.expand(SIZE, SIZE)[..., None].expand(SIZE, SIZE, 3).float().softmax(-1))
    )
    run.optimizer.step()
    assert run.released == 1


@pytest.mark.parametrize("data", ["subset", "concatenated", "nested"])
def test_an_example_that_is_there_twice_is_refused(data, monkeypatch):
    base = examples(6)
    data = {
        "subset": Subset(base, [0, 1, 2, 3, 3]),
        "concatenated": ConcatDataset([base, Subset(base, [5])]),
        "nested": Subset(Subset(base, [5, 4, 3]), [0, 1, 0]),
    }[data]
    with pytest.raises(ValueError, match="more than"):
        Run(monkeypatch, data=data)


def test_parts_of_data_sets_are_not_refused(monkeypatch):
    base = examples(12)
    run = Run(monkeypatch, data=ConcatDataset([Subset(base, range(6)), Subset(base, range(6, 12)), examples(3)]))
    run.train()
    assert run.released == 4


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


def test_a_model_that_is_no_longer_private_has_its_gradients(monkeypatch):
    run = Run(monkeypatch)
    run.train()
    model = run.module.to_standard_module()
    model.zero_grad()
    model(torch.ones(2, 6)).sum().backward()
    assert float(model.weight.grad.norm()) > 0


def test_a_private_optimizer_is_not_copied(monkeypatch):
    run = Run(monkeypatch)
    for copied in (copy.deepcopy, lambda optimizer: torch.save(optimizer, io.BytesIO())):
        with pytest.raises(TypeError, match="copied or"):
            copied(run.optimizer)
    assert copy.deepcopy(run.module).state_dict().keys() == run.module.state_dict().keys()  # an average of models can
    torch.save(run.module, io.BytesIO())
    run.train()
    assert run.released == 3


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


def test_an_optimizer_of_several_gradients_a_step_is_refused(monkeypatch):
    monkeypatch.setattr(torch.optim, "SGD", lambda parameters, lr: torch.optim.LBFGS(parameters, lr=lr))
    with pytest.raises(TypeError, match="LBFGS"):
        Run(monkeypatch)
