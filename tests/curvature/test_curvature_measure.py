"""Spectra of models: against autograd's full Hessian of small ones, and against matrices whose eigenvalues are known."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedcgd.curvature.hessian import Hessian, clip_factors
from fedcgd.curvature.lanczos import density, largest_eigenvalues
from fedcgd.curvature.measure import measure_spectrum
from fedcgd.curvature.public import Public, pretrained
from fedcgd.curvature.tail import PowerLaw, fit_power_law
from fedcgd.quadratic import Spectrum


def small(seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    return module, torch.randn(40, 6, dtype=torch.float64), torch.randint(0, 3, (40,))


def by_autograd(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, weights=None) -> np.ndarray:
    """The full Hessian by reverse mode twice: `torch.autograd.functional`, one flat vector, no chunks."""
    module.eval()
    shapes = [p.shape for p in module.parameters()]
    names = [n for n, _ in module.named_parameters()]

    def f(flat: torch.Tensor) -> torch.Tensor:
        parts = [p.reshape(s) for p, s in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
        outputs = torch.func.functional_call(module, dict(zip(names, parts, strict=True)), (inputs,))
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        return (losses if weights is None else losses * weights).sum() / len(inputs)

    at = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    result: np.ndarray = torch.autograd.functional.hessian(f, at).numpy()
    return result


def per_example(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize("loss", [per_example, functional.cross_entropy], ids=["per example", "mean"])
@pytest.mark.parametrize("chunk", [7, 500])
def test_products_are_those_of_autograds_hessian(loss, chunk: int) -> None:
    module, inputs, targets = small()
    expected = by_autograd(module, inputs, targets)
    module.train()  # as a caller may hand it over: dropout must not take part
    hessian = Hessian(module, loss, inputs, targets, chunk=chunk)
    vector = torch.randn(hessian.dimension, dtype=torch.float64)
    assert np.allclose(hessian.product(vector).numpy(), expected @ vector.numpy(), atol=1e-13)
    assert np.allclose(hessian.product(2 * vector).numpy(), 2 * expected @ vector.numpy(), atol=1e-13)
    assert np.allclose(hessian.matrix().numpy(), expected, atol=1e-13)
    assert (hessian.dimension, hessian.products) == (53, 55)
    assert module.training


@pytest.mark.parametrize("chunk", [7, 40])
def test_clipped_examples_count_less(chunk: int) -> None:
    module, inputs, targets = small()
    factors = clip_factors(module, per_example, inputs, targets, clip_norm=1.4)
    gradients = torch.func.vmap(
        torch.func.grad(
            lambda p, x, y: functional.cross_entropy(torch.func.functional_call(module.eval(), p, (x[None],)), y[None])
        ),
        in_dims=(None, 0, 0),
    )(dict(module.named_parameters()), inputs, targets)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
    assert torch.allclose(factors, (1.4 / norms).clamp(max=1))
    assert 0 < int((factors < 1).sum()) < 40
    expected = by_autograd(module, inputs, targets, factors)
    for loss in (per_example, functional.cross_entropy):
        hessian = Public(module, loss, inputs, targets=targets).hessian(clip_norm=1.4, chunk=chunk)
        assert np.allclose(hessian.matrix().numpy(), expected, atol=1e-13)


def test_frozen_parameters_are_left_out_and_buffers_kept() -> None:
    module, inputs, targets = small()
    full = by_autograd(module, inputs, targets)
    module[0].weight.requires_grad_(False)
    assert np.allclose(Hessian(module, per_example, inputs, targets).matrix(), full[30:, 30:], atol=1e-13)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": torch.zeros(39).long()}, "a target for each example, got 40 examples, 39 targets"),
        ({"inputs": torch.zeros(0, 6), "targets": torch.zeros(0).long()}, "got 0 examples"),
        ({"chunk": 0}, "at least 1 example, got 0"),
        ({"weights": torch.ones(3)}, r"a weight for each of 40 examples, got \(3,\)"),
        ({"module": nn.Identity()}, "no trained parameters"),
        ({"loss": lambda outputs, targets: outputs}, r"or their mean, got shape \(40, 3\)"),
        ({"vector": torch.ones(52)}, r"53 × 53, got a vector of shape \(52,\)"),
    ],
)
def test_hessians_that_make_no_sense(change, words: str) -> None:
    module, inputs, targets = small()
    values = {"module": module, "loss": per_example, "inputs": inputs, "targets": targets} | change
    vector = values.pop("vector", torch.ones(53))
    with pytest.raises(ValueError, match=words):
        Hessian(**values).product(vector)


def matrix_with(values: np.ndarray, seed: int = 0) -> torch.Tensor:
    q, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(values), len(values))))
    return torch.from_numpy(q * values @ q.T)


def test_largest_eigenvalues_are_those_of_a_known_matrix() -> None:
    values = np.concatenate([[9.0, 4.0, 3.9, 0.5], -np.linspace(0.1, 20, 96)])
    a = matrix_with(values)
    found = largest_eigenvalues(lambda v: a @ v, 100, 4, dtype=torch.float64)
    assert found == pytest.approx([9.0, 4.0, 3.9, 0.5], rel=1e-6)
    with pytest.raises(ValueError, match="got 100"):
        largest_eigenvalues(lambda v: a @ v, 100, 100, dtype=torch.float64)


def test_density_counts_and_sums_eigenvalues() -> None:
    values = np.concatenate([np.full(30, 5.0), np.full(70, 1.0), np.full(100, -2.0), np.zeros(200)])
    a = matrix_with(values)
    found = density(lambda v: a @ v, 400, probes=30, steps=20, dtype=torch.float64, device=torch.device("cpu"))
    for threshold, count in ((4.0, 30), (0.5, 100), (-1.0, 300)):
        about, error = found.count_above(threshold)
        assert 0 < error < 4
        assert abs(about - count) < 4 * error
    about, error = found.sum_positive()
    assert abs(about - 220) < 4 * error < 40
    assert found.at(np.array([1.0, 15.0, 60.0, 200.0, 390.0])) == pytest.approx([5, 5, 1, 0, -2], abs=1e-6)
    # One probe's quadrature is a distribution: four eigenvalues take four steps, and the others stay out.
    assert found.weights.sum(axis=1) == pytest.approx(np.ones(30))
    assert int((found.weights[0] > 1e-9).sum()) == 4


def test_a_power_law_is_found_again_and_is_eq_4() -> None:
    law = PowerLaw(scale=2.0, exponent=1.5, count=5000, smallest=1e-6)
    i = np.arange(1, 31)
    expected = np.exp(2.0 * np.log(5000 / i) ** 1.5 + np.log(1e-6))
    assert law(i) == pytest.approx(expected)
    assert law(np.array([5000, 5001])).tolist() == [pytest.approx(1e-6), 0.0]
    found = fit_power_law(expected, count=5000, smallest=1e-6)
    assert (found.scale, found.exponent) == (pytest.approx(2.0, rel=1e-5), pytest.approx(1.5, rel=1e-5))
    for odd, count, words in (
        ([3.0], 5000, "at least two"),
        ([3.0, 1e-7], 5000, "all above 1e-06"),
        ([3.0, 1.0], 2, "more than"),
    ):
        with pytest.raises(ValueError, match=words):
            fit_power_law(np.array(odd), count=count, smallest=1e-6)


def trained_cnn() -> Public:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 20), nn.Tanh(), nn.Linear(20, 4)).double()
    return pretrained(Public(module, per_example, torch.randn(60, 16, dtype=torch.float64), classes=4), epochs=30)


def test_a_measured_spectrum_bounds_the_full_one() -> None:
    """424 parameters: positions 11 … 424 are estimated, and the estimate is above at nearly all, by no more than a few times."""
    hessian = trained_cnn().hessian()
    told: list[str] = []
    full = measure_spectrum(hessian, eigenvalues=424)
    spectrum = measure_spectrum(hessian, eigenvalues=10, report=told.append)
    truth = np.linalg.eigvalsh(hessian.matrix().numpy())[::-1]
    assert truth[-1] < -1e-4
    assert full == Spectrum.from_eigenvalues(truth)
    assert full.measured_on["products"] == 424
    assert len(told) == 2
    assert (spectrum.dimension, spectrum.measured_on["examples"], spectrum.measured_on["parameters"]) == (424, 60, 424)
    assert spectrum.eigenvalues[-1] == 0
    expanded = np.repeat(spectrum.eigenvalues, np.round(spectrum.counts).astype(int))
    positive = np.maximum(truth, 0)
    assert expanded[:10] == pytest.approx(truth[:10], rel=1e-5)
    # The quadrature's error is that of four random vectors, so a few positions may be short of the truth by a little.
    assert np.mean(expanded[10:] >= 0.9 * positive[10:]) > 0.95
    assert 0.9 * positive.sum() < spectrum.trace < 3 * positive.sum()


def test_a_model_that_curves_in_few_directions_has_no_tail() -> None:
    torch.manual_seed(0)
    line = nn.Linear(30, 1, bias=False).double()
    inputs = torch.zeros(8, 30, dtype=torch.float64)
    inputs[:4, :4] = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64))
    hessian = Hessian(line, lambda o, t: (o[:, 0] - t) ** 2, inputs, torch.zeros(8, dtype=torch.float64))
    found = measure_spectrum(hessian, eigenvalues=6)
    assert found.eigenvalues == pytest.approx([4.0, 9 / 4, 1.0, 1 / 4, 0.0])  # 2·x²/8
    assert found.counts == (1, 1, 1, 1, 26)
    with pytest.raises(ValueError, match="got 1"):
        measure_spectrum(hessian, eigenvalues=1)


def test_random_labels_are_learned_from_public_examples_alone() -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    public = Public(module, per_example, torch.randn(200, 5), classes=3)
    labels = public.labels(7)
    assert torch.equal(labels, public.labels(7))
    assert not torch.equal(labels, public.labels(8))
    assert torch.bincount(labels, minlength=3).min() > 40
    before = [p.detach().clone() for p in module.parameters()]
    told: list[str] = []
    after = pretrained(public, epochs=40, seed=7, report=told.append)
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    assert after.labels(7).equal(labels)
    assert len(told) == 40
    # Labels without meaning teach it to be unsure: the entropy of what it says comes near log 3.
    chances = functional.softmax(after.module(public.inputs), dim=1)
    entropy = -(chances * chances.log()).sum(dim=1).mean().item()
    assert 0.97 * np.log(3) < entropy < np.log(3)
    given = Public(module, per_example, public.inputs, targets=labels)
    assert given.labels(0).equal(labels)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "either how many classes"),
        ({"classes": 3, "targets": torch.zeros(4)}, "either how many classes"),
        ({"classes": 1}, "at least 2 classes, got 1"),
        ({"targets": torch.zeros(3)}, "a target for each of 4 examples, got 3"),
        ({"classes": 2, "inputs": torch.zeros(0, 5)}, "no public examples"),
    ],
)
def test_public_examples_that_make_no_sense(change, words: str) -> None:
    values = {"module": nn.Linear(5, 3), "loss": per_example, "inputs": torch.zeros(4, 5)} | change
    with pytest.raises(ValueError, match=words):
        Public(**values)


def test_pretraining_that_diverges_or_makes_no_sense_is_refused() -> None:
    squares = Public(nn.Linear(5, 1), lambda o, t: (o[:, 0] - t) ** 2, torch.randn(50, 5), targets=torch.randn(50))
    with pytest.raises(ValueError, match="lower the"):
        pretrained(squares, learning_rate=1e6, epochs=50)
    with pytest.raises(ValueError, match="got 1"):
        pretrained(squares, epochs=1, batch=0)
    frozen = nn.Linear(5, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="no trained"):
        pretrained(Public(frozen, squares.loss, squares.inputs, targets=squares.targets))
