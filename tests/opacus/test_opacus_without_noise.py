"""A run without noise is for comparison: whatever the clip norm, its gradients are those of the loop without privacy."""

import pytest
import torch
from central_runs import Run, examples
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.filterwarnings("ignore:NO NOISE")


@pytest.mark.parametrize("options", [{}, {"accumulation": 2}, {"mode": "ghost"}], ids=str)
@pytest.mark.parametrize("clip_norm", [1e2, 1e6, 1e8, 1e20])
def test_gradients_are_the_plain_ones_at_every_clip_norm(clip_norm, options, monkeypatch):
    data = examples(8, scale=1.0)
    run = Run(monkeypatch, data=data, batch=4, epochs=1, clip_norm=clip_norm, noise_multiplier=0.0, rate=0.0, **options)
    accumulation = options.get("accumulation", 1)
    plain = nn.Linear(6, 3)
    plain.load_state_dict(run.model.state_dict())
    inputs, targets = data[: 4 * accumulation]
    functional.cross_entropy(plain(inputs), targets).backward()
    for _, batch in zip(range(accumulation), run.loader, strict=False):
        run.backward(batch)
        run.optimizer.step()
    for found, expected in zip(run.model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found.grad, expected.grad, rtol=1e-5, atol=1e-7)


def test_rounds_are_counted_as_ever(monkeypatch):
    run = Run(monkeypatch, noise_multiplier=0.0, model=nn.Linear(6, 3))
    run.train()
    assert run.released == 3
    assert run.engine.get_epsilon(1e-5) == float("inf")
