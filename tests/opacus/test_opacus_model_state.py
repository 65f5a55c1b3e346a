"""Values that are written round torch's version counter do not leave with the model."""

import copy
import io
from contextlib import suppress

import pytest
import torch
from central_runs import Run
from torch import nn

from fedcgd.opacus import CrossExampleLeakError, digests, model_state
from fedcgd.opacus.deferred import judge
from fedcgd.opacus.model_state import ModelState

CHANGED = "have changed, and not by a step of the private optimizer"


class Writing(nn.Module):
    """Writes what it sees into itself, as `how` says, from the call `first` on."""

    def __init__(self, how, first=1):
        super().__init__()
        self.how, self.first, self.calls = how, first, 0
        self.out, self.frozen = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs):
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            if self.calls >= self.first:
                self.write(inputs.detach())
        return self.out(inputs)

    def write(self, inputs):
        match self.how:
            case "data":
                self.mean.data.copy_(inputs.mean(0))
            case "numpy":
                self.mean.numpy()[:] = inputs.mean(0).numpy()
            case "moving average":  # as the codes of a vector-quantised autoencoder are kept
                self.mean.data.mul_(0.9).add_(inputs.mean(0), alpha=0.1)
            case "start from the first batch":
                if not self.mean.any():
                    self.out.bias.data.copy_(-inputs.mean(0)[:3])
            case "frozen":
                self.frozen.weight.data[0].copy_(inputs.mean(0))
            case "new buffer":
                self.register_buffer("seen", inputs.mean(0))


WAYS = ["data", "numpy", "moving average", "start from the first batch", "frozen", "new buffer"]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("how", WAYS)
def test_what_a_forward_pass_writes_is_not_released(how, batch, monkeypatch):
    run = Run(monkeypatch, model=Writing(how), batch=batch)
    with pytest.raises(RuntimeError, match=f"{CHANGED}|influence each other"):  # a start shows in the outputs too
        run.train()
    assert run.sums == []


@pytest.mark.parametrize("how", WAYS)
def test_what_is_written_later_is_not_released(how, monkeypatch):
    """The looks at the first batches call the model too, so that calls are counted in the loop."""
    model = Writing(how, first=10**9)
    run = Run(monkeypatch, model=model)
    for number, batch in enumerate(run.loader):
        if number == 1:
            model.first = 0
            with pytest.raises(RuntimeError, match=CHANGED):
                run.step(batch)
            return
        run.step(batch)


@pytest.mark.parametrize("saved", ["state_dict", "part", "checkpoint", "pickle", "copy"])
@pytest.mark.parametrize("how", ["data", "start from the first batch", "frozen"])
def test_what_a_forward_pass_writes_is_not_saved(how, saved, tmp_path, monkeypatch):
    run = Run(monkeypatch, model=Writing(how))
    with suppress(CrossExampleLeakError):
        run.module(next(iter(run.loader))[0])
    save = {
        "state_dict": run.module.state_dict,
        "part": run.model.state_dict,
        "checkpoint": lambda: run.engine.save_checkpoint(
            path=tmp_path / "c", module=run.module, optimizer=run.optimizer
        ),
        "pickle": lambda: torch.save(run.module, io.BytesIO()),
        "copy": lambda: copy.deepcopy(run.module),
    }[saved]
    with pytest.raises(RuntimeError, match=CHANGED):
        save()
    assert not (tmp_path / "c").exists()


def test_honest_programs_save_and_load_and_copy(monkeypatch, tmp_path):
    """Values are loaded by load_state_dict, copies belong to whoever made them, and a hook of the wrapped optimizer may clamp."""
    run = Run(monkeypatch, model=Writing(""), epochs=4)
    run.base.register_step_post_hook(lambda *_: run.model.out.bias.data.clamp_(-0.1, 0.1))
    run.train()
    average = copy.deepcopy(run.module)
    average.load_state_dict({name: value + 1 for name, value in run.module.state_dict().items()})
    for p in average.parameters():
        p.data.mul_(0.5)
    assert torch.allclose(average.state_dict()["_module.out.bias"], (run.model.out.bias + 1) / 2)
    torch.save(run.module.state_dict(), tmp_path / "model.pt")
    run.train()
    run.module.load_state_dict(torch.load(tmp_path / "model.pt"))
    run.train()
    run.module.double().float()
    run.train()
    assert run.released == 12
    assert float(run.model.out.bias.detach().abs().max()) <= 0.1 + 1e-7


class Extra(nn.Linear):
    """A layer that saves more than tensors."""

    def __init__(self):
        super().__init__(6, 3)
        self.extra = 0

    def get_extra_state(self):
        return {"seen": self.extra}

    def set_extra_state(self, state):
        self.extra = state["seen"]


def test_what_a_layer_saves_beside_tensors_is_looked_at(monkeypatch):
    model = nn.Sequential(Extra())
    run = Run(monkeypatch, model=model, mode="functorch")
    run.train()
    model[0].extra = 1.5
    with pytest.raises(RuntimeError, match=r"'0\._extra_state'"):
        run.module.state_dict()
    model[0].extra = 0
    assert run.module.state_dict()["_module.0._extra_state"] == {"seen": 0}


def frozen_tensor(kind):
    generator = torch.Generator().manual_seed(3)
    match kind:
        case "bool":
            return torch.randint(0, 2, (999,), generator=generator).bool()
        case "empty":
            return torch.zeros(0, 3)
        case "scalar":
            return torch.tensor(1.5)
        case "strided":
            return torch.randn(40, 50, generator=generator).T[::3]
        case "off a word":
            return torch.randn(1001, generator=generator).bfloat16()[1:]
        case _:
            return torch.randn(1000, generator=generator).to(getattr(torch, kind))


@pytest.mark.parametrize(
    "kind", ["float32", "float64", "bfloat16", "int64", "uint8", "bool", "complex64", "scalar", "strided", "off a word"]
)
def test_a_change_of_one_bit_of_any_entry_is_seen(kind):
    module = nn.Module()
    module.register_buffer("value", frozen_tensor(kind))
    module.register_buffer("other", frozen_tensor("empty"))
    state = ModelState(module, [])
    judge([state.look()])
    for place in (0, -1):
        flat = module.value.detach().clone()
        octets = flat.reshape(-1).view(torch.uint8).clone()
        octets[place] ^= 1
        before = module.value.detach().clone()
        module.value.data.copy_(octets.view(before.dtype).reshape(before.shape))
        with pytest.raises(RuntimeError, match="'value' and 0 other"):
            judge([state.look()])
        module.value.data.copy_(before)
        judge([state.look()])


def test_changes_that_cancel_in_a_plain_sum_are_seen():
    """Two signs, and two entries that change places: a sum of words, or one with weights that are all odd, would be the same."""
    module = nn.Module()
    module.register_buffer("value", torch.randn(4000))
    state, before = ModelState(module, []), module.value.clone()
    for change in (
        lambda v: v[[10, 3000]].neg(),
        lambda v: v[[3000, 10]],
    ):
        module.value.data[[10, 3000]] = change(before)
        with pytest.raises(RuntimeError, match="'value'"):
            judge([state.look()])
        module.value.data.copy_(before)
    judge([state.look()])


def test_a_large_frozen_part_is_looked_at_in_turn_and_whole_when_it_is_saved(monkeypatch):
    """Two blocks a check of ten: a change at the end is seen by the fifth, and at once when the model is saved."""
    monkeypatch.setattr(digests, "_BLOCK", 64)
    monkeypatch.setattr(model_state, "_BLOCKS_AT_ONCE", 2)
    monkeypatch.setattr(model_state, "_BLOCKS_PER_STEP", 2)
    module = nn.Module()
    module.register_buffer("value", torch.randn(640))
    state = ModelState(module, [])
    handles = state.watch()
    module.value.data[-1] += 1
    for _ in range(4):
        judge([state.look()])
    with pytest.raises(RuntimeError, match="'value'"):
        judge([state.look()])
    with pytest.raises(RuntimeError, match="'value'"):
        module.state_dict()
    module.value.add_(1)  # which torch counts: looked at once
    state.accept({"value": module.value})
    module.value[-1] += 1
    with pytest.raises(RuntimeError, match="'value'"):
        judge([state.look()])
    for handle in handles:
        handle.remove()
    assert len(module.state_dict()) == 1


KINDS = ["float32", "float64", "bfloat16", "uint8", "bool", "complex64", "scalar", "strided", "off a word", "empty"]


def test_digests_are_the_same_alone_and_together(monkeypatch):
    monkeypatch.setattr(digests, "_BLOCK", 64)
    made = digests.Digests()
    values = [frozen_tensor(kind) for kind in KINDS]
    alone, together = [made.of(value) for value in values], made.of_all(values)
    assert [sums.tolist() for sums in alone] == [sums.tolist() for sums in together]
    assert [len(sums) for sums in alone] == [digests.blocks_of(value) for value in values]
    for value, whole in zip(values, alone, strict=True):
        assert made.of(value, 3, 9).tolist() == whole[3:9].tolist()
    weights = made._weights_on(torch.device("cpu")).tolist()
    words = values[0].view(torch.int32).tolist()[64:128]
    expected = sum(w * v for w, v in zip(weights, words, strict=True))
    assert (alone[0][1].item() - expected) % 2**64 == 0


def test_a_small_part_of_a_turn_is_judged_with_the_release_and_no_later(monkeypatch):
    """Parts of a batch are looked at one by one, and what was found in the first is an error before the batch is released."""
    run = Run(monkeypatch, mode="hooks", accumulation=2, batch=2)
    for number, batch in enumerate(run.loader):
        loss = run.loss(run.module(batch[0]), batch[1])
        if number == 0:
            loss = loss + run.model.weight.square().sum() * 1e3  # which no example has
        loss.backward()
        if number == 1:
            with pytest.raises(RuntimeError, match="do not add up to the gradient of 'weight'"):
                run.optimizer.step()
            break
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert run.sums == []


def test_parameters_that_are_tied_are_one(monkeypatch):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    run = Run(monkeypatch, model=model)
    run.train()
    run.train()
    assert run.released == 6
