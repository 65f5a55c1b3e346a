"""Norms and weighted sums of rows by machine code: as torch makes them, whatever the rows hold, in any number of threads."""

import numpy as np
import pytest
import torch
from clipped import add_clipped

from fedcgd.opacus import clipped_sum, row_passes


@pytest.fixture(scope="module")
def passes() -> row_passes.RowPasses:
    made = row_passes.compiled()
    assert made is not None, "these tests need fedcgd installed where there is a C compiler"
    return made


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (4, 32), (9, 2048 * 2 + 77)])
def test_norms_and_sums(shape: tuple[int, int], threads: int, passes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_passes.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(row_passes, "_FOR_THREADS", 0)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator)
    factors = torch.rand(len(values), generator=generator, dtype=torch.float64)
    total = torch.rand(shape[1], generator=generator, dtype=torch.float64)
    expected = total.numpy().copy()
    for factor, row in zip(factors.numpy(), values.numpy(), strict=True):
        expected += factor * row.astype(np.float64)
    row_passes.add_rows(passes, total, values, factors)
    assert total.numpy().tobytes() == expected.tobytes()
    norms = np.sqrt((values.numpy().astype(np.float64) ** 2).sum(1))
    np.testing.assert_allclose(row_passes.norms(passes, values).numpy(), norms, rtol=1e-13)


def test_squares_neither_overflow_nor_vanish(passes) -> None:
    tiny, huge = float(np.float32(1e-45)), float(np.finfo(np.float32).max)
    values = torch.tensor([[tiny] * 4, [huge] * 4, [0.0] * 4])
    assert row_passes.norms(passes, values).tolist() == [2 * tiny, 2 * huge, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 40, 99])
def test_a_row_that_is_not_finite_adds_nothing(bad: float, place: int, passes) -> None:
    values = torch.ones(6, 100)
    values[2, place] = bad
    assert torch.isfinite(row_passes.norms(passes, values)).tolist() == [True, True, False, True, True, True]
    total = torch.zeros(100, dtype=torch.float64)
    add_clipped([total], [clipped_sum.DenseGradients(values)])
    torch.testing.assert_close(total, torch.full((100,), 0.5 * (1 - clipped_sum.MARGIN), dtype=torch.float64))


@pytest.mark.parametrize("bad", [0, 2, 4])
def test_factors_and_looked_up_rows_are_clipped_as_the_gradients_that_they_stand_for(bad: int) -> None:
    """An example that is not finite in one of them is left out of all, and the others keep their own factors."""
    generator = torch.Generator().manual_seed(4)
    sizes = torch.logspace(-1, 1, 5)
    b = sizes[:, None, None] * torch.randn(5, 1, 3, generator=generator)
    a, pairs = torch.randn(5, 1, 4, generator=generator), torch.tensor([[0, 1], [0, 3], [1, 0], [2, 2], [4, 3], [4, 0]])
    looked_up = sizes[pairs[:, 0], None] * torch.randn(6, 2, generator=generator)
    b[bad] = torch.nan
    table = torch.zeros(5, 6, 2).index_put_(tuple(pairs.T), looked_up)
    dense = [clipped_sum.DenseGradients(b.mT @ a), clipped_sum.DenseGradients(table)]
    short = [clipped_sum.FactoredGradients(b, a), clipped_sum.SparseGradients(*pairs.T, looked_up, 5)]
    sums = []
    for rows in (dense, short):
        sums.append([torch.zeros(12, dtype=torch.float64) for _ in rows])
        add_clipped(sums[-1], rows)
    for one, other in zip(*sums, strict=True):
        assert bool((one != 0).any())
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_row_whose_squares_overflow_is_clipped_without_a_compiler_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_passes, "compiled", lambda: None)
    values = torch.zeros(2, 300)
    values[0, 0], values[1, 299] = 1e30, 0.25
    total = torch.zeros(300, dtype=torch.float64)
    add_clipped([total], [clipped_sum.DenseGradients(values)])
    assert total[[0, 299]].tolist() == [pytest.approx(1 - clipped_sum.MARGIN, rel=1e-6), 0.25]


def test_torch_does_what_machine_code_cannot(passes) -> None:
    rows = torch.randn(8, 6)
    assert row_passes.passes_for(rows) is passes
    assert row_passes.passes_for(rows.double()) is None
    assert row_passes.passes_for(rows.T) is None
    assert row_passes.passes_for(rows.bfloat16()) is None


def test_the_clipped_sum_is_the_same_without_a_compiler(passes, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(17, 3000, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, 17)[:, None]
    sums = []
    for made in (passes, None):
        monkeypatch.setattr(row_passes, "compiled", lambda made=made: made)
        sums.append(torch.zeros(3000, dtype=torch.float64))
        add_clipped([sums[-1]], [clipped_sum.DenseGradients(values)])
    assert 0 < float((sums[0] - sums[1]).norm()) < 17 * clipped_sum.MARGIN


def test_the_margin_covers_what_its_proof_counts():
    """As the head of `fedcgd.opacus.clipped_sum` has it: norms, entries whose squares vanish, the sum, and the grid."""
    norms = (clipped_sum._BLOCK + 2) * 2.0**-24 / 2
    vanished = 2.0**15 * 2.0**-63 / clipped_sum._LEAST_FAST_NORM
    examples = 2 * clipped_sum._MOST_EXAMPLES**2 * 2.0**-53
    sequences = 2 * clipped_sum._MOST_TERMS * 2.0**-53 / clipped_sum._GRAM_FLOOR**0.5
    assert norms + vanished + max(examples, sequences) + clipped_sum.GRID_LOSS <= clipped_sum.MARGIN
