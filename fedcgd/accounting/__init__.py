"""Accounting: upper bounds on ε, and the noise multiplier that a budget allows."""

from fedcgd.accounting.api import Method, calibrate, compute_delta, compute_epsilon
from fedcgd.accounting.guarantee import ADJACENCY, Guarantee

__all__ = ["ADJACENCY", "Guarantee", "Method", "calibrate", "compute_delta", "compute_epsilon"]
