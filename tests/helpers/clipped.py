"""The sum of clipped gradients of examples, as a step of central training makes it."""

from collections.abc import Sequence

from torch import Tensor

from fedcgd.opacus.clipped_sum import PerSampleGradients, clip_factors


def add_clipped(totals: Sequence[Tensor], rows: Sequence[PerSampleGradients]) -> None:
    """totals += Σ_i min(1, ζ′/‖g_i‖)·g_i for ζ = 1, in place."""
    _, factors, usable = clip_factors(rows, clip_norm=1.0)
    for total, row in zip(totals, rows, strict=True):
        row.add_to(total, factors, usable)
