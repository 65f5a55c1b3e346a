"""Nothing that is trained stands outside of the private module and before it: its gradients would be plain sums."""

from contextlib import suppress

import pytest
import torch
from central_runs import MODES, Run, refused
from torch import nn
from torch.utils.checkpoint import checkpoint

from fedcgd.opacus import CrossExampleLeakError

PROMPT = nn.Parameter(torch.zeros(6))
ENCODER = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
BEFORE = {
    "an encoder": ENCODER,
    "a prompt": lambda inputs: inputs + PROMPT,
    "a part of the batch": lambda inputs: torch.cat([ENCODER(inputs[:1]), inputs[1:]]),
    "computed again": lambda inputs: checkpoint(ENCODER, inputs, use_reentrant=False),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", BEFORE)
def test_trained_parts_before_the_private_module_are_refused(before, mode, monkeypatch):
    run = Run(monkeypatch, mode=mode)
    for _ in range(2):  # in later steps too
        with pytest.raises(RuntimeError, match=r"one module|parameter outside"):
            run.module(BEFORE[before](next(iter(run.loader))[0]))
        run.step(next(iter(run.loader)))
    assert run.released == 2


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


class Centred(nn.Sequential):
    def forward(self, inputs):
        return super().forward(inputs - inputs.mean(0))


@pytest.mark.parametrize("first", ["nothing", "a call in eval mode", "a call that is refused"])
def test_layers_that_are_called_by_themselves_are_refused(first, monkeypatch):
    """What looks for examples that act on each other, and puts buffers back, is at the module as a whole, as it is trained."""
    run = Run(monkeypatch, model=Centred(nn.Linear(6, 3)))

    def step(batch):
        run.model.train(first == "a call that is refused")
        if first != "nothing":
            with suppress(CrossExampleLeakError):
                run.module(batch[0])
        run.loss(run.model.train()[0](batch[0]), batch[1]).backward()
        run.optimizer.step()

    with refused("parts"):
        run.train(step)
    assert run.sums == []
