"""What a model keeps of one batch for the next is an error, also with batches of one example; what it may keep is not touched."""

import numpy as np
import pytest
import torch
from central_runs import Run
from torch import nn

from fedcgd.opacus import CrossExampleLeakError


class Remembering(nn.Module):
    """The mean of the batch before, in an attribute."""

    def __init__(self):
        super().__init__()
        self.out, self.mean = nn.Linear(6, 3), torch.zeros(6)

    def forward(self, inputs):
        outputs = self.out(inputs - self.mean)
        self.mean = inputs.detach().mean(0)
        return outputs


@pytest.mark.parametrize("batch", [1, 4])
def test_what_is_kept_for_the_next_batch_is_refused(batch, monkeypatch):
    run = Run(monkeypatch, model=Remembering(), batch=batch, size=8)
    with pytest.raises(CrossExampleLeakError, match="next batch"):
        run.train()
    assert run.sums == []


class Counting(nn.Module):
    """What an honest model keeps: how often it was called, a mask for each length, random numbers of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.out, self.calls, self.masks, self.seen = nn.Linear(6, 3), 0, {}, []
        self.generator, self.numpys = torch.Generator().manual_seed(1), np.random.default_rng(1)

    def forward(self, inputs):
        self.calls += 1
        mask = self.masks.setdefault(len(inputs), torch.ones(len(inputs), 1))
        self.seen.append(float(self.numpys.random()))
        noise = torch.randn(inputs.shape, generator=self.generator)
        return self.out(inputs * mask * min(1.0, self.calls / 10) + noise)


@pytest.mark.parametrize("batch", [1, 4])
def test_what_depends_on_calls_and_not_on_examples_is_not_refused_and_stays(batch, monkeypatch):
    """And the run is the one that there would be without any look: counters and generators are put back."""
    plain = Counting()
    run = Run(monkeypatch, model=Counting(), batch=batch)
    inputs, _ = next(iter(run.loader))
    for _ in range(2):
        assert torch.equal(run.module(inputs), plain(inputs))
    assert (run.model.calls, len(run.model.seen), run.model.seen) == (2, 2, plain.seen)
