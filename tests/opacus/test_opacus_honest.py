"""Programs whose examples are apart are not refused, whatever shape a batch has."""

import gc
import runpy
from pathlib import Path

import pytest
import torch
from central_runs import MODES, Run, examples, private
from opacus.layers import DPGRU
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from fedcgd.opacus import CrossExampleLeakError, check_independence
from fedcgd.opacus.independence import IndependenceProbe

SIZE = 5
PROGRAMS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "independence.py"))["programs"]()


class Packed(nn.Module):
    """Reads sequences in both directions, the second one from the end of each."""

    def __init__(self):
        super().__init__()
        self.recurrent = DPGRU(4, 4, batch_first=True, bidirectional=True)
        self.out = nn.Linear(8, 3)

    def forward(self, inputs, lengths):
        states, _ = self.recurrent(pack_padded_sequence(inputs, lengths, batch_first=True))
        return self.out(pad_packed_sequence(states, batch_first=True)[0].sum(1))


@pytest.mark.parametrize("convert", [torch.as_tensor, torch.Tensor.tolist])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [[9, 9, 9, 5, 5], [9, 8, 7, 6, 5], [9, 9, 8, 8, 8]])
def test_sequences_of_other_lengths_are_not_taken_for_a_mixture(lengths, mode, convert, monkeypatch):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SIZE, 9, 4), torch.tensor(lengths), torch.arange(SIZE) % 3)
    run = Run(monkeypatch, data=data, batch=SIZE, epochs=1, model=Packed(), mode=mode)

    def step(batch):
        order = torch.argsort(batch[1], descending=True, stable=True)
        inputs, sizes, targets = (part[order] for part in batch)
        run.loss(run.module(inputs, convert(sizes)), targets).backward()
        run.optimizer.step()

    run.train(step)
    assert run.released == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_part_without_examples_of_a_batch_that_has_some(mode):
    loader = DataLoader(examples(8), batch_size=1)
    options = {"sampling": "poisson", "noise_multiplier": 0.5, "epochs": 10, "accumulation_steps": 2}
    module, optimizer, *_, loader = private(nn.Linear(6, 3), loader, grad_sample_mode=mode, **options)
    sizes = []
    for inputs, targets in loader:
        sizes.append(len(inputs))
        if len(inputs):
            functional.cross_entropy(module(inputs), targets).backward()
        optimizer.step()
    assert (1, 0) in set(zip(sizes[::2], sizes[1::2], strict=True))


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e30])
def test_losses_of_any_size(scale, monkeypatch):
    torch.manual_seed(0)
    run = Run(monkeypatch, model=nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), epochs=1)

    def step(batch):
        (scale * functional.cross_entropy(run.module(batch[0]), batch[1])).backward()
        run.optimizer.step()

    run.train(step)
    assert run.released == 3


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, of the hooks of Opacus
def test_the_look_at_batches_is_not_compiled(monkeypatch):
    """It would take seconds, and again whenever something in it has changed."""
    run = Run(monkeypatch, model=nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), epochs=1)
    compiling, check = [], IndependenceProbe.check

    def noting(*args):
        compiling.append(torch.compiler.is_compiling())
        return check(*args)

    monkeypatch.setattr(IndependenceProbe, "check", noting)
    module = torch.compile(run.module, backend="eager")
    run.train(lambda batch: (run.loss(module(batch[0]), batch[1]).backward(), run.optimizer.step()))
    assert compiling
    assert not any(compiling)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_models_whose_examples_are_independent_are_not_refused(program):
    check_independence(program.model, program.inputs)


def test_a_batch_that_the_model_does_not_take_is_the_models_error():
    """And no silence."""
    for rows in (4, 1):
        with pytest.raises(RuntimeError, match="shapes cannot"):
            check_independence(nn.Linear(6, 3), torch.randn(rows, 5))


class LastBit(torch.autograd.Function):
    """The same forwards; on the way back, the last row is off by `factor` now and then, and `mixes` adds the first one."""

    @staticmethod
    def forward(ctx, rows, calls, off_in, mixes, factor):
        ctx.calls, ctx.off_in, ctx.mixes, ctx.factor = calls, off_in, mixes, factor
        return rows.clone()

    @staticmethod
    def backward(ctx, slopes):
        slopes = slopes + ctx.mixes * slopes[:1]
        if len(ctx.calls) in ctx.off_in:
            slopes[-1] *= ctx.factor
        ctx.calls.append(1)
        return slopes, None, None, None, None


class Calls(list):
    """As a device's clock, one for all copies of a model."""

    def __deepcopy__(self, memo):
        return self


class SumsInAnyOrder(nn.Module):
    """What a GPU makes of a sum in bfloat16, whose order is another now and then."""

    def __init__(self, off_in, mixes=0.0, factor=1.004):
        super().__init__()
        self.first, self.last, self.calls = nn.Linear(5, 4), nn.Linear(4, 3), Calls()
        self.how = off_in, mixes, factor

    def forward(self, inputs):
        return self.last(LastBit.apply(torch.tanh(self.first(inputs)), self.calls, *self.how))


@pytest.mark.parametrize("first", range(8))
@pytest.mark.parametrize("every", [2, 3, 5, 7, 11])
def test_a_sum_in_another_order_now_and_then_is_not_taken_for_a_mixture(every, first):
    check_independence(SumsInAnyOrder(range(first, 1000, every)), torch.randn(6, 5))


@pytest.mark.parametrize(
    ("every", "mixes", "factor"), [(2, 0.2, 1.004), (5, 0.2, 1.004), (1000, 0.2, 1.004), (2, 20.0, 3.0)]
)
def test_a_mixture_is_seen_beside_sums_in_another_order(every, mixes, factor):
    """A large one is seen whatever the same batch differs by."""
    with pytest.raises(CrossExampleLeakError, match=r"first\.weight"):
        check_independence(SumsInAnyOrder(range(3, 1000, every), mixes, factor), torch.randn(6, 5))


def test_what_a_probe_has_made_for_examples_is_freed_at_once():
    gc.disable()
    try:
        check_independence(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), torch.randn(6, 3))
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    finally:
        gc.enable()
    assert not [t for t in tensors if t.shape == (6, 5, 3) or (t.shape == (5, 3) and t.is_leaf and t.grad is not None)]


class Counted(nn.Linear):
    seen = 0

    def forward(self, inputs):
        type(self).seen += len(inputs)
        return super().forward(inputs)


def test_few_examples_of_a_large_batch_are_looked_at():
    Counted.seen = 0
    check_independence(Counted(3, 2), torch.randn(1000, 3))
    assert Counted.seen < 1000


class Halves(nn.Module):
    """Takes batches of 64 alone, and mixes the examples in the middle of them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, inputs):
        halves = self.linear(inputs).reshape(2, 32, 2)
        return (halves + halves.flip(0)).flatten(0, 1)


def test_a_model_that_takes_whole_batches_alone_is_given_them():
    with pytest.raises(CrossExampleLeakError):
        check_independence(Halves(), torch.randn(64, 3))
