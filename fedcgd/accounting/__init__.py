"""Accounting: upper bounds on ε, and the noise multiplier that a budget allows."""

from fedcgd.accounting.calibrate import Method, calibrate, delta, epsilon
from fedcgd.accounting.guarantee import ADJACENCY, Guarantee

__all__ = ["ADJACENCY", "Guarantee", "Method", "calibrate", "delta", "epsilon"]
