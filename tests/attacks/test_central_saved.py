"""A model that is pickled or copied whole takes nothing of the examples along that has no noise."""

import copy
import io
import pickle
from collections import deque

import numpy as np
import pytest
import torch
from central_runs import MODES, Run
from torch import nn
from torch.utils.data import TensorDataset

MARK = 123.456
RAW = 4 * np.float32(MARK).tobytes()
DATA = TensorDataset(torch.cat([torch.full((12, 5), MARK), torch.arange(12.0)[:, None]], 1), torch.arange(12) % 3)
HELD, CHANGED = "inputs or gradients of examples now", "are not in its state dict"


def written(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


SAVE = {"torch.save": written, "pickle": pickle.dumps, "copy": copy.deepcopy}


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(
    ("mode", "save"),  # where functorch or expanded weights are used, pickle refuses a closure of Opacus'
    [(mode, save) for mode in ("hooks", "ghost") for save in SAVE] + [("functorch", "copy"), ("ew", "copy")],
)
def test_between_forward_pass_and_step_nothing_is_saved_and_afterwards_no_example(mode, save, wrapped, monkeypatch):
    run = Run(monkeypatch, data=DATA, mode=mode)
    model = run.module if wrapped else run.model
    for batch in run.loader:
        SAVE[save](model)
        run.loss(run.module(batch[0]), batch[1]).backward()
        with pytest.raises(RuntimeError, match=HELD):
            SAVE[save](model)
        assert RAW not in written(run.module.state_dict())
        run.optimizer.step()
        assert save == "copy" or RAW not in SAVE[save](model)
    assert run.released == 3


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_forward_pass_without_a_backward_pass_leaves_inputs_that_are_not_saved(mode, monkeypatch):
    run = Run(monkeypatch, data=DATA, mode=mode)
    run.module(next(iter(run.loader))[0])
    assert RAW in pickle.dumps([layer.__dict__.get("activations") for layer in run.model.modules()])
    with pytest.raises(RuntimeError, match=HELD):
        written(run.module)
    next(iter(run.loader))  # clears it away
    assert RAW not in written(run.module)


class Keeping(nn.Module):
    """Keeps something of what it sees, in one of many ways that no output shows."""

    def __init__(self, how):
        super().__init__()
        self.out, self.how, self.calls = nn.Linear(6, 3), how, 0
        self.register_buffer("buffer", torch.zeros(6), persistent=False)
        self.list, self.dict, self.queue, self.set, self.number, self.tensor = [], {}, deque(), set(), 0.0, None
        self.array, self.object, self.later = np.zeros(6), type("Box", (), {})(), None
        self.fixed, self.rate, self.tied = torch.arange(3), 0.5, [self.out.weight]  # which steps move

    def forward(self, inputs):
        self.calls += 1
        seen = inputs.detach().mean(0)
        match self.how:
            case "buffer":
                self.buffer = seen
            case "in a buffer":
                self.buffer.copy_(seen)
            case "list":
                self.list.append(float(seen[0]))
            case "dict":
                self.dict["seen"] = [seen]
            case "queue":
                self.queue.append(seen)
            case "set":
                self.set.add(float(seen[0]))
            case "number":
                self.number = float(seen[0])
            case "tensor":
                self.tensor = seen
            case "array":
                self.array[:] = seen.numpy()
            case "object":
                self.object.seen = seen
            case "new":
                self.new = seen
        return self.out(inputs)


@pytest.mark.parametrize("save", [written, copy.deepcopy])
@pytest.mark.parametrize(
    "how", ["buffer", "in a buffer", "list", "dict", "queue", "set", "number", "tensor", "array", "object", "new"]
)
def test_what_a_layer_keeps_beside_its_state_dict_is_not_saved(how, save, monkeypatch):
    run = Run(monkeypatch, data=DATA, model=Keeping(how))
    run.train()
    with pytest.raises(RuntimeError, match=CHANGED):
        save(run.module)
    assert set(run.module.state_dict()) == {"_module.out.weight", "_module.out.bias"}


def test_a_model_that_keeps_nothing_is_saved(monkeypatch):
    run = Run(monkeypatch, data=DATA, model=Keeping(""))
    run.train()
    assert run.model.calls == 3
    copy.deepcopy(run.module)
    del run.model.object  # whose class is a test's own
    written(run.module)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["loader", "accountant", "engine", "optimizer"])
def test_only_the_module_of_a_run_is_copied(what, mode, monkeypatch):
    run = Run(monkeypatch, mode=mode)
    part = run.engine.accountant if what == "accountant" else getattr(run, what)
    words = {"engine": "an engine cannot be copied", "optimizer": "Copy the module|copy the module"}
    with pytest.raises(TypeError, match=words.get(what, "a private run cannot be copied or pickled")):
        copy.deepcopy(part)
    run.train()
    assert copy.deepcopy(run.module).state_dict().keys() == run.module.state_dict().keys()
