"""Flower: the server strategy, the client mod, and nodes that host many users."""

from fedcgd_flower.adaptive_clipping import AdaptiveClipping
from fedcgd_flower.evaluation import PrivateEvaluation
from fedcgd_flower.layout import arrays_of, load_arrays
from fedcgd_flower.mod import ClippedUpdateMod, clipped_update_mod
from fedcgd_flower.pool import LocalEvaluation, LocalTask, host_users, one_by_one, one_gradient_step
from fedcgd_flower.result import IncompleteRunError, RunResult
from fedcgd_flower.strategy import CorrelatedNoise

__all__ = [
    "AdaptiveClipping",
    "ClippedUpdateMod",
    "CorrelatedNoise",
    "IncompleteRunError",
    "LocalEvaluation",
    "LocalTask",
    "PrivateEvaluation",
    "RunResult",
    "arrays_of",
    "clipped_update_mod",
    "host_users",
    "load_arrays",
    "one_by_one",
    "one_gradient_step",
]
