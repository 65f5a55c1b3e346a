"""The sum of clipped gradients of examples, as a step of central training makes it, without noise."""

from collections.abc import Sequence

from torch import Tensor

from fedcgd.opacus import clipped_sum


def add_clipped(totals: Sequence[Tensor], rows: Sequence[clipped_sum.Rows]) -> None:
    """totals += Σ_i min(1, ζ′/‖g_i‖)·g_i for ζ = 1, in place; float64."""
    clipped_sum.add_clipped(totals, rows, clip_norm=1.0, grid=None)
