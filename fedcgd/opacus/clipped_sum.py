"""Gradients of a batch's examples for one parameter each, as a backward pass of Opacus leaves them, and their clipped sum.

They are rows of a tensor, or one of two short forms: the rows of a table that each example looked up (`SparseGradients`), and the
factors of linear layers (`FactoredGradients`, ghost clipping). Rows are clipped and added as in
`fedcgd.clipping.per_sample_gradients`: each term is rounded towards zero to the lattice, so that its norm is at most ζ.

Guarantee: leaving one example out of a round moves the round's sum by at most ζ in L2 norm. With factors the sum of a layer is
made in float64 and rounded to the lattice once, so clipping aims at ζ·(1 − `MARGIN`), and MARGIN = 3.1e-5 covers, relative to ζ:

- 1.5e-5 = 2⁻¹⁶: the sum. With k additions to a coordinate, in any order, its error is at most k·2⁻⁵³·Σ_i ‖term i‖;
  it counts twice, with and without the example. 2¹⁸ examples give 2·2³⁶·2⁻⁵³.
- 0.8e-5: the lattice, whose step is at most 2⁻¹⁷·ζ/√d for d coordinates. Rounding to the nearest moves each of the two sums by
  half a step in each coordinate.

On sequences g_i = Σ_t b_t a_tᵀ may be far smaller than its terms, and what rounds are the terms. So to the square of the norm, a
Gram sum in float64, 2⁻¹⁸·(Σ_t ‖b_t‖‖a_t‖)² is added: more than the Gram sum can lose, and enough that the terms are at most 2⁹
times the norm. For m examples of length T the sum has k ≤ 4096 + m·T/4096 + m, and m·k ≤ 2²⁷ makes 2·2²⁷·2⁹·2⁻⁵³ = 2⁻¹⁶ again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from fedcgd.clipping.per_sample_gradients import add_rows, clip_factors, squared_norms
from fedcgd.noise.quantisation import Lattice

MARGIN = 2.0**-15

_MOST_EXAMPLES = 2**18
_MOST_TERMS = 2**27
_ROWS_AT_ONCE = 4096
_GRAM_FLOOR = 2.0**-18
_NUMBERS_AT_ONCE = 2**22  # of a Gram matrix or of copies, 32 MiB


@dataclass
class SparseGradients:
    """Row i is zero but for the rows of the parameter that example i looked up.

    `values[j]` belongs to example `example[j]` and to row `index[j]` of the parameter, each pair at most once.
    """

    example: Tensor
    index: Tensor
    values: Tensor
    examples: int

    def __len__(self) -> int:
        return self.examples

    @property
    def dtype(self) -> torch.dtype:
        """In which type gradients were made."""
        return self.values.dtype

    def squares(self) -> Tensor:
        """Of the norms of the rows, shape (examples,), float64; not finite where a row is not."""
        squares = self.values.double().square().sum(dim=1)
        return squares.new_zeros(self.examples).index_add_(0, self.example, squares)

    def add_to(self, total: Tensor, scales: Tensor) -> None:
        """As `per_sample_gradients.add_rows`."""
        scale = scales[self.example][:, None]
        terms = torch.where(scale > 0, self.values.double() * scale, 0.0)
        total.view(-1, self.values.shape[1]).index_add_(0, self.index, terms.to(total.dtype))


@dataclass
class FactoredGradients:
    """Row i is Σ_t b_it a_itᵀ: `b` has shape (examples, T, outputs), `a` (examples, T, inputs)."""

    b: Tensor
    a: Tensor

    def __len__(self) -> int:
        return len(self.b)

    @property
    def dtype(self) -> torch.dtype:
        """In which type factors were made."""
        return self.b.dtype

    def squares(self) -> Tensor:
        """Of bounds on the norms of the rows and on a 512th of the norms of their terms, shape (examples,), float64."""
        length = self.b.shape[1]
        # Squares below 1e-323 vanish, and with them a norm; the other factor may be 1e308. 1e-150 is more than can be lost.
        b_norms = torch.linalg.vector_norm(self.b, dim=2, dtype=torch.float64).add_(1e-150)
        a_norms = torch.linalg.vector_norm(self.a, dim=2, dtype=torch.float64).add_(1e-150)
        terms: Tensor = (b_norms * a_norms).sum(dim=1).square()
        if length == 1:
            return terms
        few = max(1, _NUMBERS_AT_ONCE // (length * max(length, self.b.shape[2] + self.a.shape[2])))
        gram = []
        for b, a in zip(torch.split(self.b.double(), few), torch.split(self.a.double(), few), strict=True):
            gram.append((torch.bmm(b, b.mT) * torch.bmm(a, a.mT)).sum((1, 2)).clamp(min=0))
        return torch.cat(gram).add_(terms, alpha=_GRAM_FLOOR)

    def add_to(self, total: Tensor, scales: Tensor) -> None:
        """total += Σ_i scales[i]·row i, rounded to the nearest once if it is int64; rows of scale 0 do not count.

        Raises:
            ValueError: for more examples, of sequences, than `MARGIN` covers.
        """
        examples, length = self.b.shape[:2]
        additions = _ROWS_AT_ONCE + examples * length // _ROWS_AT_ONCE + examples
        if examples > _MOST_EXAMPLES or (length > 1 and examples * additions > _MOST_TERMS):
            raise ValueError(
                f"a batch may have {_MOST_EXAMPLES} examples, and with ghost clipping of sequences about 8000: in larger sums "
                "rounding could exceed the clip norm; take more and smaller batches"
            )
        scaled = (self.b.double() * scales[:, None, None]).flatten(0, 1)
        sums = scaled.new_zeros(self.b.shape[2], self.a.shape[2])
        for left, right in zip(
            torch.split(scaled, _ROWS_AT_ONCE), torch.split(self.a.flatten(0, 1), _ROWS_AT_ONCE), strict=True
        ):  # 0·NaN is NaN: a factor of zero is not enough
            sums.addmm_(left.nan_to_num(0, 0, 0).T, right.nan_to_num(0, 0, 0).double())
        total += sums.flatten() if total.is_floating_point() else sums.flatten().round_().to(torch.int64)


Rows = Tensor | SparseGradients | FactoredGradients
"""The gradients of some examples for one parameter; a tensor has shape (examples, size of the parameter)."""


def squares_of(rows: Rows) -> Tensor:
    """Squares of the norms of the gradients, shape (examples,), float64."""
    return squared_norms([rows]) if isinstance(rows, Tensor) else rows.squares()


def add_clipped(totals: Sequence[Tensor], rows: Sequence[Rows], clip_norm: float, grid: Lattice | None) -> None:
    """totals += Σ_i min(1, ζ′/‖g_i‖)·g_i in steps of `grid`, ζ′ = `clip_norm`·(1 − `MARGIN`), in place.

    An example with an entry that is not finite adds zero, and what the others add is as without it.

    Args:
        totals: of each parameter, flat: int64, or float64 without a grid.
        rows: the gradients of the same examples for each parameter.
        clip_norm: ζ, of all parameters together.
        grid: what totals are in steps of; None without noise.
    """
    squares = reduce(torch.add, map(squares_of, rows))
    scales = clip_factors(squares, clip_norm * (1 - MARGIN)) / (1.0 if grid is None else grid.step)
    for total, one in zip(totals, rows, strict=True):
        if isinstance(one, Tensor):
            add_rows(total, one, scales)
        else:
            one.add_to(total, scales)


def passes_of(parameter: Any) -> list[Rows]:
    """The gradients of the examples for `parameter`, one entry for each backward pass."""
    found = getattr(parameter, "grad_sample", None)
    passes = found if isinstance(found, list) else [] if found is None else [found]
    size = parameter.numel()
    return [one.detach().reshape(len(one), size) if isinstance(one, Tensor) else one for one in passes]


def check_passes(
    module: nn.Module, parameters: Sequence[nn.Parameter], rows: Sequence[Rows], copies: int
) -> list[Rows]:
    """`rows` of one backward pass, an entry for each of `parameters`, with the mean of each `copies` rows in their place.

    Raises:
        RuntimeError: if there are other numbers of rows for some parameters than for others, or no multiple of `copies`.
    """
    counts = [*map(len, rows)]
    examples = max(counts)
    if min(counts) != examples:
        odd = {p for p, count in zip(parameters, counts, strict=True) if count != examples}
        names = [name for name, p in module.named_parameters() if p in odd]
        raise RuntimeError(
            f"the parameters have gradients of different numbers of examples, {names[0]!r} and {len(names) - 1} others "
            f"of fewer than {examples}: the batch must be the first dimension (or batch_first=False) of the input of "
            "every layer. Position ids that a model makes itself have one row for all; give it position_ids with a row "
            "for each example, or freeze that layer"
        )
    if copies == 1:
        return list(rows)
    if examples % copies:
        raise RuntimeError(
            f"the model was given {examples} rows, no multiple of augmentation_multiplicity={copies}: give it all rows of the "
            "loader's batch, in their order; all copies of an example are in it already, one after the other"
        )
    return [
        row.view(-1, copies, row.shape[1]).mean(1) for row in rows if isinstance(row, Tensor)
    ]  # short forms have none
