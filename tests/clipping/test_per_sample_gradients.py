"""Clipped per-example gradients against one backward pass per example."""

import math
from types import SimpleNamespace

import pytest
import torch
from oracles_gradients import clipped_sum
from torch import nn
from torch.nn import functional

from fedcgd.clipping import per_sample_gradients as gradients
from fedcgd.clipping.flat_models import flatten
from fedcgd.clipping.per_sample_gradients import clipped_gradient_sum, example_loss, refuse_batch_statistics
from fedcgd.noise.quantisation import Lattice


def cross_entropy(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")


STEP, LONG = 2.0**-24, 2**14


def setting():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4 * 4 * 4, 3))
    inputs, targets = 3 * torch.randn(23, 1, 6, 6), torch.randint(0, 3, (23,))
    return model, inputs, targets


def clipped(model, inputs, targets, *, clip_norm=1.0, step=STEP, **options):
    """(the sum in steps, how many were finite)"""
    loss, flat = example_loss(model, cross_entropy), flatten(model)
    return clipped_gradient_sum(loss, flat, (inputs, targets), clip_norm=clip_norm, grid=Lattice(step), **options)


@pytest.mark.parametrize("chunk", [1, 16, 23])
@pytest.mark.parametrize("clip_norm", [0.5, 2.0, 100.0])
def test_the_sum_is_that_of_one_backward_pass_per_example(chunk, clip_norm, monkeypatch):
    model, inputs, targets = setting()
    monkeypatch.setattr(gradients, "rows_at_once", lambda size, device: chunk)
    total, finite = clipped(model, inputs, targets, clip_norm=clip_norm)
    assert (finite, type(finite)) == (23, int)
    assert total.dtype == torch.int64
    expected = clipped_sum(model, zip(inputs, targets, strict=True), clip_norm)
    assert torch.allclose(total.double() * STEP, expected, atol=1e-5)


def test_an_entry_more_counts_who_was_within_the_norm():
    """As many examples as the median is above add as much as the others take away."""
    model, inputs, targets = setting()
    alone = [
        clipped(model, one[None], target[None], clip_norm=1e6, step=2.0**-12)[0]
        for one, target in zip(inputs, targets, strict=True)
    ]
    norms = torch.stack(alone).double().norm(dim=1) * 2.0**-12
    clip_norm = float(norms.sort().values[7:9].mean())
    assert int((norms < clip_norm).sum()) == 8
    total, _ = clipped(model, inputs, targets, clip_norm=clip_norm, indicator=1000)
    assert int(total[-1]) == 1000 * (8 - 15)


def test_as_many_gradients_at_once_as_fit_in_memory_and_at_least_one(monkeypatch):
    model, inputs, targets = setting()
    at_once, add_clipped_rows = [], gradients.add_clipped_rows

    def watched(total, parts, *settings):
        at_once.append(len(parts[0]))
        return add_clipped_rows(total, parts, *settings)

    monkeypatch.setattr(gradients, "add_clipped_rows", watched)
    size, several = flatten(model).numel(), ((10, [10, 10, 3]), (2, [8, 8, 7]), (0.5, [2] * 11 + [1]))
    for models, sizes in (*several, (0, [1] * 23), (10**6, [23])):
        monkeypatch.setattr(gradients, "CHUNK_ENTRIES", int(models * size) + 1)
        clipped(model, inputs, targets)
        assert at_once == sizes
        at_once.clear()


def test_on_a_gpu_gradients_take_a_sixteenth_of_its_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**36))
    sizes = [gradients.rows_at_once(size, torch.device("cuda")) for size in (10, 2**20, 2**40)]
    assert sizes == [4096, 1024, 1]  # 2³² bytes of float32, and never too many examples


FORMS = {"machine code": gradients._BY_MACHINE_CODE, "torch": gradients._BY_TORCH}


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    monkeypatch.setattr(gradients, "_form_for", lambda parts: FORMS[request.param])


def added(parts, clip_norm, step, unit=1.0, wanted=None):
    """(the sum in steps, the factors)"""
    wanted = torch.ones(len(parts[0]), dtype=torch.bool) if wanted is None else torch.tensor(wanted)
    total = torch.zeros(sum(part.shape[1] for part in parts), dtype=torch.int64)
    return total, gradients.add_clipped_rows(total, parts, wanted, clip_norm, Lattice(step), unit)


def test_each_example_is_rounded_towards_zero_before_the_sum(form):
    rows = torch.tensor([[0.6, -0.6, 0.24, 3.0], [0.6, -0.6, 0.24, -1.0]])
    # The third: 0.48 in all is a step, but 0.24 is none.
    assert added([rows], 1e9, 0.25)[0].tolist() == [4, -4, 0, 8]
    assert added([rows[:0]], 1e9, 0.25)[0].tolist() == [0, 0, 0, 0]
    many = torch.full((4096, 1), 1.0)
    assert added([many], 1e9, 2.0**-40)[0].tolist() == [4096 * 2**40]  # exact beyond 2²⁴ and 2³²


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_example_that_is_not_finite_adds_nothing_and_is_not_counted(bad):
    model, inputs, targets = setting()
    others, _ = clipped(model, inputs[1:], targets[1:])
    inputs[0, 0, 2, 2] = bad
    total, finite = clipped(model, inputs, targets)
    assert finite == 22
    assert torch.allclose(total * STEP, others * STEP, atol=1e-6)


def test_no_examples_give_zeros():
    model, inputs, targets = setting()
    total, finite = clipped(model, inputs[:0], targets[:0])
    assert finite == 0
    assert not total.any()


def test_a_flat_model_is_in_single_precision_whatever_the_module_is():
    assert flatten(nn.Linear(2, 2).double()).dtype == torch.float32


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.BatchNorm1d(3, track_running_stats=False).eval(),
        nn.InstanceNorm2d(3, track_running_stats=True),
    ],
)
def test_statistics_of_several_examples_are_refused(norm):
    model = nn.Sequential(nn.Linear(3, 3), norm)
    with pytest.raises(ValueError, match=r"'1'.*GroupNorm"):
        example_loss(model, cross_entropy)


def test_norms_of_one_example_and_frozen_statistics_are_welcome():
    frozen = nn.BatchNorm1d(3).eval(), nn.InstanceNorm2d(3, track_running_stats=True).eval()
    refuse_batch_statistics(nn.Sequential(nn.InstanceNorm2d(3), nn.GroupNorm(1, 3), nn.LayerNorm(3), *frozen))


def test_bad_arguments_are_refused():
    model, inputs, targets = setting()
    for clip_norm in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="clip_norm"):
            clipped(model, inputs, targets, clip_norm=clip_norm)
    with pytest.raises(ValueError, match=r"\[23, 22\]"):
        clipped(model, inputs, targets[1:])


@pytest.mark.parametrize("unit", [1.0, 0.25])
@pytest.mark.parametrize("size", [100, 2**14 + 3])
def test_rows_are_clipped_to_the_norm_whether_short_or_long(size, unit, form):
    """Each by the definition: min(1, ζ/‖g‖)·g for g = row / unit, in steps, towards zero."""
    rows = torch.randn(3, size, generator=torch.Generator().manual_seed(5))
    rows[1] *= 0.1 * unit / rows[1].norm()
    step = 2.0**-22
    for row in rows:
        total, factors = added([row[None, :7], row[None, 7:]], 1.0, step, unit)
        measured = row.double() / unit
        factor = min(1.0, 1.0 / float(measured.norm()))
        assert factors.item() == pytest.approx(factor, rel=1e-6)
        assert (factors.item() == 1) == (factor == 1)
        assert float((total * step).norm()) <= 1.0
        torch.testing.assert_close(total.double() * step, factor * measured, rtol=0, atol=2 * step)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e18, 3e38])
@pytest.mark.parametrize("size", [7, LONG + 77])
def test_no_row_exceeds_the_norm(scale, size, form):
    rows = (torch.rand(3, size, generator=torch.Generator().manual_seed(size)) * 2 - 1) * scale
    rows[1, :] = scale  # where rounding always takes the same side
    for row in rows:
        total, factors = added([row[None, :5], row[None, 5:]], 0.7, 2.0**-24)
        assert (factors.item() < 1) == (scale >= 1)
        length = math.sqrt(math.fsum((total.double() * 2.0**-24).square().tolist()))
        assert length <= 0.7
        assert length > 0.699 or scale < 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_or_not_wanted_adds_nothing(bad, form):
    rows = torch.ones(3, LONG)
    rows[0, -1] = bad
    parts = [rows[:, :5], rows[:, 5:]]  # what is bad in one makes all of the row bad
    total, factors = added(parts, 1.0, 2.0**-24, wanted=[True, True, False])
    assert (factors > 0).tolist() == [False, True, False]
    assert int(total.min()) == int(total.max()) == 2**24 // 128 - 1  # just below 1/√2¹⁴, of one row


def test_examples_of_which_memory_holds_one_at_a_time_are_computed_one_by_one():
    def of_one(flat, x):
        if len(x) > 1:
            raise MemoryError
        if x[0, 0] == 2:
            raise ValueError("label out of range")
        return x

    x = torch.arange(4.0)[:, None].expand(4, 5) * torch.arange(1.0, 6.0)
    rows, present, error = gradients._gradient_rows(of_one, torch.zeros(5), (x,))
    assert isinstance(error, MemoryError)
    assert present.tolist() == [True, True, False, True]
    assert torch.equal(rows, x * present[:, None])


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_of_other_types_do_not_exceed_the_norm(kind: torch.dtype) -> None:
    """A factor of eight bits would leave some of them longer."""
    for row in torch.randn(50, 300, generator=torch.Generator().manual_seed(1)).to(kind):
        total, _ = added([row[None]], 0.3, 2.0**-24)
        assert 0.2999 < float((total.double() * 2.0**-24).norm()) <= 0.3
