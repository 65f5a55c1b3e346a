"""Gradients in short forms and their clipped sum: within the proven margin of exact ones, whatever the rows hold."""

import numpy as np
import pytest
import torch
from clipped import add_clipped

from fedcgd.central.releases import GRID_LOSS
from fedcgd.opacus import clipped_sum


def forms(bad: int | None = None) -> tuple[list[torch.Tensor], list[clipped_sum.Rows]]:
    """Five examples with a linear layer and a table of six rows, some of which they looked up: plain and in short forms."""
    generator = torch.Generator().manual_seed(4)
    sizes = torch.logspace(-1, 1, 5)
    b = sizes[:, None, None] * torch.randn(5, 1, 3, generator=generator)
    a, pairs = torch.randn(5, 1, 4, generator=generator), torch.tensor([[0, 1], [0, 3], [1, 0], [2, 2], [4, 3], [4, 0]])
    looked_up = sizes[pairs[:, 0], None] * torch.randn(6, 2, generator=generator)
    if bad is not None:
        (b, a)[bad // 2 % 2][bad] = torch.nan
    table = torch.zeros(5, 6, 2).index_put_(tuple(pairs.T), looked_up)
    short = [clipped_sum.FactoredGradients(b, a), clipped_sum.SparseGradients(*pairs.T, looked_up, 5)]
    return [(b.mT @ a).flatten(1), table.flatten(1)], short


@pytest.mark.parametrize("bad", [None, 0, 2, 4])
def test_short_forms_are_clipped_as_the_gradients_that_they_stand_for(bad: int | None) -> None:
    """An example that is not finite in one of them is left out of all, and the others keep their own factors."""
    dense, short = forms(bad)
    exact = torch.cat(dense, dim=1).double()
    exact = exact[exact.isfinite().all(1)]
    aim = (1 - clipped_sum.MARGIN) / exact.norm(dim=1, keepdim=True)
    expected = (exact * aim.clamp(max=1)).sum(0)
    for rows in (dense, short):
        sums = [torch.zeros(12, dtype=torch.float64) for _ in rows]
        add_clipped(sums, rows)
        torch.testing.assert_close(torch.cat(sums), expected, rtol=1e-5, atol=1e-6)


def test_looked_up_rows_are_rounded_towards_zero_and_factors_once() -> None:
    scales, (dense, (factors, table)) = torch.full((5,), 7.3, dtype=torch.float64), forms()
    for rows, whole, rounded in ((factors, dense[0], False), (table, dense[1], True)):
        total = torch.zeros(12, dtype=torch.int64)
        rows.add_to(total, scales)
        terms = whole.double().numpy() * 7.3
        expected = np.trunc(terms).sum(0) if rounded else np.rint(terms.sum(0))
        assert total.tolist() == expected.tolist()


def test_a_sequence_whose_terms_cancel_is_clipped_although_its_gram_sum_is_zero() -> None:
    """Terms of 2³⁰ that leave a gradient of 8: in float64 the squares of their difference vanish beside those of the terms."""
    b = torch.tensor([[[2.0**30], [-(2.0**30)]]])
    a = torch.tensor([[[1.0, 2.0**-27], [1.0, 0.0]]])
    assert (b.mT.double() @ a.double()).norm() == 8
    total = torch.zeros(2, dtype=torch.float64)
    add_clipped([total], [clipped_sum.FactoredGradients(b, a)])
    assert total.norm() <= 1


@pytest.mark.parametrize(
    ("limit", "of_five", "length"), [("_MOST_EXAMPLES", 5, 1), ("_MOST_TERMS", 5 * (4 + 2 + 5), 2)]
)
def test_a_sum_that_is_too_long_for_the_margin_is_refused(limit, of_five, length, monkeypatch) -> None:
    monkeypatch.setattr(clipped_sum, "_ROWS_AT_ONCE", 4)
    factors = clipped_sum.FactoredGradients(torch.ones(5, length, 3), torch.ones(5, length, 4))
    monkeypatch.setattr(clipped_sum, limit, of_five)
    add_clipped([torch.zeros(12, dtype=torch.float64)], [factors])
    monkeypatch.setattr(clipped_sum, limit, of_five - 1)
    with pytest.raises(ValueError, match="examples"):
        add_clipped([torch.zeros(12, dtype=torch.float64)], [factors])


def test_the_margin_covers_what_its_proof_counts() -> None:
    """As the head of `fedcgd.opacus.clipped_sum` has it: the sum, and the grid."""
    examples = 2 * clipped_sum._MOST_EXAMPLES**2 * 2.0**-53
    sequences = 2 * clipped_sum._MOST_TERMS * 2.0**-53 / clipped_sum._GRAM_FLOOR**0.5
    assert max(examples, sequences) + GRID_LOSS <= clipped_sum.MARGIN


def test_a_row_whose_terms_cancel_has_a_512th_of_their_norm_at_least() -> None:
    """What is added later is a float32 sum of the terms, whose rounding may be larger than what is left of them."""
    b, a = torch.ones(1, 2, 1), torch.tensor([[[1000.0], [-1000.0]]])
    assert float(clipped_sum.FactoredGradients(b, a).squares()[0]) == pytest.approx((2000 / 512) ** 2, rel=1e-6)
