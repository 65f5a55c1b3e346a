"""Flower: the server strategy, the client mod, and nodes that host many users."""

from fedcgd_flower.mod import clipped_update_mod
from fedcgd_flower.pool import LocalTask, declare_users, host_users, one_by_one, one_gradient_step
from fedcgd_flower.result import IncompleteRunError, RunResult
from fedcgd_flower.strategy import CorrelatedNoise

__all__ = [
    "CorrelatedNoise",
    "IncompleteRunError",
    "LocalTask",
    "RunResult",
    "clipped_update_mod",
    "declare_users",
    "host_users",
    "one_by_one",
    "one_gradient_step",
]
