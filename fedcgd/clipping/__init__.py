"""Clipping: of flat updates (NumPy), and of the gradients of a model's examples (torch, loaded when it is first used)."""

from typing import TYPE_CHECKING

from fedcgd.clipping.norms import ROUNDING, clip, clip_factor
from fedcgd.support.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from fedcgd.clipping.per_sample_gradients import clipped_gradient_sum, example_loss

__all__ = ["ROUNDING", "clip", "clip_factor", "clipped_gradient_sum", "example_loss"]

__getattr__ = lazy_exports(__name__, dict.fromkeys(("clipped_gradient_sum", "example_loss"), "per_sample_gradients"))
