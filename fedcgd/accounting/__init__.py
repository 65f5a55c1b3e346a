"""Accounting: upper bounds on ε, and the noise multiplier that a budget allows."""

from fedcgd.accounting.api import Method, accountant, calibrate, compute_delta, compute_epsilon
from fedcgd.accounting.base import Accountant
from fedcgd.accounting.guarantee import ADJACENCY, Guarantee

__all__ = [
    "ADJACENCY",
    "Accountant",
    "Guarantee",
    "Method",
    "accountant",
    "calibrate",
    "compute_delta",
    "compute_epsilon",
]
