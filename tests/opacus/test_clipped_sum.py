"""Norms of gradients and their clipped sum: within the proven margin of exact ones, whatever the rows hold."""

import numpy as np
import pytest
import torch
from clipped import add_clipped

from fedcgd.central.releases import GRID_LOSS
from fedcgd.opacus import clipped_sum


@pytest.mark.parametrize("shape", [(1, 1), (3, 256), (4, 300), (9, 2048 * 2 + 77)])
def test_norms_and_sums_are_within_the_margin(shape: tuple[int, int]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, shape[0])[:, None]
    rows, exact = clipped_sum.DenseGradients(values), values.numpy().astype(np.float64)
    norms = np.sqrt((exact**2).sum(1))
    for fast in (True, False):
        np.testing.assert_allclose(rows.norms(fast).norm(dim=1).numpy(), norms, rtol=1e-5)
    total = torch.ones(shape[1], dtype=torch.float64)
    add_clipped([total], [rows])
    aim = 1 - clipped_sum.MARGIN
    expected = 1 + (np.minimum(1, aim / norms)[:, None] * exact).sum(0)
    np.testing.assert_allclose(total.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 40, 299])
def test_a_row_that_is_not_finite_adds_nothing(bad: float, place: int) -> None:
    values = torch.ones(6, 300)
    values[2, place] = bad
    total = torch.zeros(300, dtype=torch.float64)
    add_clipped([total], [clipped_sum.DenseGradients(values)])
    expected = 5 / 300**0.5 * (1 - clipped_sum.MARGIN)
    torch.testing.assert_close(total, torch.full((300,), expected, dtype=torch.float64))


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


def test_a_row_whose_squares_overflow_is_clipped() -> None:
    values = torch.zeros(2, 300)
    values[0, 0], values[1, 299] = 1e30, 0.25
    total = torch.zeros(300, dtype=torch.float64)
    add_clipped([total], [clipped_sum.DenseGradients(values)])
    assert total[[0, 299]].tolist() == [pytest.approx(1 - clipped_sum.MARGIN, rel=1e-6), 0.25]


def test_the_margin_covers_what_its_proof_counts():
    """As the head of `fedcgd.opacus.clipped_sum` has it: norms, entries whose squares vanish, the sum, and the grid."""
    norms = (clipped_sum._BLOCK + 2) * 2.0**-24 / 2
    vanished = 2.0**15 * 2.0**-63 / clipped_sum._LEAST_FAST_NORM
    examples = 2 * clipped_sum._MOST_EXAMPLES**2 * 2.0**-53
    sequences = 2 * clipped_sum._MOST_TERMS * 2.0**-53 / clipped_sum._GRAM_FLOOR**0.5
    assert norms + vanished + max(examples, sequences) + GRID_LOSS <= clipped_sum.MARGIN
