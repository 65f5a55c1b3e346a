"""Σ_i min(1, ζ′/‖g_i‖)·g_i over the examples of a batch, from gradients as Opacus leaves them, with a proven bound.

Guarantee: leaving one example out of a round (of a size that `check_size` allows) moves the round's sum by at most ζ in L2 norm,
also after rounding to a grid whose step is at most `GRID_LOSS`·ζ/√d for d coordinates. The sum aims at
ζ′ = ζ·(1 − `MARGIN`), and MARGIN = 6.1e-5 covers, relative to ζ:

- 0.8e-5: norms. Squares are summed in float32 over blocks of 256 entries, in whatever order: at most 258 roundings of 2⁻²⁴
  each, halved by the root; everything after that is float64. 0.4e-5: entries whose squares underflow, below 2⁻⁶³ each, as
  ζ is at least 2⁻³⁰ and a gradient has less than 2³⁰ entries. For a smaller ζ, where squares overflow, and in machine code,
  squares are float64.
- 1.5e-5 = 2⁻¹⁶: the sum, made in float64. With k additions to a coordinate, in any order, its error is at most
  k·2⁻⁵³·Σ_i ‖term i‖; it counts twice, with and without the example. 2¹⁸ examples give 2·2³⁶·2⁻⁵³.
- 0.8e-5: the grid. Rounding to the nearest moves each of the two sums by half a step in each coordinate. Where a batch comes in
  parts (`accumulation_steps`, ranks), each part's sum is rounded, and an example is in one of them; adding them up is exact.

Nothing here depends on the precision in which the gradients were computed (bfloat16, TF32): they are clipped as they are, and
products of matrices, where they are needed, are made in float64.

With ghost clipping the gradients of linear layers are not there, but the factors that they are products of. On sequences
g_i = Σ_t b_t a_tᵀ may be far smaller than its terms, and what rounds are the terms. So to the square of the norm, a Gram sum in
float64, 2⁻¹⁸·(Σ_t ‖b_t‖‖a_t‖)² is added: more than the Gram sum can lose, and enough that the terms are at most 2⁹ times the
norm. For m examples of length T the sum has k ≤ 4096 + m·T/4096 + m, and m·k ≤ 2²⁷ makes 2·2²⁷·2⁹·2⁻⁵³ = 2⁻¹⁶ again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedcgd.opacus.gradient_forms import ROWS_AT_ONCE, PerSampleGradients, norm

MARGIN = 2.0**-14
GRID_LOSS = 2.0**-17

_MOST_EXAMPLES = 2**18
_MOST_TERMS = 2**27
_LEAST_FAST_NORM = 2.0**-30


class Clipped(NamedTuple):
    """The gradients of the examples of one backward pass, and what clips them (`clip_factors`)."""

    rows: Sequence[PerSampleGradients]
    """An entry for each trained parameter."""
    factors: Tensor
    usable: Tensor | None

    def add_to(self, total: Tensor, parameter: int) -> None:
        """Add the clipped sum of that parameter to `total`, flat, float64."""
        self.rows[parameter].add_to(total, self.factors, self.usable)


def clip_factors(rows: Sequence[PerSampleGradients], clip_norm: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """(norms, factors, usable): with the last two, each of `rows` adds its part of Σ_i min(1, ζ′/‖g_i‖)·g_i (`add_to`).

    Norms are over all of `rows`, which hold one parameter each; shape (examples,), float64. An example with an entry that is not
    finite has a norm that is not, and adds zero; what the others add is as without it. `usable` is None if all are finite.
    """
    aim = clip_norm * (1 - MARGIN)
    fast = clip_norm >= _LEAST_FAST_NORM
    norms = _norms(rows, fast)
    finite = torch.isfinite(norms)
    all_finite = bool(finite.all())  # for which a GPU has to be waited for
    if fast and not all_finite:
        norms = torch.where(finite, norms, _norms(rows, False))
        finite = torch.isfinite(norms)
        all_finite = bool(finite.all())
    factors = torch.where(finite, (aim / norms).clamp(max=1.0), 0.0)
    return norms, factors, None if all_finite else finite  # 0·NaN is NaN: a factor of zero is not enough


def _norms(rows: Sequence[PerSampleGradients], fast: bool) -> Tensor:
    return norm(torch.cat([row.norms(fast) for row in rows], dim=1))


def check_size(examples: int, length: int) -> None:
    """Raise ValueError unless the sum over `examples` examples, of sequences of at most `length`, is within `MARGIN`."""
    additions = ROWS_AT_ONCE + examples * length // ROWS_AT_ONCE + examples
    if examples > _MOST_EXAMPLES or (length > 1 and examples * additions > _MOST_TERMS):
        raise ValueError(
            f"a batch may have {_MOST_EXAMPLES} examples, and with ghost clipping of sequences about 8000: in larger sums "
            "rounding could exceed the clip norm; take more and smaller batches"
        )
