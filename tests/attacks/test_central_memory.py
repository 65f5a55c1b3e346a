"""What a model keeps of one batch for the next is an error, also with batches of one example; what it may keep is not touched."""

from collections import deque

import numpy as np
import pytest
import torch
from central_runs import Run
from torch import nn

from fedcgd.opacus import CrossExampleLeakError


class Remembering(nn.Module):
    """Something of the batch before, in one of many places."""

    def __init__(self, where):
        super().__init__()
        self.where, self.out = where, nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6), persistent=False)
        self.h, self.queue, self.table, self.other = None, deque(maxlen=2), {}, Store()

    def forward(self, inputs):
        before = {
            "buffer": self.mean, "attribute": self.h, "queue": self.queue[-1] if self.queue else None,
            "mapping": self.table.get("mean"), "object": self.other.value,
        }[self.where]  # fmt: skip
        outputs = self.out(inputs if before is None else inputs - before)
        seen = inputs.detach().mean(0)
        match self.where:
            case "buffer":
                self.mean = seen
            case "attribute":
                self.h = seen
            case "queue":
                self.queue.append(seen)
            case "mapping":
                self.table["mean"] = seen
            case "object":
                self.other.value = seen
        return outputs


class Store:
    value = None


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("where", ["buffer", "attribute", "queue", "mapping", "object"])
def test_what_is_kept_for_the_next_batch_is_refused(where, batch, monkeypatch):
    run = Run(monkeypatch, model=Remembering(where), batch=batch, size=8)
    kind = RuntimeError if where == "buffer" else CrossExampleLeakError
    with pytest.raises(kind, match=r"next batch|'mean'"):
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
