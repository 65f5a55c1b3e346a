"""Nothing that is trained stands outside of the private module and before it: its gradients would be plain sums."""

import pytest
import torch
from central_runs import MODES, Run
from torch import nn
from torch.utils.checkpoint import checkpoint


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context, values):
        return 2 * values

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient


PROMPT = nn.Parameter(torch.zeros(6))
ENCODER = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
BEFORE = {
    "an encoder": ENCODER,
    "a prompt": lambda inputs: inputs + PROMPT,
    "a function of its own": lambda inputs: Scaled.apply(ENCODER(inputs)),
    "a part of the batch": lambda inputs: torch.cat([ENCODER(inputs[:1]), inputs[1:]]),
    "computed again": lambda inputs: checkpoint(ENCODER, inputs, use_reentrant=False),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", BEFORE)
def test_trained_parts_before_the_private_module_are_refused(before, mode, monkeypatch):
    run = Run(monkeypatch, mode=mode)
    for inputs, _ in run.loader:
        with pytest.raises(RuntimeError, match="one module"):
            run.module(BEFORE[before](inputs))
        break
    assert run.released == 0


class Prompted(nn.Module):
    """Takes what is added to its inputs as a second one."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)

    def forward(self, inputs, prompt):
        return self.out(inputs + prompt)


def test_a_trained_parameter_that_is_itself_an_input_is_refused(monkeypatch):
    run = Run(monkeypatch, model=Prompted())
    inputs = next(iter(run.loader))[0]
    with pytest.raises(RuntimeError, match="parameter outside"):
        run.module(inputs, PROMPT)
    with pytest.raises(RuntimeError, match="parameter outside"):
        run.module(inputs, prompt=PROMPT)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the compiler
@pytest.mark.parametrize("compiled", [False, True])
def test_they_are_refused_in_later_steps_too(compiled, monkeypatch):
    run = Run(monkeypatch)
    module = torch.compile(run.module, backend="eager") if compiled else run.module
    for number, (inputs, labels) in enumerate(run.loader):
        if number == 2:
            with pytest.raises(RuntimeError, match="parameter outside"):
                module(ENCODER(inputs))
            break
        run.loss(module(inputs), labels).backward()
        run.optimizer.step()
    assert run.released == 2


def frozen(inputs):
    encoder = nn.Linear(6, 6).requires_grad_(False)
    return encoder(inputs)


def without_gradients(inputs):
    with torch.no_grad():
        return ENCODER(inputs)


def attacked(inputs):
    delta = torch.zeros_like(inputs, requires_grad=True)
    return inputs + delta


@pytest.mark.parametrize("before", [frozen, without_gradients, attacked])
def test_what_is_not_trained_may_stand_before_it(before, monkeypatch):
    run = Run(monkeypatch)
    run.train(lambda batch: run.step([before(batch[0]), batch[1]]))
    assert run.released == 3
