"""Buffers are what they were: a forward pass that changes one is refused, and what is saved has its first value."""

import copy

import pytest
import torch
from central_runs import MODES, Run
from torch import nn


class Writing(nn.Module):
    """Writes what it sees into a buffer, as `how` says, from the call `first` on."""

    def __init__(self, how, persistent=True, first=1):
        super().__init__()
        self.how, self.first, self.calls = how, first, 0
        self.out, self.inner = nn.Linear(6, 3), nn.Module()
        self.inner.register_buffer("mean", torch.zeros(6), persistent=persistent)

    def forward(self, inputs):
        self.calls += 1
        if self.calls >= self.first:
            self.write(inputs.detach())
        if self.how == "raises" and self.calls >= self.first:
            raise ArithmeticError
        return self.out(inputs)

    def write(self, inputs):
        match self.how:
            case "in place":
                self.inner.mean.mul_(0.9).add_(0.1 * inputs.mean(0))
            case "anew":
                self.inner.mean = inputs.mean(0)
            case "data" | "raises":
                self.inner.mean.data.copy_(inputs.mean(0))
            case "numpy":
                self.inner.mean.numpy()[:] = inputs.mean(0).numpy()
            case "longer":
                self.inner.mean = torch.cat([self.inner.mean, inputs[0]])


WAYS = ["in place", "anew", "data", "numpy", "longer"]


@pytest.mark.parametrize(("persistent", "batch"), [(True, 4), (False, 1)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("later", [0, 1])
@pytest.mark.parametrize("how", WAYS)
def test_a_buffer_that_changes_is_refused_by_its_name_and_put_back(how, later, mode, persistent, batch, monkeypatch):
    """The looks at the first batches call the model too, so that the loop says from when on it writes."""
    run = Run(monkeypatch, model=Writing(how, persistent, first=10**9 * later), mode=mode, batch=batch)
    batches = iter(run.loader)
    for _ in range(later):
        run.step(next(batches))
    run.model.first = 0
    with pytest.raises(RuntimeError, match="buffer 'inner"):
        run.step(next(batches))
    assert len(run.sums) == later
    assert torch.equal(run.model.inner.mean, torch.zeros(6))


def test_a_forward_pass_that_fails_leaves_nothing_and_neither_does_an_evaluation(monkeypatch):
    model = Writing("raises", first=10**9)
    run = Run(monkeypatch, model=model)
    run.train()
    model.first = 0
    with pytest.raises(ArithmeticError):
        run.module(run.data.tensors[0])
    assert torch.equal(model.inner.mean, torch.zeros(6))
    model.how = "data"
    model.eval()
    with torch.no_grad(), pytest.raises(RuntimeError, match="has changed"):
        run.module(run.data.tensors[0])
    assert torch.equal(model.inner.mean, torch.zeros(6))


def test_honest_programs_save_and_load_and_copy(monkeypatch, tmp_path):
    """Values are loaded by load_state_dict, copies belong to whoever made them, and a hook of the wrapped optimizer may clamp."""
    run = Run(monkeypatch, model=Writing(""), epochs=4)
    run.base.register_step_post_hook(lambda *_: run.model.out.bias.data.clamp_(-0.1, 0.1))
    run.train()
    average = copy.deepcopy(run.module)
    average.load_state_dict({name: value + 1 for name, value in run.module.state_dict().items()})
    for p in average.parameters():
        p.data.mul_(0.5)
    average._module.inner.mean.add_(1)
    average(run.data.tensors[0])
    assert torch.allclose(average.state_dict()["_module.out.bias"], (run.model.out.bias + 1) / 2)
    torch.save(run.module.state_dict(), tmp_path / "model.pt")
    run.train()
    run.module.load_state_dict({name: value + 2 for name, value in torch.load(tmp_path / "model.pt").items()})
    run.train()
    assert torch.equal(run.model.inner.mean, 2 * torch.ones(6))
    run.module.double().float()
    run.train()
    assert run.released == 12
    assert float(run.model.out.bias.detach().abs().max()) <= 0.1 + 1e-7


def test_parameters_that_are_tied_are_one(monkeypatch):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    run = Run(monkeypatch, model=model)
    run.train()
    run.train()
    assert run.released == 6


@pytest.mark.parametrize("how", ["was None", "was not registered"])
def test_a_buffer_that_was_not_there_is_taken_away_again(how, monkeypatch):
    """What a forward pass makes is of the examples, and would be saved with the model."""

    class Beginning(nn.Linear):
        def forward(self, inputs):
            if getattr(self, "mean", None) is None:
                self.register_buffer("mean", inputs.detach().mean(0))
            return super().forward(inputs)

    model = nn.Sequential(Beginning(6, 3))
    if how == "was None":
        model[0].register_buffer("mean", None)
    run = Run(monkeypatch, model=model)
    run.train(then=lambda: "0.mean" in model.state_dict() and pytest.fail("it is there"))
    assert run.released == 3
    model[0].register_buffer("later", torch.zeros(6))  # of the program, not of a forward pass
    run.train()
    assert torch.equal(model.state_dict()["0.later"], torch.zeros(6))
