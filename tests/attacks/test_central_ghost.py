"""Ghost clipping adds what it measured: no example adds more than the clip norm, whatever its inputs, layers and criterion."""

import pytest
import torch
from central_runs import Run
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedcgd.opacus.clipped_sum import DenseGradients
from fedcgd.opacus.ghost import CompactModule, GhostModule


class Mean(nn.Module):
    """A linear layer on a sequence; the gradient of an example is Σ_t b_t a_tᵀ."""

    def __init__(self, inputs=8, outputs=4):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs, bias=False)

    def forward(self, tokens):
        return self.layer(tokens).mean(1)


def release(run):
    run.train()
    return max(run.norms())


@pytest.mark.parametrize("size", [1e2, 1e4, 1e5, 1e7])
@pytest.mark.parametrize("inputs", [1, 8])
def test_tokens_that_cancel_do_not_hide_the_norm(inputs, size, monkeypatch):
    """Tokens ±a: their Gram sum in float32 is about zero, and what is left of the gradient is not.

    With the largest tokens float32 may leave the gradient no digit, and two ways to it other numbers: then it may be refused.
    """
    norms = []
    for seed in range(20):
        torch.manual_seed(seed)
        a = size * torch.randn(1, 1, inputs)
        tokens = torch.cat([a + 10 * torch.randn(1, 1, inputs), -a], dim=1)
        model = Mean(inputs)
        model.layer.weight.data.zero_()  # so that all classes are equally likely, and gradients long
        data = TensorDataset(tokens, torch.tensor([0]))
        run = Run(monkeypatch, data=data, batch=1, epochs=1, model=model, mode="ghost")
        try:
            norms.append(release(run))
        except RuntimeError as error:
            if size < 1e7 or "that autograd" not in str(error):
                raise
    assert max(norms) <= 1.0


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


def test_a_module_that_was_wrapped_for_another_norm_is_refused(monkeypatch):
    wrapped = GradSampleModuleFastGradientClipping(nn.Linear(6, 3), max_grad_norm=10.0)
    with pytest.raises(ValueError, match=r"GradSampleModuleFastGradientClipping already.*to_standard_module\(\)"):
        Run(monkeypatch, model=wrapped, mode="ghost")


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


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_short_matrix_products_do_not_lift_a_norm(precision, monkeypatch):
    """TF32 or bfloat16 inside products of matrices, where the processor has it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for seed in range(20):
            torch.manual_seed(seed)
            data = TensorDataset(torch.randn(1, 16, 64) * 100, torch.tensor([0]))
            assert release(Run(monkeypatch, data=data, batch=1, epochs=1, model=Mean(64, 32), mode="ghost")) <= 1.0
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_longest_sequence_of_all_parts_decides_whether_a_sum_is_safe(monkeypatch):
    checked = []
    monkeypatch.setattr("fedcgd.opacus.optimizer.check_size", lambda *size: checked.append(size))
    data = TensorDataset(torch.ones(6, 7, 64), torch.arange(6) % 64)
    run = Run(monkeypatch, data=data, batch=2, accumulation=3, epochs=1, model=Mean(64, 64), mode="ghost")
    for length, (tokens, targets) in zip((2, 7, 3), run.loader, strict=True):
        run.step((tokens[:, :length], targets))
    assert checked == [(2, 2), (4, 7), (6, 3), (6, 1)]  # as many as are issued by then; and the batch of all processes


class Text(nn.Module):
    """What is embedded and goes through a layer with a bias, in every place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.layer = nn.Embedding(5, 12), nn.Linear(12, 11)

    def forward(self, tokens):
        return self.layer(self.embedding(tokens)).mean(1)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("wrapper", [GhostModule, CompactModule])
@pytest.mark.parametrize("frozen", ["nothing", "embedding.weight", "layer.weight", "layer.bias"])
def test_short_forms_are_the_gradients_that_opacus_finds(wrapper, frozen):
    """With words that come several times in a text, and with a part of a layer that is not trained."""
    tokens, targets = torch.tensor([[0, 1, 0], [3, 3, 3], [4, 2, 1]]), torch.tensor([0, 2, 5])
    found = []
    for wrap in (wrapper, GradSampleModule):
        model = Text()
        if frozen != "nothing":
            model.get_parameter(frozen).requires_grad_(False)
        wrapped = wrap(model, loss_reduction="mean")
        functional.cross_entropy(wrapped(tokens), targets).backward()
        found.append({name: p.grad_sample for name, p in model.named_parameters() if p.requires_grad})
    assert len(found[0]) == (3 if frozen == "nothing" else 2)
    for name, expected in found[1].items():
        rows = found[0][name]
        rows = DenseGradients(rows) if isinstance(rows, torch.Tensor) else rows
        for i, gradient in enumerate(expected):
            alone = torch.zeros(gradient.numel(), dtype=torch.float64)
            rows.add_to(alone, torch.eye(3, dtype=torch.float64)[i], None)
            torch.testing.assert_close(alone, gradient.flatten().double(), rtol=1e-5, atol=1e-7)
            norm = float(rows.norms(True)[i].norm())
            assert norm >= float(gradient.norm()) * (1 - 1e-6)
