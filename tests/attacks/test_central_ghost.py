"""Ghost clipping adds what it measured: no example adds more than the clip norm, whatever its inputs, layers and criterion."""

import pytest
import torch
from central_runs import Run
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


class Mean(nn.Module):
    """A linear layer on a sequence; the gradient of an example is Σ_t b_t a_tᵀ."""

    def __init__(self, inputs=8, outputs=4):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs, bias=False)

    def forward(self, tokens):
        return self.layer(tokens).mean(1)


@pytest.mark.parametrize("shape", ["linear", "sequence", "embedding"])
def test_a_huge_example_adds_a_bounded_amount_and_spoils_nothing(shape, monkeypatch):
    """With or without finite inputs of 1e22, the others' part is the same; nothing becomes NaN."""
    torch.manual_seed(1)
    if shape == "embedding":
        inputs = torch.randint(0, 10, (4, 5))
        model = nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(30, 3))
        model[0].weight.data[9] = 1e22
        inputs[inputs == 9] = 0
        inputs[0] = 9
    else:
        inputs = torch.randn(4, 6) if shape == "linear" else torch.randn(4, 5, 8)
        inputs[0] = 1e22
        model = nn.Linear(6, 3) if shape == "linear" else Mean()
    run = Run(monkeypatch, data=TensorDataset(inputs, torch.arange(4) % 3), epochs=1, model=model, mode="ghost")
    run.train()
    assert run.norms()[0] <= 4.0
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        lambda outputs, targets: 1000 * functional.cross_entropy(outputs, targets),
    ],
)
def test_the_callers_own_criterion_is_clipped_as_well(criterion, monkeypatch):
    run = Run(monkeypatch, mode="ghost")
    run.loss = criterion
    run.train()
    assert max(run.norms()) <= 4.0
